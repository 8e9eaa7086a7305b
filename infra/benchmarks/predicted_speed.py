"""Tokens a second that the simulator's cost model predicts, beside what was measured.

Usage: predicted_speed.py --machine BENCH.json [--link LINK.json] --measured RESULT.json [...]
       predicted_speed.py --across BENCH.json BENCH.json [...] [--fit-residency 0.6]
and --out FILE. BENCH is of `spark-agent bench --json`, or of `tier_interleaved.py --processor-time`. The first fits a
machine to one run of `spark-agent bench` and predicts other runs of the same model on the same machine; with --link,
which holds what `spark-agent bench` measures of the link itself, also from those figures alone, with nothing fitted but
the token with every expert resident, and prompts too. The second takes runs of `bench` of several models on one
machine: fits at one residency and predicts the others, and fits a model's runs and predicts every other model's, from
its all-resident token; runs on a GPU also from the link alone, with nothing fitted, and their prompts. Of several runs
of one model the fastest of each row counts. Cold hits are those that each run counted and, where it has one, those that
a simulation of its tokens gave.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import parser_of, report

from spark_agent.simulation.machines import machine_of
from spark_runtime.simulator.cost import Machine, MeasuredRun

Row = dict[str, Any]


def beside(machine: Machine, rows: list[Row], expert_bytes: float, **about: Any) -> Iterator[Row]:
    """Rows that counted cold hits, with what is predicted of them."""
    for measured in rows:
        missed = measured.get("cold_hits_per_token")
        if missed is None or not measured.get("decode_tok_s"):
            continue
        row = {**about, "config": measured["config"], "residency": measured.get("residency"),
               "cold_hits_per_token": missed}  # fmt: skip
        for name, count in (("", missed), ("_simulated", measured.get("predicted_cold_hits_per_token"))):
            if count is not None:
                predicted = machine.decode_tok_s(count, expert_bytes)
                row[f"predicted_tok_s{name}"] = round(predicted, 1)
                row[f"off_by{name}"] = round(predicted / measured["decode_tok_s"] - 1, 4)
        yield row | {"decode_tok_s": measured["decode_tok_s"]}


def within_a_model(options: Any) -> Row:
    """One model on one machine."""
    figures = machine_of(options.machine, 0, 0, None)
    if figures is None:
        sys.exit("error: no machine")
    files = {path.name: json.loads(path.read_text())["rows"] for path in options.measured}
    machine = figures.machine
    expert_bytes = figures.expert_bytes or 0.0
    rows = [row for name, of in files.items() for row in beside(machine, of, expert_bytes, measured_in=name)]
    unfitted: list[Row] = []
    prompts: list[Row] = []
    if options.link:
        link = json.loads(options.link.read_text())
        layers, experts, size = link["model"]["layers"], link["model"]["experts"], link["model"]["expert_bytes"]
        rates, latency_s = link["link"]["bytes_per_s"], link["link"]["latency_s"]
        files[options.machine.name] = json.loads(options.machine.read_text())["rows"]
        for name, of in files.items():
            resident = [row for row in of if row["config"] in {"plain", "all-gpu"}]
            alone = Machine(1 / resident[0]["decode_tok_s"], latency_s, rates)
            unfitted += beside(alone, of, size, measured_in=name)
            prompts += prompts_of(of, resident[0], name, layers, experts, Machine(1.0, latency_s, rates), size)
    return {
        "machine": {"token_ms": round(machine.token_s * 1e3, 4), "miss_us": round(machine.miss_s * 1e6, 2)},
        "fitted_to": options.machine.name,
        "worst": worst_of(rows),
        "rows": rows,
        "from_the_link_alone": {"worst": worst_of(unfitted), "rows": unfitted} if options.link else None,
        "prompts_from_the_link_alone": {"worst": worst_of(prompts), "rows": prompts} if options.link else None,
    }


def prompts_of(
    rows: list[Row], resident: Row, name: str, layers: int, experts: int, link: Machine, expert_bytes: float
) -> Iterator[Row]:
    """Prompts by tokens at once, from the all-resident prompt and the link."""
    for row in rows:
        if row.get("cold_hits_per_token") is None or not row.get("prefill_tok_s"):
            continue
        for tokens, measured in _prompts(row).items():
            whole = _prompts(resident).get(tokens)
            if whole is None:
                continue
            machine = replace(link, prompt_token_s=1 / whole)
            fetched = [(1 - row["residency"]) * experts] * layers
            predicted = machine.prefill_tok_s(tokens, fetched, expert_bytes)
            yield {"measured_in": name, "config": row["config"], "residency": row["residency"], "tokens": tokens,
                   "predicted_tok_s": round(predicted, 1), "off_by": round(predicted / measured - 1, 4),
                   "prefill_tok_s": measured}  # fmt: skip


def _prompts(row: Row) -> dict[int, float]:
    """Rates by tokens at once."""
    found = row["prefill_tok_s"]
    return {int(n): rate for n, rate in found.items()} if isinstance(found, dict) else {int(row["n_ubatch"]): found}


def across_models(options: Any) -> Row:
    """Several models on one machine."""
    benches = best_of(options.across)
    within: list[Row] = []
    kin: list[Row] = []
    between: list[Row] = []
    alone: list[Row] = []
    prompts: list[Row] = []
    for name, bench in benches.items():
        rows = tiered(bench)
        kept = [row for row in rows if row["residency"] == options.fit_residency]
        others = [row for row in rows if row["residency"] != options.fit_residency]
        within += list(beside(fitted(bench, kept), others, bench["expert_bytes"], model=name))
        for other, its in benches.items():
            if other != name:
                source = fitted(bench, rows)
                machine = Machine(1 / resident_of(its), source.miss_s, source.link_bytes_per_s, source.layer_s,
                                  its["machine"]["n_layers"])  # fmt: skip
                alike = None not in (own := (bench.get("architecture"), its.get("architecture"))) and own[0] == own[1]
                (kin if alike else between).extend(
                    beside(machine, tiered(its), its["expert_bytes"], fitted_to=name, model=other)
                )
        link = bench["machine"]["link"]
        if link["device"] == "gpu":
            from_link = Machine(1 / resident_of(bench), link["latency_s"], link["bytes_per_s"])
            alone += list(beside(from_link, rows, bench["expert_bytes"], model=name))
            prompts += prompts_of(rows, bench["rows"][0], name, bench["machine"]["n_layers"], _experts(rows[0], bench),
                                  from_link, bench["expert_bytes"])  # fmt: skip
    machines = {}
    for name, bench in benches.items():
        found = fitted(bench, tiered(bench))
        machines[name] = {
            "token_us": round(found.token_s * 1e6, 1),
            "miss_us": round(found.miss_s * 1e6, 2),
            "layer_us": round(found.layer_s * 1e6, 2),
            "n_layers": found.n_layers,
            "expert_bytes": bench["expert_bytes"],
            "link": bench["machine"]["link"],
        }
    parts = {"one_residency_from_another": within, "one_model_from_another_of_its_architecture": kin,
             "one_model_from_another": between, "from_the_link_alone": alone,
             "prompts_from_the_link_alone": prompts}  # fmt: skip
    return {"machines": machines, "fit_residency": options.fit_residency,
            **{name: {"worst": worst_of(rows), "within_10_percent": sum(abs(row["off_by"]) <= 0.1 for row in rows),
                      "of": len(rows), "rows": rows} for name, rows in parts.items() if rows}}  # fmt: skip


def _experts(row: Row, bench: Row) -> int:
    """Experts of a layer, which the slots of a row are a share of."""
    return round(row["slots"] / row["resident_share"] / bench["machine"]["n_layers"])


def best_of(paths: list[Path]) -> dict[str, Row]:
    """By model, with each configuration's fastest run: other work on the machine only makes it slower."""
    found: dict[str, Row] = {}
    for path in paths:
        bench = json.loads(path.read_text())
        name = Path(bench["model"]).stem
        best = found.setdefault(name, bench)
        if best["fingerprint"] != bench["fingerprint"]:
            sys.exit(f"error: {path} is of another model than the files of {name} before it")
        for kept, row in zip(best["rows"], bench["rows"], strict=True):
            kept["decode_tok_s"] = max(kept["decode_tok_s"] or 0, row["decode_tok_s"] or 0) or None
        best["machine"]["link"] = max(
            best["machine"]["link"], bench["machine"]["link"], key=lambda link: link["bytes_per_s"]
        )
    return found


def tiered(bench: Row) -> list[Row]:
    return [row for row in bench["rows"] if row.get("cold_hits_per_token") is not None and row.get("decode_tok_s")]


def resident_of(bench: Row) -> float:
    return float(next(row["decode_tok_s"] for row in bench["rows"] if row["config"] in {"all-gpu", "plain"}))


def fitted(bench: Row, rows: list[Row]) -> Machine:
    runs = [MeasuredRun(row["decode_tok_s"], row["cold_hits_per_token"]) for row in rows]
    machine, link = bench["machine"], bench["machine"]["link"]
    return Machine.fitted(1 / resident_of(bench), runs, bench["expert_bytes"], link["bytes_per_s"],
                          machine["n_layers"], latency_s=link["latency_s"])  # fmt: skip


def worst_of(rows: list[Row]) -> float | None:
    return max((abs(row[key]) for row in rows for key in row if key.startswith("off_by")), default=None)


def main() -> None:
    """Predict, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--link", type=Path)
    parser.add_argument("--measured", type=Path, nargs="+")
    parser.add_argument("--across", type=Path, nargs="+")
    parser.add_argument("--fit-residency", type=float, default=0.6)
    options = parser.parse_args()
    if options.across:
        report(across_models(options), options.out)
    elif options.machine and options.measured:
        report(within_a_model(options), options.out)
    else:
        parser.error("expected --machine with --measured, or --across")


if __name__ == "__main__":
    main()
