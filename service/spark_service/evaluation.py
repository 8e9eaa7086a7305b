"""How well placements predict sessions that no profile has seen. Pure.

Every policy gets the same bytes at a residency. Its cold-hit rate is the mean over held-out sessions of the session's
own rate, and its interval a bootstrap over sessions: sessions are the unit, because tokens of one are not independent.

- ``uniform``: the first experts of every layer, the same share of each.
- ``random``: any experts, the same share of each layer; the mean of five seeds.
- ``own``: this workload's profile, slots by greedy.
- ``other``: the mean over all other workloads' profiles of the model.
- ``oracle``: the held-out sessions' own mean shares: no static placement can do better on them.
- ``lru``: a cache of the uniform slots that evicts the least recently used expert, started empty. Exact, from reuse
  distances, so for decode alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import (
    LayerSizes,
    bootstrap_interval,
    cold_hit_rates,
    greedy_slots,
    hot_set,
    lru_cold_hit_rates,
    residency_budget,
    session_totals,
    shares,
    uniform_slots,
)
from spark_schemas.ids import Policy, Verdict
from spark_schemas.profile import CurvePoint
from spark_service.sessions import IntArray, Session, stack_counts

__all__ = [
    "MIN_SESSIONS",
    "RESIDENCIES",
    "VERDICT_RESIDENCY",
    "Evaluation",
    "evaluate",
    "first_experts",
    "uniform_slots_for",
]

FloatArray = NDArray[np.float64]

RESIDENCIES = tuple(step / 10 for step in range(1, 11))
VERDICT_RESIDENCY = 0.6
MIN_SESSIONS = 3
"""Fewest sessions on either side of the split that support a verdict."""
RANDOM_SEEDS = 5
_CACHE = "cache without a profile, at best"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Curves of all policies and what follows from them."""

    curves: tuple[CurvePoint, ...]
    verdict: Verdict | None
    verdict_reason: str


def evaluate(
    layers: Sequence[LayerSizes],
    workload: str,
    own: Sequence[FloatArray],
    others: Mapping[str, Sequence[FloatArray]],
    held_out: Sequence[Session],
    n_calibration: int,
) -> Evaluation:
    """Evaluate a workload's frequencies ``own[layer][expert]`` and the other workloads' on held-out sessions.

    Without held-out sessions there are no curves and no verdict.
    """
    curves: list[CurvePoint] = []
    at_verdict: dict[str, FloatArray] = {}
    placed_by: dict[Policy, tuple[str, ...]] = {"own": (workload,), "other": tuple(sorted(others))}
    if not held_out:
        return Evaluation((), *_verdict({}, n_calibration, 0))
    judges = _Judges(held_out)
    for residency in RESIDENCIES:
        budget = residency_budget(layers, residency)
        rates = _rates_at(layers, budget, own, others, judges)
        for policy, values in rates.items():
            interval = bootstrap_interval(values.tolist())
            curves.append(
                CurvePoint(
                    policy=policy,
                    residency=residency,
                    cold_hit_rate=interval.mean,
                    low=interval.low,
                    high=interval.high,
                    profiles=placed_by.get(policy, ()),
                )
            )
        if residency == VERDICT_RESIDENCY:
            at_verdict = {str(policy): values for policy, values in rates.items()}
            if "lru" in rates:
                at_verdict[_CACHE] = _filled_cache_at_best(
                    judges, uniform_slots_for(tuple(layers), budget), rates["lru"]
                )
    verdict, reason = _verdict(at_verdict, n_calibration, len(held_out))
    return Evaluation(tuple(curves), verdict, reason)


def first_experts(slots: Sequence[int]) -> list[IntArray]:
    """The uniform placement: the first ids of each layer."""
    return [np.arange(count) for count in slots]


@lru_cache(maxsize=256)
def uniform_slots_for(layers: tuple[LayerSizes, ...], budget_bytes: int) -> tuple[int, ...]:
    """Remembered :func:`uniform_slots`: the same for every profile of a model."""
    return tuple(uniform_slots(layers, budget_bytes))


class _Judges:
    """The held-out sessions, at least one, as every placement is judged by them."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.counts = stack_counts(sessions)
        """``[layer][session, expert]``."""
        known = [session.reuse for session in sessions if session.reuse is not None]
        complete = len(known) == len(sessions)
        self.reuse = [np.stack(layer) for layer in zip(*known, strict=True)] if complete else None
        """``[layer][session, distance]``, or ``None`` where a session has none."""
        # The plain mean of shares is what the mean of session rates rewards: small sessions count fully there too.
        each = [shares(session.counts) for session in sessions]
        self.frequency = [np.mean(layer, axis=0) for layer in zip(*each, strict=True)]
        """The sessions' own mean shares, ``[layer][expert]``."""


def _rates_at(
    layers: Sequence[LayerSizes],
    budget: int,
    own: Sequence[FloatArray],
    others: Mapping[str, Sequence[FloatArray]],
    judges: _Judges,
) -> dict[Policy, FloatArray]:
    slots = uniform_slots_for(tuple(layers), budget)

    def placed(frequency: Sequence[FloatArray]) -> FloatArray:
        return cold_hit_rates(judges.counts, hot_set(frequency, greedy_slots(frequency, layers, budget)))

    random = [cold_hit_rates(judges.counts, _random_experts(layers, slots, seed)) for seed in range(RANDOM_SEEDS)]
    rates: dict[Policy, FloatArray] = {
        "uniform": cold_hit_rates(judges.counts, first_experts(slots)),
        "random": np.mean(random, axis=0),
        "own": placed(own),
    }
    if others:
        rates["other"] = np.mean([placed(others[name]) for name in sorted(others)], axis=0)
    rates["oracle"] = placed(judges.frequency)
    if judges.reuse is not None:
        rates["lru"] = lru_cold_hit_rates(judges.reuse, slots)
    return rates


def _random_experts(layers: Sequence[LayerSizes], slots: Sequence[int], seed: int) -> list[IntArray]:
    rng = np.random.default_rng(seed)
    return [rng.permutation(layer.n_experts)[:count] for layer, count in zip(layers, slots, strict=True)]


def _filled_cache_at_best(judges: _Judges, slots: Sequence[int], empty: FloatArray) -> FloatArray:
    """Lowest cold-hit rate that an LRU cache filled with the first experts can have had in each session.

    Distances of later selections do not depend on the start. Of the first selections, at best those of experts that
    were resident at the start are hits; whether they had left by then is not known from counts. ``empty`` are the
    rates of a cache that starts empty.
    """
    spared = [np.count_nonzero(layer[:, :count], axis=1) for layer, count in zip(judges.counts, slots, strict=True)]
    selections = np.array(session_totals(judges.counts), dtype=np.float64)
    at_best: FloatArray = np.maximum(0.0, empty - np.sum(spared, axis=0) / selections)
    return at_best


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
