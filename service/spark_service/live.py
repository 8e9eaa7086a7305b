"""What agents measured while they ran, as rates by policy and residency, and what that says of a profile. Pure.

A measured rate is of other sessions than a curve's, at whatever residency an agent had, with slots that held what
earlier sessions had left there. So it stands beside the curves and cannot be compared with them session by session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.calibration.sessions import IntArray
from spark_runtime.placement import bootstrap_interval
from spark_schemas.ids import Verdict
from spark_schemas.profile import LiveComparison, LivePoint, LivePolicy
from spark_schemas.split import split_of

__all__ = ["MIN_SESSIONS", "LiveEvaluation", "LiveParts", "evaluate_live", "live_verdict", "sessions_measured"]

MIN_SESSIONS = 3
"""Fewest sessions whose mean is published."""
MIN_VERDICT_SESSIONS = 8
"""Fewest sessions of either kind that may change a verdict."""
VERDICT_PERCENT = 60
_RESAMPLES = 2000
_DIGITS = 12
"""Published rates have no more: the last bits of a float sum differ between machines."""
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LiveParts:
    """What was measured of some parts of one workload: a row each, decode alone."""

    hashes: Sequence[str]
    days: IntArray
    """When each was received, days since 1970."""
    selections: IntArray
    cold_hits: IntArray
    resident_bytes: IntArray
    profile_workloads: Sequence[str | None]
    """Whose manifest placed the experts; ``None`` for the first experts of each layer, without a prior."""

    def __len__(self) -> int:
        return len(self.hashes)


@dataclass(frozen=True, slots=True)
class LiveEvaluation:
    """What is published of it."""

    points: tuple[LivePoint, ...] = ()
    comparisons: tuple[LiveComparison, ...] = ()

    @property
    def identity(self) -> bytes:
        """Changes exactly when one of the published numbers does; empty without any."""
        return "\n".join(one.model_dump_json() for one in (*self.points, *self.comparisons)).encode()


def evaluate_live(
    parts: LiveParts, workload: str, expert_bytes_total: int, *, first_day: int | None = None
) -> LiveEvaluation:
    """Rates of a workload's held-out sessions by policy and residency, rounded to whole percent of the expert bytes.

    ``live_profile`` ran with a manifest of this workload, ``live_unprofiled`` without any; what ran with another
    workload's is neither. A calibration session may be in the profile that placed it, so none counts. Parts of one
    session under one policy and residency add up. Parts received before ``first_day`` (days since 1970) are left out.
    A mean of fewer than three sessions would show theirs and is not given.
    """
    misses = _misses(parts, workload, expert_bytes_total, first_day)
    rates = {
        key: np.array([cold / selections for _, (cold, selections) in sorted(group.items())])
        for key, group in sorted(misses.items())
        if len(group) >= MIN_SESSIONS
    }
    points = tuple(_point(policy, percent, values) for (policy, percent), values in rates.items())
    comparisons = tuple(
        _comparison(percent, with_profile, rates["live_unprofiled", percent])
        for (policy, percent), with_profile in rates.items()
        if policy == "live_profile" and ("live_unprofiled", percent) in rates
    )
    return LiveEvaluation(points, comparisons)


def sessions_measured(parts: LiveParts, workload: str, expert_bytes_total: int) -> dict[LivePolicy, int]:
    """Of each policy, how many held-out sessions :func:`evaluate_live` has at the residency that has the most."""
    found: dict[LivePolicy, int] = {"live_profile": 0, "live_unprofiled": 0}
    for (policy, _), group in _misses(parts, workload, expert_bytes_total, None).items():
        found[policy] = max(found[policy], len(group))
    return found


def _misses(
    parts: LiveParts, workload: str, expert_bytes_total: int, first_day: int | None
) -> dict[tuple[LivePolicy, int], dict[str, tuple[int, int]]]:
    """(misses, selections) by policy and whole percent of the expert bytes, and session."""
    misses: dict[tuple[LivePolicy, int], dict[str, tuple[int, int]]] = {}
    for index, session_hash in enumerate(parts.hashes):
        of = parts.profile_workloads[index]
        if of not in (None, workload) or split_of(session_hash) != "held_out":
            continue
        if first_day is not None and parts.days[index] < first_day:
            continue
        percent = max(1, round(100 * int(parts.resident_bytes[index]) / expert_bytes_total))
        group = misses.setdefault(("live_unprofiled" if of is None else "live_profile", percent), {})
        cold, selections = group.get(session_hash, (0, 0))
        group[session_hash] = (cold + int(parts.cold_hits[index]), selections + int(parts.selections[index]))
    return misses


def live_verdict(verdict: Verdict | None, reason: str, live: LiveEvaluation) -> tuple[Verdict | None, str]:
    """A verdict from counts, changed where enough sessions measured the opposite, and said to be.

    Counts can only argue about a cache that starts from a profile; live sessions ran one. But they are other sessions
    with and without a profile, and nobody drew lots for them: so only a difference whose 95% interval is clear of
    zero, from at least eight sessions of either kind, changes anything, and of several residencies the one with the
    most sessions decides. ``None`` stays: it means that too few sessions are there at all.
    """
    told = [one for one in live.comparisons if min(one.n_profile, one.n_unprofiled) >= MIN_VERDICT_SESSIONS]
    if verdict is None or not told:
        return verdict, reason
    one = max(
        told,
        key=lambda found: (min(found.n_profile, found.n_unprofiled), -abs(100 * found.residency - VERDICT_PERCENT)),
    )
    numbers = (
        f"measured live at {one.residency:.0%} residency, {one.n_profile} held-out sessions with the profile against "
        f"{one.n_unprofiled} others without: {100 * one.difference:+.1f} points "
        f"({100 * one.low:+.1f} to {100 * one.high:+.1f})"
    )
    if one.high < 0 and verdict != "profile":
        return "profile", f"the profile as start and prior beat a cache without one: {numbers}. From counts: {reason}"
    if one.low > 0 and verdict == "profile":
        return "cache_only", (
            f"the profile as start and prior did not beat a cache without one: {numbers}. From counts: {reason}"
        )
    return verdict, f"{reason}. {numbers[0].upper()}{numbers[1:]}"


def _point(policy: LivePolicy, percent: int, rates: FloatArray) -> LivePoint:
    interval = bootstrap_interval(rates.tolist())
    low, mean, high = (round(min(max(end, 0.0), 1.0), _DIGITS) for end in (interval.low, interval.mean, interval.high))
    return LivePoint(
        policy=policy,
        residency=percent / 100,
        cold_hit_rate=mean,
        low=low,
        high=high,
        n_sessions=len(rates),
    )


def _comparison(percent: int, with_profile: FloatArray, without: FloatArray) -> LiveComparison:
    """Difference of two means of different sessions, each side resampled by itself."""
    rng = np.random.default_rng(0)
    drawn = [
        values[rng.integers(0, len(values), size=(_RESAMPLES, len(values)))].mean(axis=1)
        for values in (with_profile, without)
    ]
    low, high = np.quantile(drawn[0] - drawn[1], [0.025, 0.975]).tolist()
    return LiveComparison(
        residency=percent / 100,
        difference=round(float(with_profile.mean() - without.mean()), _DIGITS),
        low=round(low, _DIGITS),
        high=round(high, _DIGITS),
        n_profile=len(with_profile),
        n_unprofiled=len(without),
    )
