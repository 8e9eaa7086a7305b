"""Tokens a second that the simulator's cost model predicts, beside what was measured.

Usage: predicted_speed.py --machine BENCH.json --measured RESULT.json [...] [--out FILE]. The machine is fitted to one
run of `spark-agent bench`; what it predicts are other runs of the same model on the same machine, from the cold hits
that each of them counted and, where it has one, from the cold hits that a simulation of its tokens gave.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from report import parser_of, report

from spark_agent.simulation.machines import machine_of


def main() -> None:
    """Predict, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--machine", type=Path, required=True)
    parser.add_argument("--measured", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    figures = machine_of(options.machine, 0, 0, None)
    if figures is None:
        sys.exit("error: no machine")
    machine = figures.machine
    rows: list[dict[str, Any]] = []
    for path in options.measured:
        for measured in json.loads(path.read_text())["rows"]:
            missed = measured.get("cold_hits_per_token")
            if missed is None:
                continue
            row: dict[str, Any] = {
                "measured_in": path.name,
                "config": measured["config"],
                "cold_hits_per_token": missed,
            }
            for name, count in (("", missed), ("_simulated", measured.get("predicted_cold_hits_per_token"))):
                if count is not None:
                    predicted = machine.decode_tok_s(count)
                    row[f"predicted_tok_s{name}"] = round(predicted, 1)
                    row[f"off_by{name}"] = round(predicted / measured["decode_tok_s"] - 1, 4)
            rows.append(row | {"decode_tok_s": measured["decode_tok_s"]})
    worst = max(abs(row[key]) for row in rows for key in row if key.startswith("off_by"))
    figures_of = {"token_ms": round(machine.token_s * 1e3, 4), "miss_us": round(machine.miss_s * 1e6, 2)}
    report({"machine": figures_of, "fitted_to": options.machine.name, "worst": worst, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
