"""How fast policies are replayed: selections a second of processor time, one core.

Usage: simulator_speed.py [--tokens N] [--out FILE]. Traces are made up: 64 sessions of a model's shape with a taste of
each layer that drifts. Every policy starts from the sessions' own frequencies; slots are 30 and 60% of the experts.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from report import parser_of, report

from spark_runtime.simulator.policies import CACHES, Cache, replay
from spark_runtime.simulator.traces import Trace

SHAPES = {"24x32, top-4": (24, 32, 4), "8x128, top-8": (8, 128, 8), "48x128, top-8": (48, 128, 8)}
SESSIONS = 64


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
    report({"tokens": options.tokens, "sessions": SESSIONS, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
