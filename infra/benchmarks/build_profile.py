"""How long the service takes to build a profile, and where uniform slots and reuse distances stand.

Usage: build_profile.py [--sessions N] [--layers L] [--experts E] [--out FILE]. Sessions are synthetic (Zipf-like
selections, one hot set per workload): what is measured is the arithmetic, which does not depend on the numbers.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from report import parser_of, report

from spark_runtime.placement import layer_sizes, residency_budget, uniform_slots
from spark_runtime.recency import RecencyOrder
from spark_schemas.model import ExpertLayer, ModelShape
from spark_service.builders import build_profile
from spark_service.sessions import SessionPart

TOP_K, TOKENS, EXPERT_BYTES = 8, 2000, 2_654_208
WORKLOADS = ("chat", "code-heavy", "docs")
OBSERVED_TOKENS = 2000
_T = TypeVar("_T")


def timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """The result and the seconds it took."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def shape_of(n_layers: int, n_experts: int) -> ModelShape:
    """A model of equal layers."""
    layers = tuple(
        ExpertLayer(block=b, n_experts=n_experts, top_k=TOP_K, expert_bytes=EXPERT_BYTES, tensor_types={"up": "q4_K"})
        for b in range(n_layers)
    )
    return ModelShape(
        fingerprint="mf1-" + "0" * 32,
        sibling="ms1-" + "0" * 32,
        architecture="synthetic",
        n_blocks=n_layers,
        context_length=32768,
        core_bytes=0,
        kv_bytes_per_token=0,
        layers=layers,
    )


def synthetic_part(shape: ModelShape, workload: str, index: int) -> SessionPart:
    """Counts of one session: its workload's hot set, disturbed for this session."""
    name = f"{workload} {index}"
    content_id = hashlib.sha256(name.encode()).hexdigest()
    taste = np.random.default_rng(WORKLOADS.index(workload))
    rng = np.random.default_rng(int(content_id[:8], 16))
    counts, reuse = [], []
    for layer in shape.layers:
        weights = 1.0 / (1.0 + taste.permutation(layer.n_experts)) * rng.uniform(0.5, 1.5, layer.n_experts)
        counts.append(rng.multinomial(TOKENS * TOP_K, weights / weights.sum()).astype(np.int64))
        reuse.append(rng.multinomial(TOKENS * TOP_K, np.full(layer.n_experts + 1, 1 / (layer.n_experts + 1))))
    return SessionPart(content_id, workload, content_id, TOKENS, tuple(counts), tuple(reuse))


def main() -> None:
    """Measure and print (or write) the seconds."""
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, default=1000, help="sessions of the workload; the others have a tenth")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    options = parser.parse_args()
    shape = shape_of(options.layers, options.experts)
    parts = {
        workload: [
            synthetic_part(shape, workload, index)
            for index in range(options.sessions if workload == "code-heavy" else options.sessions // 10)
        ]
        for workload in WORKLOADS
    }
    sizes = layer_sizes(shape)
    _, uniform_s = timed(lambda: uniform_slots(sizes, residency_budget(sizes, 0.6)))
    built, build_s = timed(lambda: build_profile(shape, "code-heavy", "decode", "0" * 64, parts))
    if built is None:
        raise SystemExit("error: no calibration sessions")
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(options.experts)[:TOP_K] for _ in range(OBSERVED_TOKENS)])
    order = RecencyOrder(options.experts)
    _, observe_s = timed(lambda: [order.observe(row[None, :]) for row in ids])
    result = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__},
        "layers": options.layers,
        "experts": options.experts,
        "sessions": {workload: len(parts[workload]) for workload in WORKLOADS},
        "n_held_out": built.profile.n_held_out,
        "build_profile_s": round(build_s, 3),
        "uniform_slots_s": round(uniform_s, 4),
        "observe_us_per_token_and_layer": round(1e6 * observe_s / OBSERVED_TOKENS, 1),
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
