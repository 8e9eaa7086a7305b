"""What guessing the next layer's selections costs a token on one core: decided, learned, nothing copied.

Usage: guess_cost.py [--shape 48:128:8 …] [--routing FOLDER] [--tokens 400] [--rounds 5] [--out FILE]. A shape is
layers, experts, top-k.

The native slot pool decodes selections with every expert in a slot, so that there is nothing to look for and nothing
to move, with and without guesses: the difference is their cost. It is what the host engine spends; on a GPU a kernel
beside the layer does the same.

Random selections are the worst for caches. Published routing (``--routing``) is of few experts, so it is also made
wider: eight sessions take turns, each with an eighth of the experts, and eight more are the second half of the layers.
A cold token comes after other memory has been through the caches, as a model's own goes through them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published_routing import published
from report import parser_of, report

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.simulator.traces import Trace
from spark_runtime.slot_pool import SlotPool
from spark_runtime.tier_start import LayerStart, TierStart

WAYS = {
    "off": NO_EARLY_FETCH,
    "guess": EarlyFetch(1, float("inf"), learning=False),
    "guess_and_learn": EarlyFetch(1, float("inf")),
}
COLD_TOKENS = 30
OTHER_MEMORY_BYTES = 64 * 2**20
"""Twice a usual third-level cache."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
WIDER = 8
PUBLISHED = (("gptoss20b", "gpt-oss-20b", 32), ("esft_deepseek_v2_lite", "DeepSeek-V2-Lite", 64))


def random_selections(shape: str, tokens: int) -> tuple[NDArray[np.int32], int]:
    layers, experts, top_k = map(int, shape.split(":"))
    random = np.random.default_rng(0)
    ids = np.argpartition(random.random((tokens, layers, experts)), top_k, axis=2)[:, :, :top_k]
    return ids.astype(np.int32), experts


def wider(trace: Trace, n_experts: int, tokens: int) -> NDArray[np.int32]:
    """``[token, 2 * layer, k]``, below ``WIDER * n_experts``."""
    ids = np.stack(trace.ids, axis=1)
    lanes = np.array_split(np.arange(trace.n_sessions), 2 * WIDER)
    each = -(-tokens // WIDER)
    parts = [
        ids[np.concatenate([np.arange(*trace.offsets[session : session + 2]) for session in lane])[:each]]
        for lane in lanes
    ]
    lower, upper = (
        np.stack([part + place * n_experts for place, part in enumerate(half)], axis=1).reshape(-1, *ids.shape[1:])
        for half in (parts[:WIDER], parts[WIDER:])
    )
    return np.concatenate([lower, upper], axis=1)[:tokens].astype(np.int32)


def selections(shapes: list[str], routing: Path | None, tokens: int) -> Iterator[tuple[str, NDArray[np.int32], int]]:
    """What is selected by, ``ids[token, layer, k]``, and how many experts there are."""
    for shape in shapes:
        yield "random", *random_selections(shape, tokens)
    for folder, name, n_experts in PUBLISHED if routing else ():
        trace = published(routing / folder, name, n_experts).trace
        yield name, np.stack(trace.ids, axis=1)[:tokens].astype(np.int32), n_experts
        yield f"{name}, wider", wider(trace, n_experts, tokens), WIDER * n_experts


def seconds(pool: SlotPool, ids: NDArray[np.int32]) -> float:
    began = time.perf_counter()
    pool.decode(ids)
    return time.perf_counter() - began


def measure(source: str, ids: NDArray[np.int32], experts: int, rounds: int) -> dict[str, Any]:
    tokens, layers, top_k = ids.shape
    start = TierStart(
        tuple(LayerStart(layer, top_k, experts, np.arange(experts), np.zeros(experts)) for layer in range(layers))
    )
    pools = {name: SlotPool(start) for name in WAYS}
    for name, pool in pools.items():
        pool.set_early(WAYS[name])
        seconds(pool, ids)
    warm: dict[str, list[float]] = {name: [] for name in WAYS}
    cold: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    other = np.zeros(OTHER_MEMORY_BYTES // 8)
    for _ in range(rounds):
        for name, pool in pools.items():
            warm[name].append(seconds(pool, ids) / tokens)
        for name, pool in pools.items():
            cold[name].append([])
            for token in range(min(COLD_TOKENS, tokens)):
                other += 1
                cold[name][-1].append(seconds(pool, ids[token : token + 1]))
    row: dict[str, Any] = {"selections": source, "shape": f"{layers}:{experts}:{top_k}"}
    for name in ("guess", "guess_and_learn"):
        row[f"{name}_us"] = round((min(warm[name]) - min(warm["off"])) * 1e6, 1)
    for name in ("guess", "guess_and_learn"):
        best = np.min(cold[name], axis=0) - np.min(cold["off"], axis=0)
        row[f"cold_{name}_us"] = round(float(np.mean(best)) * 1e6, 1)
    rows_read = [min(layer, 2) * top_k + 1 for layer in range(1, layers)]
    row["rows_read"] = sum(rows_read)
    row["read_bytes"] = 2 * experts * sum(rows_read)
    row["weights_bytes"] = sum(2 * pools["guess"].guesses(layer).size for layer in range(layers))
    return row


def read_gb_s(rounds: int) -> float:
    """What one core reads from memory, one byte after the other."""
    other = np.zeros(OTHER_MEMORY_BYTES // 8)
    other += 1  # pages that were never written are one page
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        other.max()
        best = min(best, time.perf_counter() - began)
    return round(other.nbytes / best / 1e9, 1)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", nargs="+", default=["24:32:4", "48:128:8", "60:256:8", "48:512:10"])
    parser.add_argument("--routing", type=Path, help="folder of published routing, to measure its selections too")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [measure(*of, options.rounds) for of in selections(options.shape, options.routing, options.tokens)]
    flags = Path("/proc/cpuinfo").read_text()
    about: dict[str, Any] = {
        "processor": processor(),
        "avx2": " avx2 " in flags,
        "read_gb_s": read_gb_s(options.rounds),
    }
    about["huge_pages"] = HUGE_PAGES.read_text().strip() if HUGE_PAGES.exists() else "none"
    report({**about, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
