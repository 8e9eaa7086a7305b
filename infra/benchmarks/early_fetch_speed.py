"""What fetching early is worth on this machine: tokens a second with and without, on one engine by turns.

Usage: early_fetch_speed.py MODEL [--residency 0.6 0.45 0.3] [--early 1:0.5 2:0.3 …] [--rounds 5] [--out FILE]

For each residency one engine decodes the same random tokens in every way, one after the other, round by round, so that
neither the machine's clock nor the place in the context favours one; as many rounds as ways let each come first once.
``--early EXPERTS:THRESHOLD`` is one way; ``guess`` guesses, learns and fetches nothing, which shows what that alone
costs. What was learned before the rounds is put back whenever a way begins. The logits of all ways are hashed and must
be those of every expert resident.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import parser_of, report

from spark_runtime.bench import counts_of, logits_sha256, random_tokens
from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.placement import frequencies, greedy_slots, layer_sizes, residency_budget
from spark_runtime.tier_start import profile_start, uniform_start

PROMPT, CALIBRATION, UNTIMED, HASHED = 256, 400, 24, 48
GUESS_ONLY = EarlyFetch(1, float("inf"))


def ways_of(texts: Sequence[str]) -> dict[str, EarlyFetch]:
    """By name: nothing early, nothing but guesses, and what was asked for."""
    ways = {"off": NO_EARLY_FETCH, "guess": GUESS_ONLY}
    for text in texts:
        experts, _, threshold = text.partition(":")
        ways[text] = EarlyFetch(int(experts), float(threshold))
    return ways


def decode(engine: Engine, tokens: Sequence[int]) -> float:
    """Seconds, reading every token's logits as a sampler does."""
    engine.synchronize()
    began = time.perf_counter()
    for token in tokens:
        engine.feed([token], "decode")
        engine.logits()
    return time.perf_counter() - began


def measure(engine: Engine, ways: dict[str, EarlyFetch], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    tier, n_vocab = engine.tier, engine.n_vocab
    assert tier is not None
    tier.set_early(EarlyFetch(1, 0.3))
    engine.prompt(random_tokens(PROMPT, n_vocab, 202))
    decode(engine, random_tokens(arguments.learn, n_vocab, 203))
    learned = tier.guesses()
    rows: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "cold": 0, "selections": 0, "early": 0, "used": 0, "wasted": 0} for name in ways
    }
    for number in range(arguments.rounds):
        tokens = random_tokens(UNTIMED + arguments.tokens, n_vocab, 300 + number)
        order = list(ways.items())
        # The first to see a round's tokens misses most of their experts: every way is the first in its turn.
        for name, way in order[number % len(order) :] + order[: number % len(order)]:
            engine.prompt(random_tokens(PROMPT, n_vocab, 202))
            tier.set_early(way)
            if way.experts:
                tier.set_guesses(learned)
            decode(engine, tokens[:UNTIMED])
            tier.reset_counts()
            row = rows[name]
            row["seconds"].append(decode(engine, tokens[UNTIMED:]))
            counters = tier.counters()
            row["cold"] += sum(counters.cold["decode"])
            row["selections"] += sum(int(layer.sum()) for layer in counters.counts["decode"])
            for key, value in (
                ("early", counters.early), ("used", counters.early_used), ("wasted", counters.early_wasted)
            ):  # fmt: skip
                row[key] += sum(value["decode"])
    base = statistics.median(rows["off"]["seconds"])
    total = arguments.rounds * arguments.tokens
    found = []
    for name, way in ways.items():
        tier.set_early(way)
        if way.experts:
            tier.set_guesses(learned)
        row = rows[name]
        seconds = statistics.median(row["seconds"])
        digest = logits_sha256(engine, random_tokens(64, n_vocab, 1), random_tokens(HASHED, n_vocab, 2))
        found.append(
            {
                "early": name,
                "decode_tok_s": round(arguments.tokens / seconds, 1),
                "of_off": round(base / seconds, 4),
                "microseconds_more": round((seconds - base) / arguments.tokens * 1e6, 1),
                "runs_tok_s": [round(arguments.tokens / each, 1) for each in row["seconds"]],
                "cold_hits_per_token": round(row["cold"] / total, 3),
                "cold_hit_rate": round(row["cold"] / row["selections"], 5),
                "early_per_token": round(row["early"] / total, 3),
                "used_per_token": round(row["used"] / total, 3),
                "wasted_per_token": round(row["wasted"] / total, 3),
                "logits_sha256": digest,
            }
        )
    return found


def resident_hash(arguments: argparse.Namespace, size: dict[str, Any]) -> str:
    with Engine.load(arguments.model, EngineOptions(count_routing=False, repack=False, **size)) as engine:
        n_vocab = engine.n_vocab
        return logits_sha256(engine, random_tokens(64, n_vocab, 1), random_tokens(HASHED, n_vocab, 2))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = read_model_shape(arguments.model)
    needed = PROMPT + max(CALIBRATION, arguments.learn, UNTIMED + arguments.tokens) + 8
    size = {"n_ctx": needed, "n_batch": PROMPT, "n_threads": arguments.threads, "devices": 1}
    with Engine.load(arguments.model, EngineOptions(tier=uniform_start(shape, 1.0), **size)) as engine:
        prompt, rest = random_tokens(PROMPT, engine.n_vocab, 100), random_tokens(CALIBRATION, engine.n_vocab, 101)
        counts = counts_of(engine, prompt, rest)
    frequency = frequencies([counts.counts["decode"]], [counts.tokens["decode"]])
    sizes, ways, rows = layer_sizes(shape), ways_of(arguments.early), []
    plain = resident_hash(arguments, size)
    for residency in arguments.residency:
        slots = greedy_slots(frequency, sizes, residency_budget(sizes, residency))
        with Engine.load(arguments.model, EngineOptions(tier=profile_start(shape, frequency, slots), **size)) as engine:
            assert engine.tier is not None
            engines = sorted({device.engine for device in engine.tier.devices})
            for row in measure(engine, ways, arguments):
                rows.append({"residency": residency, "engine": "/".join(engines), **row})
                sys.stderr.write(f"{rows[-1]}\n")
    identical = {row["logits_sha256"] for row in rows} == {plain}
    expert_bytes = int(np.mean([layer.expert_bytes for layer in shape.layers]))
    return {"model": shape.name, "expert_bytes": expert_bytes, "tokens": arguments.tokens, "rounds": arguments.rounds,
            "learned_from": arguments.learn, "identical_output": identical, "rows": rows}  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--residency", type=float, nargs="+", default=[0.6, 0.45, 0.3])
    parser.add_argument("--early", nargs="+", default=["1:0.5", "1:0.3", "2:0.3"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--learn", type=int, default=1500, help="tokens decoded before the rounds")
    parser.add_argument("--threads", type=int, default=4)
    arguments = parser.parse_args()
    report(run(arguments), arguments.out)


if __name__ == "__main__":
    main()
