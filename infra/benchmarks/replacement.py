"""What placing experts anew in a running agent saves beyond the slots' own policy, on published routing.

Usage: replacement.py [--data FOLDER] [--residency 0.3 0.6] [--tokens N] [--out FILE]. The sessions of gpt-oss-20b that
others measured go through one pool of slots one after the other, as in an agent that runs all day: nothing starts anew
between them. Profiles come from other sessions. ``steady`` stays with what the profile is of, ``shifting`` leaves it
after a quarter, ``cold`` starts without one. The slots are the runtime's own (``native/slots.cpp``), and what decides
is what the agent decides with; here it also says what would have come of loading the new hot set at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from published_routing import Sessions, published
from real_routing import DATA
from report import parser_of, report

from spark_runtime.placement import (
    FloatArray,
    LayerSizes,
    expert_order,
    frequencies,
    greedy_slots,
    residency_budget,
    uniform_slots,
)
from spark_runtime.replacement import RecentTraffic, Rules, decide, pool_slots
from spark_runtime.slot_pool import SlotPool
from spark_runtime.tier_start import DECAY, PRIOR_TOKENS, LayerStart, TierStart, keeping

How = Literal["never", "prior", "load"]
"""``prior`` changes the scores and leaves the slots as they are, ``load`` also fills them with the new hot set."""
EXPERT_BYTES = 2**20


def start_of(freq: Sequence[FloatArray] | None, sizes: Sequence[LayerSizes], slots: Sequence[int]) -> TierStart:
    """The runtime's start from frequencies, or without any."""
    layers = []
    for block, (size, count) in enumerate(zip(sizes, slots, strict=True)):
        order = np.arange(size.n_experts) if freq is None else expert_order(freq[block])
        prior = np.zeros(size.n_experts) if freq is None else freq[block] * (size.top_k * PRIOR_TOKENS)
        layers.append(LayerStart(block, size.top_k, count, order, prior))
    return TierStart(tuple(layers), DECAY)


def resident(start: TierStart, pool: SlotPool) -> list[NDArray[np.int64]]:
    """Expert ids in slots now, by layer."""
    return [np.flatnonzero(pool.experts(layer.block).slots >= 0) for layer in start.layers]


def replayed(
    found: Sessions, order: Sequence[int], freq: list[FloatArray] | None, residency: float, how: How, rules: Rules
) -> dict[str, Any]:
    """One agent's day: cold-hit rate over all tokens, and what was changed."""
    trace = found.trace
    sizes = [LayerSizes(n, ids.shape[1], EXPERT_BYTES) for n, ids in zip(trace.n_experts, trace.ids, strict=True)]
    budget = residency_budget(sizes, residency)
    slots = uniform_slots(sizes, budget) if freq is None else greedy_slots(freq, sizes, budget)
    pool = SlotPool(start_of(freq, sizes, slots))
    traffic = RecentTraffic(trace.n_experts, rules)
    present, pools = freq, [0] * len(sizes)
    changes, looks, copied, next_look = 0, 0, 0, rules.every_tokens
    selections = cold = 0
    for session in order:
        part = slice(int(trace.offsets[session]), int(trace.offsets[session + 1]))
        ids = [layer[part].astype(np.int64) for layer in trace.ids]
        pool.reset_counts()
        for token in range(len(ids[0])):
            pool.step([layer[token : token + 1] for layer in ids], "decode")
        counted = [pool.counts(layer, "decode") for layer in range(len(sizes))]
        missed = sum(int(one.cold) for one in counted)
        cold += missed
        selections += sum(layer.size for layer in ids)
        traffic.add([one.selections for one in counted], len(ids[0]), missed)
        if how == "never" or traffic.tokens < next_look:
            continue
        next_look, looks = traffic.tokens + rules.every_tokens, looks + 1
        candidate = traffic.frequencies(freq)
        start = start_of(candidate, sizes, pool_slots(candidate, sizes, slots, pools))
        resident = [pool.experts(layer).slots >= 0 for layer in range(len(sizes))]
        arriving = sum(
            int((~here[layer.order[: layer.slots]]).sum()) for here, layer in zip(resident, start.layers, strict=True)
        )
        cost = arriving * EXPERT_BYTES if how == "load" else 0
        if decide(traffic, present, candidate, sizes, slots, pools, cost).outcome == "changed":
            pool.place(start if how == "load" else keeping(start, resident(start, pool)))
            present, changes = candidate, changes + 1
            copied += arriving if how == "load" else 0
    # A copy between tokens is a copy, too.
    return {"cold_hit_rate": round(cold / selections, 5), "looks": looks, "changes": changes, "loaded": copied}


def days(found: Sessions, most_tokens: int, seed: int) -> dict[str, tuple[list[int], list[FloatArray] | None]]:
    """Sessions in an order, and the profile that the day starts with."""
    rng = np.random.default_rng(seed)
    lengths = found.trace.lengths
    by_workload: dict[str, list[int]] = {}
    for session, workload in enumerate(found.workloads):
        by_workload.setdefault(workload, []).append(session)
    large = sorted(by_workload, key=lambda name: -sum(int(lengths[s]) for s in by_workload[name]))
    home, away = large[0], large[1]

    def taken(names: Sequence[str], tokens: int) -> list[int]:
        pool = rng.permutation([s for name in names for s in by_workload[name] if found.held_out[s]]).tolist()
        chosen: list[int] = []
        # A workload with few held-out sessions comes again in another order: an agent sees the like again, too.
        while sum(int(lengths[s]) for s in chosen) < tokens:
            chosen += rng.permutation(pool).tolist()
        return chosen

    fitting = [s for s in by_workload[home] if not found.held_out[s]]
    profile = frequencies([found.trace.counts(s) for s in fitting], [int(lengths[s]) for s in fitting])
    return {
        f"steady ({home})": (taken([home], most_tokens), profile),
        f"shifting ({home}, then {away})": (
            taken([home], most_tokens // 4) + taken([away], 3 * most_tokens // 4),
            profile,
        ),
        "mixed (all workloads)": (taken(large, most_tokens), profile),
        f"cold ({home})": (taken([home], most_tokens), None),
    }


def main() -> None:
    """Measure and print (or write) the rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--residency", type=float, nargs="+", default=[0.3, 0.6])
    parser.add_argument("--tokens", type=int, default=24_000)
    options = parser.parse_args()
    found = published(options.data / "gptoss20b", "gpt-oss-20b", 32)
    rows = []
    for residency in options.residency:
        for day, (order, freq) in days(found, options.tokens, seed=1).items():
            for how in ("never", "prior", "load"):
                row = {"residency": residency, "traffic": day, "replacement": how}
                rows.append(row | replayed(found, order, freq, residency, how, Rules()))
    report({"model": found.name, "tokens": options.tokens, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
