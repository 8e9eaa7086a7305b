"""How llama.cpp's own token changes once a tiered engine has run beside it: time, and what lies between its kernels.

Usage: tier_overlap.py MODEL.gguf [--spans] [--add STEP] [--count N] [--alone] [--out FILE]. Needs a GPU with memory for
the model twice; ``--spans`` needs PyTorch, whose profiler names the kernels (and slows them, so it tells shares and not
speeds). ``--add`` looks for the same change without tiers: after each of so many allocations, streams, or both.
``--alone`` looks at a tiered engine's own token in a process without another.

A virtual machine's processors may be halves of cores that others use, and submitting a token then takes twice as long.
So before each round the process moves to a processor that is free now, and a round counts only if it still was at the
end; time on the GPU is what is left of a token after its submission.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda_steps import STEPS, CudaSteps
from report import parser_of, report

from spark_runtime.bench import random_tokens
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.tier_start import uniform_start

ROUNDS, ENOUGH, WARM, TIMED = 14, 4, 20, 60
SLOWER_WHEN_SHARED = 1.15
LOOP = 20_000


def loop_us() -> float:
    """Time of a fixed amount of work of one processor."""
    began = time.perf_counter()
    total = 0
    for number in range(LOOP):
        total += number
    return 1e6 * (time.perf_counter() - began)


class Processors:
    """Which processors are free now: those that do the fixed work as fast as any ever did."""

    def __init__(self) -> None:
        self._all = sorted(os.sched_getaffinity(0))
        self._fastest_us = min(self._try(number) for number in self._all for _ in range(3))

    def _try(self, number: int) -> float:
        os.sched_setaffinity(0, {number})
        return min(loop_us(), loop_us())

    def is_free(self) -> bool:
        """Whether this one is."""
        return loop_us() < SLOWER_WHEN_SHARED * self._fastest_us

    def move(self) -> None:
        """Go to a free one, if there is one."""
        for number in self._all:
            if self._try(number) < SLOWER_WHEN_SHARED * self._fastest_us:
                return


def token_us(engine: Engine, processors: Processors) -> dict[str, float | int]:
    """Medians of a token and of its submission over undisturbed rounds, and how many there were."""
    prompt = random_tokens(512, engine.n_vocab, 202)
    tokens = random_tokens(WARM + TIMED, engine.n_vocab, 203)
    found: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        processors.move()
        engine.prompt(prompt)
        whole, submitted = [], []
        for token in tokens:
            began = time.perf_counter()
            engine.feed([token], "decode")
            handed_over = time.perf_counter()
            engine.logits()
            whole.append(1e6 * (time.perf_counter() - began))
            submitted.append(1e6 * (handed_over - began))
        if processors.is_free():
            found.append((statistics.median(whole[WARM:]), statistics.median(submitted[WARM:])))
        if len(found) == ENOUGH:
            break
    if not found:
        return {"rounds": 0}
    token, submission = (round(statistics.median(values), 1) for values in zip(*found, strict=True))
    return {
        "token_us": token,
        "submission_us": submission,
        "gpu_us": round(token - submission, 1),
        "rounds": len(found),
    }


def spans_us(engine: Engine) -> dict[str, float]:
    """Microseconds a token in kernels (those that overlap count twice) and between them."""
    from torch.autograd import DeviceType  # type: ignore[import-not-found]
    from torch.profiler import ProfilerActivity, profile  # type: ignore[import-not-found]

    engine.prompt(random_tokens(512, engine.n_vocab, 202))
    tokens = random_tokens(WARM + TIMED, engine.n_vocab, 204)

    def feed(some: list[int]) -> None:
        for token in some:
            engine.feed([token], "decode")
            engine.logits()

    feed(tokens[:WARM])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        feed(tokens[WARM:])
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    kernels = sorted((event.time_range.start, event.time_range.end) for event in events)
    between, last = 0.0, kernels[0][1]
    for start, end in kernels[1:]:
        between += start - last if 0 < start - last < 20 else 0.0  # longer ones lie between two tokens
        last = max(last, end)
    inside = sum(end - start for start, end in kernels)
    return {"kernels_us": round(inside / TIMED, 1), "between_us": round(between / TIMED, 1)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"n_ctx": 1024, "n_batch": 512, "n_threads": 4}
    shape = read_model_shape(arguments.model)
    processors = Processors()
    rows: list[dict[str, Any]] = []
    first = {"tier": uniform_start(shape, 1.0)} if arguments.alone else {"count_routing": False, "repack": False}
    with Engine.load(arguments.model, EngineOptions(**first, **options)) as engine:

        def look(step: str) -> None:
            timed: dict[str, Any] = spans_us(engine) if arguments.spans else token_us(engine, processors)
            rows.append({"after": step, **timed})

        look("nothing")
        look("nothing, again")
        if arguments.add:
            steps = CudaSteps()
            for number in range(1, arguments.count + 1):
                steps.take(arguments.add)
                look(f"{arguments.add} {number}")
        if arguments.add or arguments.alone:
            return {"model": shape.name, "tiered": arguments.alone, "rows": rows}
        with Engine.load(arguments.model, EngineOptions(proxy=True, count_routing=False, **options)) as proxied:
            step(look, "a proxied engine's first token", proxied)
        with Engine.load(arguments.model, EngineOptions(tier=uniform_start(shape, 1.0), **options)) as tiered:
            look("loading a tiered engine")
            step(look, "its first token", tiered)
        look("closing it")
    return {"model": shape.name, "rows": rows}


def step(look: Callable[[str], None], name: str, engine: Engine) -> None:
    """One token of another engine, then a look at the first."""
    engine.feed([17], "decode")
    engine.logits()
    look(name)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--spans", action="store_true", help="time in kernels and between them, by PyTorch's profiler")
    parser.add_argument("--add", choices=STEPS, help="what to add in place of a tiered engine")
    parser.add_argument("--count", type=int, default=10, help="how many of it")
    parser.add_argument("--alone", action="store_true", help="look at a tiered engine instead of llama.cpp's own")
    arguments = parser.parse_args()
    report(run(arguments), arguments.out)


if __name__ == "__main__":
    main()
