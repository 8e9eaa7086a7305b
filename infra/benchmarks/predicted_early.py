"""Tokens a second that the cost model predicts with experts fetched early, beside what was measured.

Usage: predicted_early.py --measured EARLY.json --link LINK.json --bench BENCH.json [--out FILE]

EARLY is of ``early_fetch_speed.py``, LINK says what a copy takes (``link-h200.json``), BENCH is of ``spark-agent bench
--prefetch on`` of a model of that shape, for its token with every expert resident. Predicted from these alone, and with
the two things that they do not say, the search for a slot in each miss and what passes of a layer until an early copy
begins, fitted to the rows of one residency. Cold hits and experts fetched early are those that each run counted. For
how many layers one was fetched, two, and so on, follows from the count where at most one may be; else it is taken to
fall from each number to the next by one factor, which the count gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import parser_of, report

from spark_runtime.simulator.cost import Machine, MeasuredRun

Row = dict[str, Any]
EARLY_RUN = "routers alike"
"""The run whose next layers can be guessed, with all residencies and ways."""
_MOST_FACTOR = 1e6


def layers_by_experts(early_per_token: float, most: int, n_layers: int) -> tuple[float, ...]:
    """Layers of a token with one expert fetched early, two, up to ``most``, of those that can be guessed for."""
    guessed = n_layers - 1
    numbers = np.arange(most + 1)
    low, high = 0.0, _MOST_FACTOR
    for _ in range(200):
        factor = (low + high) / 2
        shares = factor**numbers / (factor**numbers).sum()
        low, high = (factor, high) if guessed * (shares @ numbers) < early_per_token else (low, factor)
    return tuple((guessed * shares[1:]).tolist())


def early_layers(row: Row, n_layers: int) -> tuple[float, ...] | None:
    """``None`` where nothing is guessed."""
    if row["early"] == "off":
        return None
    if row["early"] == "guess":
        return ()
    most = int(row["early"].partition(":")[0])
    return layers_by_experts(row["early_per_token"], most, n_layers)


def fitted(machine: Machine, rows: Sequence[Row], expert_bytes: float) -> Machine:
    """With the times that rows of one residency tell; a layer's own cannot be told from a miss's there."""
    runs = [
        MeasuredRun(row["decode_tok_s"], row["cold_hits_per_token"], early_layers=early_layers(row, machine.n_layers))
        for row in rows
    ]
    return Machine.fitted(machine.token_s, runs, expert_bytes, machine.link_bytes_per_s, machine.n_layers)


def predicted(
    rows: Sequence[Row], expert_bytes: float, link_alone: Machine, with_fit: Machine, fit_residency: float
) -> Iterator[Row]:
    for row in rows:
        layers = early_layers(row, link_alone.n_layers)
        found: Row = {key: row[key] for key in ("residency", "early", "cold_hits_per_token", "early_per_token")}
        for name, machine in (("link_alone", link_alone), ("fitted", with_fit)):
            tok_s = machine.decode_tok_s(row["cold_hits_per_token"], expert_bytes, early_layers=layers)
            found[f"predicted_tok_s_{name}"] = round(tok_s, 1)
            found[f"off_by_{name}"] = round(tok_s / row["decode_tok_s"] - 1, 4)
        yield found | {
            "layers_with_early_copies": None if layers is None else round(sum(layers), 2),
            "decode_tok_s": row["decode_tok_s"],
            "fitted_to": row["residency"] == fit_residency,
        }


def main() -> None:
    """Predict, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--link", type=Path, required=True)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--fit-residency", type=float, default=0.45)
    options = parser.parse_args()
    run = json.loads(options.measured.read_text())["runs"][EARLY_RUN]
    link = json.loads(options.link.read_text())
    bench = json.loads(options.bench.read_text())
    token_s = 1 / next(row["decode_tok_s"] for row in bench["rows"] if row["config"] == "all-gpu")
    n_layers, expert_bytes = bench["machine"]["n_layers"], float(run["expert_bytes"])
    alone = Machine(token_s, link["link"]["latency_s"], link["link"]["bytes_per_s"], n_layers=n_layers)
    of_fit = [row for row in run["rows"] if row["residency"] == options.fit_residency]
    fit = fitted(alone, of_fit, expert_bytes)
    rows = list(predicted(run["rows"], expert_bytes, alone, fit, options.fit_residency))
    others = [row for row in rows if not row["fitted_to"]]
    report(
        {
            "machine": {
                "token_us": round(token_s * 1e6, 1),
                "layer_us": round(token_s / n_layers * 1e6, 2),
                "copy_us": round((alone.miss_s + expert_bytes / link["link"]["bytes_per_s"]) * 1e6, 2),
                "fitted_copy_us": round((fit.miss_s + expert_bytes / link["link"]["bytes_per_s"]) * 1e6, 2),
                "fitted_guess_us": round(fit.guess_s * 1e6, 2),
            },
            "fit_residency": options.fit_residency,
            "worst_link_alone": max(abs(row["off_by_link_alone"]) for row in rows),
            "worst_fitted": max(abs(row["off_by_fitted"]) for row in others),
            "rows": rows,
        },
        options.out,
    )


if __name__ == "__main__":
    main()
