"""What guessing the next layer's selections costs a token on one core: decided, learned, nothing copied.

Usage: guess_cost.py [--shape 48:128:8 …] [--tokens 400] [--rounds 5] [--out FILE]. A shape is layers, experts, top-k.

The native slot pool decodes random selections with every expert in a slot, so that there is nothing to look for and
nothing to move, with and without guesses: the difference is their cost. It is what the host engine spends; on a GPU a
kernel beside the layer does the same.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import parser_of, report

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.slot_pool import SlotPool
from spark_runtime.tier_start import LayerStart, TierStart

GUESS_ONLY = EarlyFetch(1, float("inf"))
NO_LEARNING = EarlyFetch(1, float("inf"), learning=False)


def seconds(pool: SlotPool, ids: np.ndarray) -> float:
    began = time.perf_counter()
    pool.decode(ids)
    return time.perf_counter() - began


def measure(shape: str, tokens: int, rounds: int) -> dict[str, Any]:
    layers, experts, top_k = map(int, shape.split(":"))
    random = np.random.default_rng(0)
    ids = np.argpartition(random.random((tokens, layers, experts)), top_k, axis=2)[:, :, :top_k].astype(np.int32)
    start = TierStart(
        tuple(LayerStart(layer, top_k, experts, np.arange(experts), np.zeros(experts)) for layer in range(layers))
    )
    found: dict[str, list[float]] = {}
    pools = {}
    for name, early in (("off", NO_EARLY_FETCH), ("guess", NO_LEARNING), ("guess and learn", GUESS_ONLY)):
        pools[name] = SlotPool(start)
        pools[name].set_early(early)
        seconds(pools[name], ids)
    for _ in range(rounds):
        for name, pool in pools.items():
            found.setdefault(name, []).append(seconds(pool, ids) / tokens)
    best = {name: min(values) for name, values in found.items()}
    return {
        "shape": shape,
        "guess_us": round((best["guess"] - best["off"]) * 1e6, 1),
        "guess_and_learn_us": round((best["guess and learn"] - best["off"]) * 1e6, 1),
        "weights_bytes": sum(2 * pools["guess"].guesses(layer).size for layer in range(layers)),
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", nargs="+", default=["24:32:4", "48:128:8", "60:256:8", "48:512:10"])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [measure(shape, options.tokens, options.rounds) for shape in options.shape]
    flags = Path("/proc/cpuinfo").read_text()
    report({"processor": processor(), "avx2": " avx2 " in flags, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
