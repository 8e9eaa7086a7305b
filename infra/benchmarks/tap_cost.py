"""What counting through the evaluation callback costs: the same prompt and greedy tokens without it, in
native code, and in Python.

Usage: tap_cost.py [MODEL.gguf …] [--out FILE]. Variants alternate in one process, the median of the runs is reported,
and the hash over the logits of every generated token must be one for all of them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

from report import parser_of, report

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.models import demo_model_path
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts

PROMPT_TOKENS, DECODE_TOKENS, RUNS = 512, 256, 5


def measure(engine: Engine, tokens: list[int], counting: bool) -> tuple[float, float, str]:
    """Prefill and decode rates (tokens a second) and the hash of all logits."""
    digest = hashlib.sha256()
    engine.reset()
    with engine.counting(SessionCounts(engine.shape) if counting else None):
        start = time.perf_counter()
        engine.prompt(tokens)
        prefill = len(tokens) / (time.perf_counter() - start)
        count, start = 0, time.perf_counter()
        for _ in engine.generate(Sampling(), DECODE_TOKENS):
            count += 1
            digest.update(engine.logits().tobytes())
        decode = count / (time.perf_counter() - start)
    return prefill, decode, digest.hexdigest()


def compare(path: Path, threads: int) -> dict[str, object]:
    """One model's row."""
    options = EngineOptions(n_threads=threads, n_ctx=1024)
    engines = {
        "plain": Engine.load(path, replace(options, count_routing=False)),
        "native": Engine.load(path, options),
        "python": Engine.load(path, replace(options, native=False)),
    }
    if (fault := engines["native"].native_fault) is not None:
        raise SystemExit(f"error: {fault}")
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    hashes: set[str] = set()
    for _ in range(RUNS):
        for name, engine in engines.items():
            tokens = engine.tokenize(Path(__file__).read_text())[:PROMPT_TOKENS]
            prefill, decode, digest = measure(engine, tokens, name != "plain")
            rates[name].append((prefill, decode))
            hashes.add(digest)
    row: dict[str, object] = {"model": path.name, "threads": threads, "logits_identical": len(hashes) == 1}
    for name, engine in engines.items():
        row[f"{name}_prefill_tok_s"] = round(statistics.median(prefill for prefill, _ in rates[name]))
        row[f"{name}_decode_tok_s"] = round(statistics.median(decode for _, decode in rates[name]))
        engine.close()
    return row


def main() -> None:
    """Measure and print (or write) the rows."""
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files; the demo model if none")
    options = parser.parse_args()
    rows = [compare(path, threads) for path in options.models or [demo_model_path()] for threads in (1, 2)]
    cpu = next(
        (line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    result = {"machine": {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}, "rows": rows}
    report(result, options.out)


if __name__ == "__main__":
    main()
