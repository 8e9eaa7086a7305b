"""Speed of the tiered runtime against llama.cpp itself: all configurations in one process, the baseline first and last.

Usage: tier_speed.py MODEL.gguf [--out FILE]. Every configuration has an engine of its own, freed before the next. A
round decodes with each configuration; rounds repeat so that drift of the machine reaches all of them. Decode is a
512-token prompt and 300 random tokens; the hash covers all their logits. Calibration counts other random tokens. The
result is written after every step, so what was measured survives whatever comes after. big_model.py writes a model.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from calibration import Calibration
from measure import Measurement, Plan
from report import parser_of
from tier_report import Result, table

from spark_runtime.bench import gpu_memory, random_tokens
from spark_runtime.bench_configuration import Configuration, blocks_on_cpu
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.tier_start import TierStart, uniform_start
from spark_schemas.model import ModelShape

UBATCHES = (512, 2048, 4096)
MEASURED_SEED, LONG_PROMPT_SEED = 202, 303


def configurations(
    shape: ModelShape, calibrated: Callable[[float], TierStart], residencies: Sequence[float]
) -> list[Configuration]:
    """All of them in the order of a round."""
    result = [
        Configuration("plain"),
        Configuration("proxy_nothing_tiered", proxy=True),
        Configuration("all_in_slots", tier=partial(uniform_start, shape, 1.0), prefill=False),
    ]
    for residency in residencies:
        percent, first = f"{residency:.0%}", residency == residencies[0]
        blocks = blocks_on_cpu(shape, residency)
        tier = partial(calibrated, residency)
        result += [
            Configuration(f"calibrated_{percent}", residency, tier=tier, prefill=first),
            Configuration(
                f"uniform_{percent}", residency, tier=partial(uniform_start, shape, residency), prefill=False
            ),
            Configuration(f"n_cpu_moe_{blocks}", residency, cpu_blocks=blocks, prefill=first),
            Configuration(f"n_cpu_moe_{blocks}_not_mapped", residency, cpu_blocks=blocks, mapped=False, prefill=first),
        ]
        if first:
            result.append(
                Configuration(f"calibrated_{percent}_not_counting", residency, tier=tier, counting=False, prefill=False)
            )
    return [*result, Configuration("plain_again", prefill=False)]


def read_through(path: Path) -> float:
    """Read the file once, so that all loads find it in the page cache; seconds."""
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(2**24)
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def main() -> None:
    """Measure, write and print."""
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--residency", type=float, nargs="+", default=[0.6, 0.3125])
    parser.add_argument("--prompt", type=int, default=512, help="tokens before decode")
    parser.add_argument("--tokens", type=int, default=300, help="tokens decoded, the first 16 of them not timed")
    parser.add_argument("--long-prompt", type=int, default=4096, help="tokens of the prefill measurement")
    parser.add_argument("--ubatch", type=int, nargs="*", default=UBATCHES, help="batches of the prefill measurement")
    parser.add_argument("--calibration", type=int, default=1200, help="tokens counted for the profile")
    parser.add_argument("--rounds", type=int, default=3, help="times every configuration is loaded and decoded with")
    parser.add_argument("--repeats", type=int, default=2, help="timed prefills after each load")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, also of --n-cpu-moe; 0 is all cores")
    parser.add_argument("--only", nargs="*", default=[], help="measure configurations with one of these in their name")
    parser.add_argument(
        "--deadline", type=float, default=float("inf"), help="start no further step after these seconds"
    )
    options = parser.parse_args()
    run(options)


def run(options: argparse.Namespace) -> None:
    """One run with the options of the command line."""
    began = time.perf_counter()
    shape = read_model_shape(options.model)
    notes: dict[str, Any] = {"read_s": round(read_through(options.model), 2)}
    with Engine.load(options.model, EngineOptions(n_ctx=64, n_batch=32, count_routing=False)) as engine:
        n_vocab, on_gpu = engine.n_vocab, engine.on_gpu
    tokens = random_tokens(options.prompt + options.tokens, n_vocab, MEASURED_SEED)
    plan = Plan(
        model=options.model,
        prompt=tokens[: options.prompt],
        tokens=tokens[options.prompt :],
        long_prompt=random_tokens(options.long_prompt, n_vocab, LONG_PROMPT_SEED),
        threads=options.threads,
        repeats=options.repeats,
    )
    calibration: Calibration | None = None
    try:
        calibration = Calibration.run(plan, n_vocab, options.calibration)
    except Exception as error:
        notes["calibration_error"] = f"{type(error).__name__}: {error}"

    def calibrated(residency: float) -> TierStart:
        if calibration is None:
            raise RuntimeError(f"no calibration: {notes['calibration_error']}")
        return calibration.start(residency)

    chosen = [
        Measurement(configuration)
        for configuration in configurations(shape, calibrated, options.residency)
        if not options.only or any(part in configuration.name for part in options.only)
    ]
    predictions = calibration.predictions(options.residency) if calibration is not None else {}
    result = Result(about(options, shape, on_gpu=on_gpu), chosen, predictions, notes)

    def step(name: str, measure: Callable[[], None]) -> None:
        elapsed = time.perf_counter() - began
        if elapsed > options.deadline:
            notes.setdefault("not_run", []).append(name)
            return
        measure()
        print(f"{elapsed:6.1f} s  {name}: {time.perf_counter() - began - elapsed:.1f} s", flush=True)
        result.write(options.out)

    for number in range(options.rounds):
        for measurement in chosen:
            step(f"round {number} {measurement.configuration.name}", partial(measurement.measure_decode, plan))
        # After the first round, so that a deadline costs repetitions rather than a whole measurement.
        for batch in options.ubatch if number == 0 else ():
            for measurement in chosen:
                if measurement.configuration.prefill:
                    name = f"prefill {batch} {measurement.configuration.name}"
                    step(name, partial(measurement.measure_prefill, plan, batch))
    notes["seconds"] = round(time.perf_counter() - began, 1)
    result.write(options.out)
    print(table(result.as_json()["rows"]))


def about(options: argparse.Namespace, shape: ModelShape, *, on_gpu: bool) -> dict[str, Any]:
    """What the numbers were measured on and with."""
    memory = gpu_memory()
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "gpu": on_gpu,
        "gpu_bytes": memory.total if memory is not None else None,
    }
    model = {
        "file": options.model.name,
        "name": shape.name,
        "bytes": options.model.stat().st_size,
        "layers": len(shape.layers),
        "expert_bytes": sum(layer.n_experts * layer.expert_bytes for layer in shape.layers),
    }
    kept = ("residency", "prompt", "tokens", "long_prompt", "calibration", "rounds", "repeats", "threads")
    return {"machine": machine, "model": model, "plan": {name: getattr(options, name) for name in kept}}


if __name__ == "__main__":
    main()
