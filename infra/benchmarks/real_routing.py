"""The service's evaluation of routing that other people measured on real models.

Usage: real_routing.py [--data FOLDER] [--residency 0.3 0.6 0.8] [--out FILE]. The data lies beside the checkout.
Prompts are sessions and their subjects workloads: those of gpt-oss-20b have a hundred categories of a few prompts each,
which are put together by field here. A session's side of the split follows from its number. Everything else is what the
service does with uploads: nothing here places, counts or judges. Sessions that fell into a loop are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import parser_of, report

from spark_runtime.calibration.sessions import SessionPart
from spark_runtime.recency import RecencyOrder
from spark_schemas.ids import Phase
from spark_schemas.model import ExpertLayer, ModelShape
from spark_service.builders import Inputs, build_profile

DATA = Path(__file__).resolve().parents[3] / "shared/data/routing"
FIELDS = {
    "safety": r"^sorry",
    "computing": r"comput|machine.learning|engineering",
    "mathematics": r"math|algebra|statistic|formal.logic",
    "physics": r"physic|astro|mechanic|electromagnet|optics|relativ",
    "life-sciences": r"chem|biolog|genetic|anatom|virolog|nutrit|medic|clinical|aging|health|sexuality",
    "humanities": r"histor|philosoph|moral|logical|law|jurisprud|religio|prehistor",
    "society": r"econo|business|manage|account|market|psycholog|sociolog|politic|geograph|polic|relation|fact|global",
}
"""Workloads by what a prompt's dataset and category say, the first that fits; the rest is ``other``."""
COLUMNS = ("uniform", "random", "own", "other", "lru", "oracle")


@dataclass(frozen=True, slots=True)
class Source:
    """One folder of the data."""

    folder: str
    model: str
    top_k: int
    phase: Phase


SOURCES = (
    Source("gptoss20b", "gpt-oss-20b", 4, "decode"),
    Source("esft_deepseek_v2_lite", "DeepSeek-V2-Lite", 6, "prefill"),
)


def workload_of(about: Mapping[str, Any]) -> str:
    """The workload of a session by what ``sessions.json`` says of it."""
    if "domain" in about:
        return str(about["domain"])
    text = f"{about['dataset']} {about['category']}".lower()
    category = text if text.startswith("sorry") else str(about["category"]).lower()
    return next((name for name, pattern in FIELDS.items() if re.search(pattern, category)), "other")


def shape_of(source: Source, n_layers: int, n_experts: int) -> ModelShape:
    """A model of the data's shape; all experts weigh the same, as they do in these models."""
    layers = tuple(
        ExpertLayer(block=b, n_experts=n_experts, top_k=source.top_k, expert_bytes=2**20, tensor_types={"up": "q4_K"})
        for b in range(n_layers)
    )
    return ModelShape(
        fingerprint="mf1-" + hashlib.sha256(source.model.encode()).hexdigest()[:32],
        sibling="ms1-" + hashlib.sha256(source.model.encode()).hexdigest()[:32],
        architecture="published",
        n_blocks=n_layers,
        context_length=4096,
        core_bytes=0,
        kv_bytes_per_token=0,
        layers=layers,
    )


def parts_of(source: Source, data: Path) -> tuple[ModelShape, dict[str, list[SessionPart]]]:
    """Parts by workload, counted from the token-level selections as an agent counts them."""
    folder = data / source.folder
    with np.load(folder / "session_counts.npz") as file:
        counts = file["counts"].astype(np.int64)
    with np.load(folder / "tokens.npz") as file:
        experts, offsets = file["experts"], file["offsets"]
    parts: dict[str, list[SessionPart]] = {}
    for index, about in enumerate(json.loads((folder / "sessions.json").read_text())):
        if about.get("repetition"):
            continue
        ids = experts[offsets[index] : offsets[index + 1]].astype(np.int64)
        found = [np.bincount(layer.ravel(), minlength=counts.shape[2]) for layer in ids.swapaxes(0, 1)]
        if not np.array_equal(found, counts[index]):
            raise SystemExit(f"error: {folder.name}: session {index}: tokens and counts differ, expected the same")
        name = hashlib.sha256(f"{source.folder} {index}".encode()).hexdigest()
        workload = workload_of(about)
        reuse = reuse_of(ids, counts.shape[2]) if source.phase == "decode" else None
        parts.setdefault(workload, []).append(SessionPart(name, workload, name, len(ids), tuple(counts[index]), reuse))
    return shape_of(source, *counts.shape[1:]), parts


def reuse_of(ids: np.ndarray, n_experts: int) -> tuple[np.ndarray, ...]:
    """Reuse distances per layer of ``ids[token, layer, selection]``."""
    return tuple(
        np.bincount(RecencyOrder(n_experts).observe(layer).ravel(), minlength=n_experts + 1)
        for layer in ids.swapaxes(0, 1)
    )


def rows_of(source: Source, data: Path, residencies: Sequence[float]) -> list[dict[str, Any]]:
    """One row for each workload and residency."""
    shape, parts = parts_of(source, data)
    rows = []
    for workload in sorted(parts):
        inputs = Inputs.of_parts(shape, workload, parts)
        built = build_profile(shape, workload, source.phase, "0" * 64, inputs)
        if built is None:
            continue
        profile = built.profile
        for residency in residencies:
            points = {point.policy: point for point in profile.curves if point.residency == residency}
            rows.append(
                {
                    "model": source.model,
                    "phase": source.phase,
                    "workload": workload,
                    "residency": residency,
                    "n_calibration": profile.n_calibration,
                    "n_held_out": profile.n_held_out,
                    "verdict": profile.verdict,
                    "cold_hit_rate": {p: round(points[p].cold_hit_rate, 4) for p in COLUMNS if p in points},
                    "own_interval": [round(points["own"].low, 4), round(points["own"].high, 4)] if points else None,
                }
            )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'model':18}{'workload':24}{'resident':>8}{'sessions':>10} " + "".join(f"{name:>9}" for name in COLUMNS)]
    for row in rows:
        rates = "".join(f"{row['cold_hit_rate'].get(name, float('nan')):9.3f}" for name in COLUMNS)
        sessions = f"{row['n_calibration']}+{row['n_held_out']}"
        start = f"{row['model']:18}{row['workload']:24}{row['residency']:>8.0%}{sessions:>10} "
        lines.append(f"{start}{rates}  {row['verdict'] or 'too few'}")
    return "\n".join(lines)


def main() -> None:
    """Evaluate, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the data")
    parser.add_argument("--residency", type=float, nargs="+", default=[0.3, 0.6, 0.8])
    options = parser.parse_args()
    rows = [row for source in SOURCES for row in rows_of(source, options.data, options.residency)]
    print(table(rows), file=sys.stderr)
    report({"rows": rows}, options.out)


if __name__ == "__main__":
    main()
