"""How fast policies are replayed: selections a second of processor time, one core.

Usage: simulator_speed.py [--tokens N] [--out FILE]. Traces are made up: 64 sessions of a model's shape with a taste of
each layer that drifts. Every policy starts from the sessions' own frequencies; slots are 30 and 60% of the experts.
Fetching early is timed with guessing and learning, over layers that say much of each other, from what half as many
tokens taught.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from report import parser_of, report

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.guess_replay import NativeGuesser
from spark_runtime.simulator.guesses import Guesses
from spark_runtime.simulator.policies import CACHES, Cache, replay
from spark_runtime.simulator.traces import LayerClass, Trace

SHAPES = {"24x32, top-4": (24, 32, 4), "8x128, top-8": (8, 128, 8), "48x128, top-8": (48, 128, 8)}
SESSIONS = 64
WAYS = (NO_EARLY_FETCH, EarlyFetch(1, 0.3), EarlyFetch(4, 0.2))


def trace_of(n_layers: int, n_experts: int, top_k: int, n_tokens: int) -> Trace:
    """Sessions of equal length."""
    random = np.random.default_rng(0)
    length = n_tokens // SESSIONS
    ids = []
    for _ in range(n_layers):
        taste = random.gumbel(size=(1, 1, n_experts)) + random.gumbel(size=(SESSIONS, 1, n_experts))
        drift = np.cumsum(random.normal(scale=0.15, size=(SESSIONS, length, n_experts)), axis=1)
        scores = taste + drift + random.gumbel(size=(SESSIONS, length, n_experts))
        ids.append(np.argsort(-scores, axis=2)[:, :, :top_k].reshape(-1, top_k).astype(np.int32))
    return Trace(tuple(ids), (n_experts,) * n_layers, np.arange(SESSIONS + 1) * length)


def related_trace_of(n_layers: int, n_experts: int, top_k: int, n_tokens: int, seed: int) -> Trace:
    """Layers that prefer what the token is about, each by other names; the names are the same for every seed."""
    names, random = np.random.default_rng(0), np.random.default_rng(seed)
    length = n_tokens // SESSIONS
    taste = names.gumbel(size=(1, 1, n_experts)) + random.gumbel(size=(SESSIONS, 1, n_experts))
    topic = taste + 1.5 * random.gumbel(size=(SESSIONS, length, n_experts))
    ids = []
    for _ in range(n_layers):
        scores = topic[:, :, names.permutation(n_experts)] + 0.7 * random.gumbel(size=topic.shape)
        ids.append(np.argsort(-scores, axis=2)[:, :, :top_k].reshape(-1, top_k).astype(np.int32))
    return Trace(tuple(ids), (n_experts,) * n_layers, np.arange(SESSIONS + 1) * length)


def early_rows(n_layers: int, n_experts: int, top_k: int, n_tokens: int) -> Iterator[dict[str, Any]]:
    """With and without experts fetched early."""
    trace = related_trace_of(n_layers, n_experts, top_k, n_tokens, 1)
    [of] = trace.classes()
    guesser, calls = NativeGuesser(), trace.calls()
    teaching = related_trace_of(n_layers, n_experts, top_k, n_tokens // 2, 2)
    taught = guesser.learn(teaching, of, teaching.calls(), None)
    selections = trace.n_tokens * trace.selections_per_token
    for share in (0.3, 0.6):
        slots = [max(2 * top_k, int(share * n_experts))] * n_layers
        for early in WAYS:
            started = time.process_time()

            def guesses(of: LayerClass, early: EarlyFetch = early) -> Guesses:
                return guesser.guess(trace, of, calls, early.threshold_units, taught, learning=True)

            found = replay(Cache("scored", "pool", early=early), trace, slots, [None] * SESSIONS, calls, guesses)
            seconds = time.process_time() - started
            row = {"residency": share, "policy": "scored, early", "sharing": "pool",
                   "early": f"{early.experts}:{early.threshold:g}" if early.experts else "off",
                   "cold_hit_rate": round(float(found.cold.sum() / selections), 4)}  # fmt: skip
            if found.early is not None:
                for name in ("fetched", "used", "wasted"):
                    row[name] = round(float(getattr(found.early, name).sum() / selections), 4)
            yield row | {"million_selections_per_s": round(selections / seconds / 1e6, 2)}


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=12_800)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (n_layers, n_experts, top_k) in SHAPES.items():
        trace = trace_of(n_layers, n_experts, top_k, options.tokens)
        selections = trace.n_tokens * trace.selections_per_token
        counts = [trace.counts(session) for session in range(SESSIONS)]
        profile = [np.sum(layer, axis=0) / (SESSIONS * trace.n_tokens) for layer in zip(*counts, strict=True)]
        for share in (0.3, 0.6):
            slots = [max(2 * top_k, int(share * n_experts))] * n_layers
            for policy in ("static", *CACHES):
                for sharing in ("layer", "pool") if policy not in {"static", "lru_unprotected"} else ("layer",):
                    started = time.process_time()
                    cold = replay(Cache(policy, sharing), trace, slots, [profile] * SESSIONS).cold
                    seconds = time.process_time() - started
                    rows.append(
                        {
                            "shape": name,
                            "residency": share,
                            "policy": policy,
                            "sharing": sharing,
                            "cold_hit_rate": round(float(cold.sum() / selections), 4),
                            "million_selections_per_s": round(selections / seconds / 1e6, 2),
                        }
                    )
        rows += [{"shape": name, **row} for row in early_rows(n_layers, n_experts, top_k, options.tokens)]
    report({"tokens": options.tokens, "sessions": SESSIONS, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
