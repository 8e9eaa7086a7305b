"""What it costs that conversations take turns: four clients by turns against a batch of four, and what switching takes.

Usage: turns.py [--model demo|random|FILE.gguf …] [--clients N] [--tokens N] [--rounds N] [--threads N] [--out FILE].
Turns are the agent's own worker with generations that count for a session each. The batch is one decode call with a
token of every client, as a server that mixes them would compute it, without counting; its tokens are chosen from the
same logits, the largest. Switching is measured with 60% of the experts in slots, where it reads the slots' counters,
and with all of them resident.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import parser_of, report
from serving_overhead import model_file

from spark_agent.server.generation import Finished, Generation
from spark_agent.server.sessions import LiveSessions
from spark_agent.server.worker import Worker
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier_start import uniform_start

N_CTX = 512
RESIDENCY = 0.6
SWITCHES = 100


def prompts_of(engine: Engine, clients: int) -> list[list[int]]:
    """A short prompt a client."""
    return [engine.tokenize(f"def number_{client}(value, other):\n    return") for client in range(clients)]


def by_turns(engine: Engine, clients: int, n_tokens: int) -> float:
    """Tokens a second of all clients together, from the first prompt to the last token."""
    failed: list[Exception] = []
    sessions = LiveSessions(engine.shape, lambda *_: None, time.monotonic)

    async def ask() -> float:
        worker = Worker(engine, sessions, failed.append)
        worker.start()
        try:
            began = time.perf_counter()
            generations = [
                Generation(str(client), prompt, Sampling(), n_tokens, ())
                for client, prompt in enumerate(prompts_of(engine, clients))
            ]
            for generation in generations:
                worker.submit(generation)
            done = await asyncio.gather(*(_finished(each) for each in generations))
            spent_s = time.perf_counter() - began
        finally:
            await asyncio.to_thread(worker.stop)
        return sum(each.completion_tokens for each in done) / spent_s

    engine.reset()
    rate = asyncio.run(ask())
    if failed:
        raise failed[0]
    return rate


async def _finished(generation: Generation) -> Finished:
    async for event in generation.results():
        if isinstance(event, Finished):
            return event
    raise RuntimeError("the generation ended without a result")


def in_a_batch(engine: Engine, clients: int, n_tokens: int) -> float:
    """The same with a token of every client in each decode call."""
    engine.reset()
    began = time.perf_counter()
    prompts = prompts_of(engine, clients)
    rows = [(token, at, client) for client, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
    engine.feed_sequences(rows)
    lasts = [sum(len(prompt) for prompt in prompts[: client + 1]) - 1 for client in range(clients)]
    chosen = engine.all_logits()[lasts].argmax(axis=1)
    for step in range(n_tokens - 1):
        engine.feed_sequences(
            [(int(token), len(prompts[client]) + step, client) for client, token in enumerate(chosen)]
        )
        chosen = engine.all_logits().argmax(axis=1)
    rate = clients * n_tokens / (time.perf_counter() - began)
    engine.reset()
    return rate


def switching(path: Path, options: EngineOptions) -> dict[str, float]:
    """Milliseconds to count for another session after a token, and what a token takes."""
    with Engine.load(path, options) as engine:
        sessions = [SessionCounts(engine.shape) for _ in range(2)]
        token = engine.tokenize("x")[-1]
        engine.prompt([token])
        switch: list[float] = []
        step: list[float] = []
        for number in range(SWITCHES):
            began = time.perf_counter()
            engine.count_into(sessions[number % 2])
            switched = time.perf_counter()
            engine.feed([token], "decode")
            engine.logits()
            switch.append(switched - began)
            step.append(time.perf_counter() - switched)
        return {
            "switch_ms": round(1000 * statistics.median(switch), 4),
            "token_ms": round(1000 * statistics.median(step), 3),
        }


def measure(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One model."""
    options = EngineOptions(n_ctx=N_CTX, n_threads=arguments.threads, n_seq_max=arguments.clients)
    kinds = {"turns": by_turns, "batch": in_a_batch}
    rates: dict[str, list[float]] = {"one client": [], **{kind: [] for kind in kinds}}
    with Engine.load(path, options) as engine:
        by_turns(engine, 1, arguments.tokens)
        for _ in range(arguments.rounds):
            rates["one client"].append(by_turns(engine, 1, arguments.tokens))
            for kind, compute in kinds.items():
                rates[kind].append(compute(engine, arguments.clients, arguments.tokens))
    tiered = replace(options, n_seq_max=1, tier=uniform_start(read_model_shape(path), RESIDENCY))
    return {
        "model": path.name,
        "threads": arguments.threads,
        "clients": arguments.clients,
        "tok_s": {kind: round(statistics.median(values), 1) for kind, values in rates.items()},
        "batch_over_turns": round(
            statistics.median(one / other for one, other in zip(rates["batch"], rates["turns"], strict=True)), 3
        ),
        "switching": {
            "resident": switching(path, replace(options, n_seq_max=1)),
            f"{RESIDENCY:.0%} in slots": switching(path, tiered),
        },
    }


def main() -> None:
    """Measure every model."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="+", default=["demo", "random"])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    found = []
    for model in arguments.model:
        with model_file(model) as path:
            found.append(measure(path, arguments))
    report(found, arguments.out)


if __name__ == "__main__":
    main()
