"""How well placements predict sessions that no profile has seen. Pure.

Every policy gets the same bytes at a residency. Its cold-hit rate is the mean over held-out sessions of the session's
own rate, and its interval a bootstrap over sessions: sessions are the unit, because tokens of one are not independent.

- ``uniform``: the first experts of every layer, the same share of each.
- ``random``: any experts, the same share of each layer; the mean of five seeds.
- ``own``: this workload's profile, slots by greedy.
- ``other``: the mean over all other workloads' profiles of the model; each of them is in the mismatch matrix.
- ``oracle``: the held-out sessions' own mean shares: no static placement can do better on them.
- ``lru``: a cache of the uniform slots that evicts the least recently used expert, started empty. Exact, from reuse
  distances, so for decode alone.

A profile whose hottest experts stay while the rest of the slots are a cache cannot be told from counts: how the order
of the two kinds mixes is not in them, and what can be said for certain is no better than placing once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spark_runtime.placement import (
    Interval,
    LayerSizes,
    bootstrap_interval,
    bootstrap_intervals,
    residency_budget,
    uniform_slots,
)
from spark_schemas.ids import Policy, Verdict
from spark_schemas.profile import CurvePoint, Mismatch
from spark_service.sessions import IntArray
from spark_service.trials import FloatArray, Rates, Trials, first_experts, placed_by

__all__ = [
    "MIN_SESSIONS",
    "RESIDENCIES",
    "VERDICT_RESIDENCY",
    "Evaluation",
    "Plan",
    "uniform_slots_for",
]

RESIDENCIES = tuple(step / 10 for step in range(1, 11))
VERDICT_RESIDENCY = 0.6
MIN_SESSIONS = 3
"""Fewest sessions on either side of the split that support a verdict."""
RANDOM_SEEDS = 5
_CACHE = "cache without a profile, at best"
_DIGITS = 12
"""Published rates have no more: the last bits of a float sum differ between machines."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Curves of all policies and what follows from them."""

    curves: tuple[CurvePoint, ...]
    mismatch: tuple[Mismatch, ...]
    verdict: Verdict | None
    verdict_reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a workload's frequencies ``own[layer][expert]`` and the other workloads' are tried against."""

    workload: str
    others: tuple[str, ...]
    trials: Trials

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerSizes],
        workload: str,
        own: Sequence[FloatArray],
        others: Mapping[str, Sequence[FloatArray]],
        oracle: Sequence[FloatArray],
    ) -> Plan:
        """Trials at every residency; ``oracle`` are the mean shares of the sessions that will judge."""
        names = tuple(sorted(others))
        static: list[Sequence[IntArray]] = []
        caches = []
        for residency in RESIDENCIES:
            budget = residency_budget(layers, residency)
            slots = uniform_slots_for(tuple(layers), budget)
            static.append(first_experts(slots))
            static += [_random_experts(layers, slots, seed) for seed in range(RANDOM_SEEDS)]
            static.append(placed_by(own, layers, budget))
            static += [placed_by(others[name], layers, budget) for name in names]
            static.append(placed_by(oracle, layers, budget))
            caches.append(slots)
        budget = residency_budget(layers, VERDICT_RESIDENCY)
        fresh = [first_experts(uniform_slots_for(tuple(layers), budget))]
        return cls(workload, names, Trials.of(layers, static, caches, fresh))

    def evaluate(self, rates: Rates | None, n_calibration: int) -> Evaluation:
        """Curves, mismatch and verdict from the rates of all held-out sessions; ``None`` without any of them."""
        if rates is None:
            return Evaluation((), (), *_verdict({}, n_calibration, 0))
        values: dict[tuple[Policy, float], FloatArray] = {}
        by_other: dict[tuple[str, float], FloatArray] = {}
        width = 1 + RANDOM_SEEDS + 1 + len(self.others) + 1
        for index, residency in enumerate(RESIDENCIES):
            columns = rates.static[:, index * width : (index + 1) * width]
            others = columns[:, RANDOM_SEEDS + 2 : -1]
            values["uniform", residency] = columns[:, 0]
            values["random", residency] = columns[:, 1 : RANDOM_SEEDS + 1].mean(axis=1)
            values["own", residency] = columns[:, RANDOM_SEEDS + 1]
            if self.others:
                values["other", residency] = others.mean(axis=1)
            values["oracle", residency] = columns[:, -1]
            if rates.lru is not None:
                values["lru", residency] = rates.lru[:, index]
            by_other |= {(name, residency): others[:, column] for column, name in enumerate(self.others)}
        intervals = bootstrap_intervals(np.stack([*values.values(), *by_other.values()], axis=1))
        placed: dict[Policy, tuple[str, ...]] = {"own": (self.workload,), "other": self.others}
        curves = tuple(
            CurvePoint(policy=policy, residency=residency, profiles=placed.get(policy, ()), **_ends(interval))
            for (policy, residency), interval in zip(values, intervals, strict=False)
        )
        mismatch = tuple(
            Mismatch(workload=name, residency=residency, **_ends(interval))
            for (name, residency), interval in zip(by_other, intervals[len(values) :], strict=True)
        )
        at_verdict = {
            str(policy): column for (policy, residency), column in values.items() if residency == VERDICT_RESIDENCY
        }
        if "lru" in at_verdict:
            # Distances of later selections do not depend on the start. Of the first selections, at best those of
            # experts that were resident at the start are hits; whether they had left by then counts do not say.
            at_verdict[_CACHE] = np.maximum(0.0, at_verdict["lru"] - rates.spared[:, 0])
        verdict, reason = _verdict(at_verdict, n_calibration, len(rates.hashes))
        return Evaluation(curves, mismatch, verdict, reason)


@lru_cache(maxsize=256)
def uniform_slots_for(layers: tuple[LayerSizes, ...], budget_bytes: int) -> tuple[int, ...]:
    """Remembered :func:`uniform_slots`: the same for every profile of a model."""
    return tuple(uniform_slots(layers, budget_bytes))


def _ends(interval: Interval) -> dict[str, float]:
    low, mean, high = (round(min(max(end, 0.0), 1.0), _DIGITS) for end in (interval.low, interval.mean, interval.high))
    return {"cold_hit_rate": mean, "low": low, "high": high}


def _random_experts(layers: Sequence[LayerSizes], slots: Sequence[int], seed: int) -> list[IntArray]:
    rng = np.random.default_rng(seed)
    return [rng.permutation(layer.n_experts)[:count] for layer, count in zip(layers, slots, strict=True)]


def _verdict(rates: Mapping[str, FloatArray], n_calibration: int, n_held_out: int) -> tuple[Verdict | None, str]:
    """Decide from counts alone, at 60% residency, by paired differences per held-out session.

    "Beats" means that the 95% interval of the mean difference lies clear of zero.

    - ``profile``: the profile, even placed once and never changed, beats the uniform placement *and* an LRU cache that
      starts with the first experts, counted at its best. Placing once is the limit of no decay of a cache that starts
      from the profile and keeps it as prior, so that cache beats one without a profile, too.
    - ``cache_only``: something beats the uniform placement, but the profile does not beat the cache. Where the two
      cannot be told apart this is the weaker claim, and a cache follows traffic that drifts.
    - ``no_gain``: neither beats the uniform placement.

    ``pin`` would have to beat a cache started from the profile, whose rate depends on order: counts never show it.
    """
    missing = [
        f"{MIN_SESSIONS - count} more {side} session{'s' if MIN_SESSIONS - count > 1 else ''} needed "
        f"({count} of {MIN_SESSIONS})"
        for side, count in (("held-out", n_held_out), ("calibration", n_calibration))
        if count < MIN_SESSIONS
    ]
    if missing:
        return None, " and ".join(missing)
    own, uniform = rates["own"], rates["uniform"]
    numbers = (
        f"at {VERDICT_RESIDENCY:.0%} residency, on {n_held_out} held-out sessions, the profile placed once misses "
        f"{own.mean():.1%} and the uniform placement {uniform.mean():.1%}"
    )
    own_gain = _difference(own, uniform)
    if "lru" not in rates:
        return None, f"no cache can be compared in a phase without reuse distances: {numbers}{own_gain}"
    empty, at_best = rates["lru"], rates[_CACHE]
    # Each side of a comparison gets the start that makes the claim harder.
    cache_gain, against_cache = _difference(empty, uniform), _difference(own, at_best)
    numbers = (
        f"{numbers}{own_gain}; an LRU cache without a profile misses {empty.mean():.1%} started empty{cache_gain} and "
        f"at least {at_best.mean():.1%} started full; profile minus that{against_cache}"
    )
    if own_gain.clear and against_cache.clear:
        return "profile", (
            f"the profile, even placed once and never changed, beats a cache without one: {numbers}. Whether pinning "
            "beats a cache started from it depends on order, which is not uploaded"
        )
    if own_gain.clear or cache_gain.clear:
        return "cache_only", (
            f"the profile, placed once and never changed, does not beat a cache: {numbers}. Whether a cache started "
            "from it beats one without depends on order, which is not uploaded"
        )
    return "no_gain", f"neither the profile nor a cache beats the uniform placement: {numbers}"


@dataclass(frozen=True, slots=True)
class _Difference:
    """Mean paired difference in cold-hit rate with its interval; below zero is better."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        return self.high < 0

    def __str__(self) -> str:
        return f" ({100 * self.mean:+.1f} points, {100 * self.low:+.1f} to {100 * self.high:+.1f})"


def _difference(ours: FloatArray, theirs: FloatArray) -> _Difference:
    interval = bootstrap_interval((ours - theirs).tolist())
    return _Difference(interval.mean, interval.low, interval.high)
