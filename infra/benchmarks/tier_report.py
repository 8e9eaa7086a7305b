"""The result of tier_speed.py: rows with what follows from comparing them, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from measure import Measurement

BASELINE = ("plain", "plain_again")


@dataclass(slots=True)
class Result:
    """What is written; columns that compare rows are made when it is."""

    about: Mapping[str, Any]
    """Machine, model and plan."""
    measurements: Sequence[Measurement]
    predictions: Mapping[str, float]
    """Cold hits per token by the name of the configuration."""
    notes: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Rows with their share of all-GPU decode, and whether the logits are those of the first configuration."""
        rows = [measurement.row() for measurement in self.measurements]
        rates = [rate for row in rows if row["config"] in BASELINE for rate in row["decode_runs"]]
        baseline = float(np.median(rates)) if rates else None
        reference = rows[0]["logits_sha256"] if rows else None
        for row in rows:
            rate, digest = row["decode_tok_s"], row["logits_sha256"]
            row["share_of_all_gpu"] = round(rate / baseline, 4) if rate and baseline else None
            row["logits_identical"] = digest == reference if digest and reference else None
            row["predicted_cold_hits_per_token"] = self.predictions.get(row["config"])
        return {**self.about, "notes": self.notes, "rows": rows}

    def write(self, out: Path | None) -> None:
        """Write or replace the file."""
        if out is not None:
            out.write_text(json.dumps(self.as_json(), indent=1) + "\n")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text; a row's errors follow it."""
    head = ("slots", "decode", "spread", "share", "cold", "(pred)", "VRAM GB", "load s", "bits")
    lines = [_line("configuration", head, "prefill")]
    for row in rows:
        cells = (
            str(row["slots"] or "-"),
            _cell(row["decode_tok_s"], 1),
            _cell(row["decode_spread"], 1, 100),
            _cell(row["share_of_all_gpu"], 1, 100),
            _cell(row["cold_hits_per_token"], 2),
            _cell(row["predicted_cold_hits_per_token"], 2),
            _cell(row["vram_bytes"], 2, 1e-9),
            _cell(row["load_s"], 2),
            {True: "same", False: "other", None: "-"}[row["logits_identical"]],
        )
        prefill = " ".join(f"{batch}:{rate:.0f}" for batch, rate in row["prefill_tok_s"].items())
        lines.append(_line(row["config"], cells, prefill))
        lines += [f"    error: {error[:140]}" for error in dict.fromkeys(row["errors"])]
    return "\n".join(lines)


def _line(name: str, cells: Sequence[str], last: str) -> str:
    return " ".join([f"{name:29}", *(f"{cell:>8}" for cell in cells), "", last])


def _cell(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}"
