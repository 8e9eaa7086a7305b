"""What it costs when another thread than the one that loaded a model computes with it.

Usage: loading_thread.py MODEL.gguf [--residency SHARE] [--threads N] [--prompt TOKENS] [--rounds N] [--pairs N]
[--out FILE]. Engines in one process, asked in turn for the same prompts: ``here`` is loaded and used by the main
thread, ``there`` by another one, ``across`` is loaded by the main thread and used by another one. ``--pairs`` sets of
them, one after another, each loaded in another order.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from report import parser_of, report

from spark_runtime.bench import random_tokens
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.tier_start import uniform_start

KINDS = {"here": (False, False), "there": (True, True), "across": (False, True)}
"""Whether the other thread loads, and whether it computes."""
UNTIMED = 2
_T = TypeVar("_T")


def prompt_ms(engine: Engine, tokens: list[int]) -> float:
    """Milliseconds until the last token's logits are there."""
    engine.reset()
    engine.synchronize()
    began = time.perf_counter()
    engine.prompt(tokens)
    engine.logits()
    return 1000 * (time.perf_counter() - began)


def measure(arguments: argparse.Namespace, order: list[str], found: dict[str, list[float]]) -> None:
    """Adds the medians of one set of engines."""
    shape = read_model_shape(arguments.model)
    tier = uniform_start(shape, arguments.residency) if arguments.residency < 1 else None
    options = EngineOptions(n_ctx=1024, n_threads=arguments.threads, tier=tier, count_routing=tier is not None)
    with ThreadPoolExecutor(1) as other:

        def on(there: bool, function: Callable[[], _T]) -> _T:
            return other.submit(function).result() if there else function()

        engines: dict[str, Engine] = {}
        try:
            for kind in order:
                engines[kind] = on(KINDS[kind][0], partial(Engine.load, arguments.model, options))
            times: dict[str, list[float]] = {kind: [] for kind in order}
            for number in range(arguments.rounds + UNTIMED):
                tokens = random_tokens(arguments.prompt, engines[order[0]].n_vocab, number)
                first = number % len(order)
                for kind in order[first:] + order[:first]:
                    taken = on(KINDS[kind][1], partial(prompt_ms, engines[kind], tokens))
                    if number >= UNTIMED:
                        times[kind].append(taken)
            for kind in order:
                found[kind].append(statistics.median(times[kind]))
        finally:
            for kind, engine in engines.items():
                on(KINDS[kind][1], engine.close)


def main() -> None:
    """Measure what the options say."""
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--residency", type=float, default=0.45)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=17)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    kinds = list(KINDS)
    for number in range(arguments.pairs):
        at = number % len(kinds)
        measure(arguments, kinds[at:] + kinds[:at], found)
    result: dict[str, Any] = {
        "model": arguments.model.name,
        **{name: getattr(arguments, name) for name in ("residency", "threads", "prompt", "rounds", "pairs")},
        "prompt_ms": {kind: round(statistics.median(each), 3) for kind, each in found.items()},
        "prompt_ms_by_pair": {kind: [round(value, 3) for value in each] for kind, each in found.items()},
    }
    report(result, arguments.out)


if __name__ == "__main__":
    main()
