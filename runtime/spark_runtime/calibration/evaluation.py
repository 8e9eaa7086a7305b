"""How well placements predict sessions that no profile has seen. Pure.

Every policy gets the same bytes at a residency. Its cold-hit rate is the mean over held-out sessions of the session's
own rate, and its interval a bootstrap over sessions: sessions are the unit, because tokens of one are not independent.
The workloads of a mix are strata: the rate is the weighted mean of their means, the bootstrap resamples within each.

- ``uniform``: the first experts of every layer, the same share of each.
- ``random``: any experts, the same share of each layer; the mean of five seeds.
- ``own``: this workload's profile, slots by greedy.
- ``other``: the mean over all other workloads' profiles of the model; each of them is in the mismatch matrix. Of a mix
  those that are not in it; the profiles of its own workloads, each alone, are in the matrix too: what mixing gains.
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

from spark_runtime.calibration.sessions import IntArray
from spark_runtime.calibration.trials import FloatArray, Rates, Trials, first_experts, placed_by
from spark_runtime.placement import (
    Interval,
    LayerSizes,
    residency_budget,
    stratified_intervals,
    uniform_slots,
    weighted_mean,
)
from spark_schemas.ids import Policy, Verdict
from spark_schemas.profile import CurvePoint, Mismatch

__all__ = [
    "MIN_SESSIONS",
    "RESIDENCIES",
    "VERDICT_RESIDENCY",
    "Evaluation",
    "Plan",
    "Stratum",
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

_Columns = tuple[FloatArray, ...]
"""One value a held-out session, an array for each workload of what is judged."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Curves of all policies and what follows from them."""

    curves: tuple[CurvePoint, ...]
    mismatch: tuple[Mismatch, ...]
    verdict: Verdict | None
    verdict_reason: str


@dataclass(frozen=True, slots=True)
class Stratum:
    """One workload of what is judged: its weight, its sessions on either side, and the rates of the held-out ones."""

    workload: str
    weight: int
    n_calibration: int
    n_held_out: int
    rates: Rates | None
    """``None`` where any workload has no held-out sessions: then nothing is claimed of the whole."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the frequencies of a profile and of those it is compared with are tried against."""

    members: tuple[str, ...]
    others: tuple[str, ...]
    trials: Trials

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerSizes],
        members: Mapping[str, Sequence[FloatArray]],
        own: Sequence[FloatArray],
        others: Mapping[str, Sequence[FloatArray]],
        oracle: Sequence[FloatArray],
    ) -> Plan:
        """Trials at every residency of ``own[layer][expert]``, the frequencies of all ``members`` together.

        Compared with it are the ``others``, and of a mix each of its members; ``oracle`` are the mean shares of the
        sessions that will judge.
        """
        names = tuple(sorted(others))
        compared = [others[name] for name in names]
        if len(members) > 1:
            compared += members.values()
        static: list[Sequence[IntArray]] = []
        caches = []
        for residency in RESIDENCIES:
            budget = residency_budget(layers, residency)
            slots = uniform_slots_for(tuple(layers), budget)
            static.append(first_experts(slots))
            static += [_random_experts(layers, slots, seed) for seed in range(RANDOM_SEEDS)]
            static.append(placed_by(own, layers, budget))
            static += [placed_by(frequency, layers, budget) for frequency in compared]
            static.append(placed_by(oracle, layers, budget))
            caches.append(slots)
        budget = residency_budget(layers, VERDICT_RESIDENCY)
        fresh = [first_experts(uniform_slots_for(tuple(layers), budget))]
        return cls(tuple(members), names, Trials.of(layers, static, caches, fresh))

    @property
    def compared(self) -> tuple[str, ...]:
        """Whose profiles are a row of the mismatch matrix."""
        return self.others + (self.members if len(self.members) > 1 else ())

    def evaluate(self, strata: Sequence[Stratum]) -> Evaluation:
        """Curves, mismatch and verdict from the rates of all held-out sessions of all members, in their order."""
        rates = [stratum.rates for stratum in strata if stratum.rates is not None]
        if len(rates) < len(strata):
            return Evaluation((), (), *_verdict({}, strata))
        with_lru = all(one.lru is not None for one in rates)
        by_policy = [self._by_policy(one, with_lru=with_lru) for one in rates]
        by_profile = [self._by_profile(one) for one in rates]
        values = [
            np.stack([*policies.values(), *profiles.values()], axis=1)
            for policies, profiles in zip(by_policy, by_profile, strict=True)
        ]
        intervals = stratified_intervals(values, [stratum.weight for stratum in strata])
        placed: dict[Policy, tuple[str, ...]] = {"own": self.members, "other": self.others}
        curves = tuple(
            CurvePoint(policy=policy, residency=residency, profiles=placed.get(policy, ()), **_ends(interval))
            for (policy, residency), interval in zip(by_policy[0], intervals, strict=False)
        )
        mismatch = tuple(
            Mismatch(workload=name, residency=residency, **_ends(interval))
            for (name, residency), interval in zip(by_profile[0], intervals[len(by_policy[0]) :], strict=True)
        )
        at_verdict: dict[str, _Columns] = {
            policy: tuple(policies[policy, residency] for policies in by_policy)
            for policy, residency in by_policy[0]
            if residency == VERDICT_RESIDENCY
        }
        if "lru" in at_verdict:
            # Distances of later selections do not depend on the start. Of the first selections, at best those of
            # experts that were resident at the start are hits; whether they had left by then counts do not say.
            at_verdict[_CACHE] = tuple(
                np.maximum(0.0, columns - one.spared[:, 0])
                for columns, one in zip(at_verdict["lru"], rates, strict=True)
            )
        return Evaluation(curves, mismatch, *_verdict(at_verdict, strata))

    def _at_residencies(self, rates: Rates) -> list[tuple[float, FloatArray]]:
        """The columns of ``rates.static`` that belong to each residency, in the order of :meth:`of`."""
        width = 1 + RANDOM_SEEDS + 1 + len(self.compared) + 1
        return [
            (residency, rates.static[:, index * width : (index + 1) * width])
            for index, residency in enumerate(RESIDENCIES)
        ]

    def _by_policy(self, rates: Rates, *, with_lru: bool) -> dict[tuple[Policy, float], FloatArray]:
        values: dict[tuple[Policy, float], FloatArray] = {}
        for index, (residency, columns) in enumerate(self._at_residencies(rates)):
            values["uniform", residency] = columns[:, 0]
            values["random", residency] = columns[:, 1 : RANDOM_SEEDS + 1].mean(axis=1)
            values["own", residency] = columns[:, RANDOM_SEEDS + 1]
            if self.others:
                first = RANDOM_SEEDS + 2
                values["other", residency] = columns[:, first : first + len(self.others)].mean(axis=1)
            values["oracle", residency] = columns[:, -1]
            if with_lru and rates.lru is not None:
                values["lru", residency] = rates.lru[:, index]
        return values

    def _by_profile(self, rates: Rates) -> dict[tuple[str, float], FloatArray]:
        return {
            (name, residency): columns[:, RANDOM_SEEDS + 2 + position]
            for residency, columns in self._at_residencies(rates)
            for position, name in enumerate(self.compared)
        }


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


def _verdict(rates: Mapping[str, _Columns], strata: Sequence[Stratum]) -> tuple[Verdict | None, str]:
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
        f"{stratum.workload + ': ' if len(strata) > 1 else ''}"
        f"{MIN_SESSIONS - count} more {side} session{'s' if MIN_SESSIONS - count > 1 else ''} needed "
        f"({count} of {MIN_SESSIONS})"
        for stratum in strata
        for side, count in (("held-out", stratum.n_held_out), ("calibration", stratum.n_calibration))
        if count < MIN_SESSIONS
    ]
    if missing:
        return None, " and ".join(missing)
    weights = [stratum.weight for stratum in strata]
    mean = {name: float(weighted_mean([one.mean() for one in of], weights)) for name, of in rates.items()}
    own, uniform = rates["own"], rates["uniform"]
    numbers = (
        f"at {VERDICT_RESIDENCY:.0%} residency, on {sum(stratum.n_held_out for stratum in strata)} held-out sessions, "
        f"the profile placed once misses {mean['own']:.1%} and the uniform placement {mean['uniform']:.1%}"
    )
    own_gain = _difference(own, uniform, weights)
    if "lru" not in rates:
        return None, f"no cache can be compared in a phase without reuse distances: {numbers}{own_gain}"
    empty, at_best = rates["lru"], rates[_CACHE]
    # Each side of a comparison gets the start that makes the claim harder.
    cache_gain, against_cache = _difference(empty, uniform, weights), _difference(own, at_best, weights)
    numbers = (
        f"{numbers}{own_gain}; an LRU cache without a profile misses {mean['lru']:.1%} started empty{cache_gain} and "
        f"at least {mean[_CACHE]:.1%} started full; profile minus that{against_cache}"
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


def _difference(ours: _Columns, theirs: _Columns, weights: Sequence[int]) -> _Difference:
    differences = [(one - other)[:, None] for one, other in zip(ours, theirs, strict=True)]
    [interval] = stratified_intervals(differences, weights)
    return _Difference(interval.mean, interval.low, interval.high)
