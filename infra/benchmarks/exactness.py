"""Whether a tiered model computes the same bits as one that is wholly resident: every logit, in every situation.

Usage: exactness.py [--models all|NAME|NAME:split|FILE.gguf …] [--types q4_K …] [--residency 1 0.6 0.31 floor]
[--tokens 512 --prompts 4] [--devices N] [--jobs N] [--out FILE.json]. Names are architectures of which small random
models are made. Each model runs in a process of its own: one that llama.cpp gives up on costs no other its result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from exactness_runs import CASES, CONTEXT, SEQUENCES, Trail, context_for, generate
from quantised_models import TYPES, quantise
from report import parser_of, report
from small_architectures import ARCHITECTURES, FUSED
from small_models import write_small_model

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.tier_start import TierStart, uniform_start

BATCH = 48
PLAIN, PROXY = "plain", "proxy"


def model_file(model: str, kind: str, seed: int, folder: Path) -> Path:
    """The file itself, or a new one of the architecture and weight type."""
    if model.endswith(".gguf"):
        return Path(model)
    architecture, _, form = model.partition(":")
    path = write_small_model(folder / "f32.gguf", architecture, seed=seed, split=form == "split")
    return path if kind == "f32" else quantise(path, folder / f"{kind}.gguf", kind)


def tier_of(path: Path, residency: str) -> TierStart:
    """Slots for a share of the experts, or as few as there may be."""
    return uniform_start(read_model_shape(path), 0.0 if residency == "floor" else float(residency))


def engine_of(path: Path, mode: str, job: dict[str, Any], **size: int) -> Engine:
    """An engine that runs a model as llama.cpp does, through the proxy, or tiered at the residency that is the mode."""
    options: dict[str, Any] = {"n_batch": BATCH, "n_threads": job["threads"], "devices": job["devices"], **size}
    if mode == PLAIN:
        return Engine.load(path, EngineOptions(**options, count_routing=False, repack=False))
    if mode == PROXY:
        return Engine.load(path, EngineOptions(**options, proxy=True, count_routing=False))
    return Engine.load(path, EngineOptions(**options, tier=tier_of(path, mode)))


def results_of(path: Path, mode: str, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every case of one mode, computed."""
    with engine_of(path, mode, job, n_ctx=CONTEXT, n_seq_max=SEQUENCES) as engine:
        for case, run in CASES.items():
            yield result_of(engine, mode, case, run(engine, job["seed"]))
    if job["tokens"]:
        with engine_of(path, mode, job, n_ctx=context_for(job["tokens"], job["prompts"])) as engine:
            yield result_of(engine, mode, "long", generate(engine, job["seed"], job["tokens"], job["prompts"]))


def result_of(engine: Engine, mode: str, case: str, trail: Trail) -> dict[str, Any]:
    """What a case gave, with the cold hits since the last one."""
    result: dict[str, Any] = {"mode": mode, "case": case, "sha256": trail.sha256, "steps": trail.steps}
    if not trail.finite:
        result["finite"] = False
    if engine.tier is not None:
        counters = engine.tier.counters(reset=True)
        result["cold_hits"] = sum(int(hits) for layers in counters.cold.values() for hits in layers)
        result["slots"] = sum(len(experts) for experts in engine.tier.resident())
    return result


def child(job: dict[str, Any]) -> None:
    """Run a job; one line of JSON for each result, and one before and after each mode."""
    with tempfile.TemporaryDirectory() as folder:
        path = model_file(job["model"], job["type"], job["seed"], Path(folder))
        for mode in job["modes"]:
            say({"mode": mode, "state": "started"})
            for result in results_of(path, mode, job):
                say(result)
            say({"mode": mode, "state": "done"})


def say(line: dict[str, Any]) -> None:
    """One line to the parent, at once: the process may not live to write the next."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def run_job(job: dict[str, Any], timeout: float) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Results of all modes, and what ended those that gave none; the rest of a job goes on after each."""
    results: list[dict[str, Any]] = []
    faults: dict[str, str] = {}
    modes = list(job["modes"])
    while modes:
        lines, fault = _run_child(job | {"modes": modes}, timeout)
        results += [line for line in lines if "case" in line]
        states = {line["mode"]: line["state"] for line in lines if "state" in line}
        if fault is None:
            break
        if not states:
            faults["all"] = fault  # there is no such model
            break
        faults[next((mode for mode, state in states.items() if state != "done"), modes[-1])] = fault
        modes = [mode for mode in modes if mode not in states]
    return results, faults


def _run_child(job: dict[str, Any], timeout: float) -> tuple[list[dict[str, Any]], str | None]:
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            status = subprocess.run(command, stdout=output, stderr=errors, timeout=timeout, check=False).returncode
            fault = f"ended with {status}"
        except subprocess.TimeoutExpired:
            status, fault = 1, f"no end after {timeout:.0f} s"
        output.seek(0)
        errors.seek(0)
        lines = [json.loads(line) for line in output if line.endswith("\n")]
        said = [line.strip() for line in errors if line.strip()]
        return lines, f"{fault}: {' | '.join(said[-3:])}"[:600] if status else None


def rows_of(job: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """One row for each case at each residency, or for what could not run."""
    results, faults = run_job(job, timeout)
    by_key = {(result["mode"], result["case"]): result for result in results}
    again: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for (mode, case), result in by_key.items():
        if mode == PLAIN:
            continue
        row = {"model": job["name"], "type": job["type"], "residency": mode, "case": case}
        if mode == PROXY:
            row["residency"] = "proxy"
        row |= {key: result[key] for key in ("slots", "cold_hits", "finite") if key in result}
        row["tiered" if mode != PROXY else PROXY] = result["sha256"]
        for other in (PLAIN, PROXY):
            if other == mode or (other, case) not in by_key:
                continue
            reference = by_key[other, case]
            row[other] = reference["sha256"]
            row[f"equals_{other}"] = reference["sha256"] == result["sha256"]
            if reference["sha256"] != result["sha256"]:
                row[f"differs_from_{other}_at"] = _first_difference(result["steps"], reference["steps"])
        if row.get("equals_plain") is False:
            # Whether llama.cpp itself gives the same bits twice.
            if not again:
                second, _ = run_job(job | {"modes": [PLAIN]}, timeout)
                again = {line["case"]: line["sha256"] for line in second}
            row["plain_deterministic"] = again.get(case) == row[PLAIN]
        rows.append(row)
    for mode, fault in faults.items():
        rows.append({"model": job["name"], "type": job["type"], "residency": mode, "fault": fault})
    return rows


def _first_difference(steps: Sequence[str], others: Sequence[str]) -> str:
    pairs = zip(steps, others, strict=False)
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), len(steps))
    return f"step {at} of {len(steps)}"


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What to look at first."""
    compared = [row for row in rows if "case" in row]
    unequal = [row for row in compared if row.get("equals_plain") is False or row.get("equals_proxy") is False]
    return {
        "models": len({(row["model"], row["type"]) for row in rows}),
        "compared": len(compared),
        "equal": len(compared) - len(unequal),
        "cold_hits": sum(row.get("cold_hits", 0) for row in compared),
        "unequal": sorted({f"{row['model']} {row['type']} {row['residency']} {row['case']}" for row in unequal}),
        "faults": sorted({f"{row['model']} {row['type']} {row['residency']}" for row in rows if "fault" in row}),
    }


def jobs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One job for each model and weight type."""
    names = (
        [*ARCHITECTURES, *(f"{name}:split" for name in sorted(FUSED))] if "all" in options.models else options.models
    )
    settings = {key: getattr(options, key) for key in ("seed", "tokens", "prompts", "threads", "devices")}
    modes = [PLAIN, PROXY, *options.residency]
    return [
        {"model": name, "name": Path(name).name, "type": kind, "modes": modes, **settings}
        for name in names
        for kind in (["file"] if name.endswith(".gguf") else options.types)
    ]


def main() -> None:
    """Run every model and print (or write) the rows."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["all"], help="architectures, files, or all architectures")
    parser.add_argument("--types", nargs="+", default=["f32"], choices=["f32", *TYPES], help="types of the weights")
    parser.add_argument("--residency", nargs="+", default=["1", "0.6", "0.31", "floor"], help="shares of the experts")
    parser.add_argument("--tokens", type=int, default=0, help="tokens to generate after each prompt of the long run")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of the long run")
    parser.add_argument("--devices", type=int, default=1, help="devices that a model is split over")
    parser.add_argument("--threads", type=int, default=1, help="threads of one model")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one model may take")
    options = parser.parse_args()
    settings = {key: value for key, value in vars(options).items() if key not in {"out", "jobs", "timeout"}}
    settings["models"] = [Path(model).name for model in options.models]
    rows: list[dict[str, Any]] = []

    def result() -> dict[str, Any]:
        return {"settings": settings, "summary": summary_of(rows), "rows": rows}

    with ThreadPoolExecutor(options.jobs) as pool:
        for part in pool.map(lambda job: rows_of(job, options.timeout), jobs_of(options)):
            rows += part
            if options.out is not None:
                options.out.write_text(
                    json.dumps(result(), indent=1) + "\n"
                )  # what is known outlives an interrupted run
    report(result(), options.out)


if __name__ == "__main__":
    main()
