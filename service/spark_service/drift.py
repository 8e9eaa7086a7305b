"""When a workload's traffic is no longer what its manifests were made for. Pure.

Like is compared with like: a manifest promises what its hot set, were it never to change, misses on sessions that were
held out; of every later session that ran with it, the same hot set's misses follow from the session's counts. What
the cache really missed depends on the agent's memory and policy, too, and decides nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spark_runtime.calibration.sessions import IntArray
from spark_runtime.placement import Interval, bootstrap_intervals
from spark_schemas.drift import DriftState

__all__ = [
    "MIN_CALIBRATION",
    "MIN_JUDGES",
    "MIN_RECENT",
    "Evidence",
    "State",
    "change_day",
    "rebuilt",
    "recent_sessions",
    "reviewed",
]

FloatArray = NDArray[np.float64]
RECENT_SESSIONS = 20
"""The latest days that have so many sessions together are recent."""
MIN_RECENT = 8
"""Fewer sessions change no state."""
MIN_JUDGES = 5
"""Fewest held-out sessions of a promise that is believed, and of a rebuilt profile."""
MIN_CALIBRATION = 8
"""Fewest calibration sessions of a rebuilt profile."""
LEAST_GAIN = 0.1
"""Share of the promised misses that must have been added: less is not worth a profile of fewer sessions."""
_NORMAL_95, _NORMAL_99 = 1.959964, 2.575829
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sessions that ran with manifests of their workload, one entry each, in order of (day, session hash)."""

    days: IntArray
    """Days since 1970."""
    measured: FloatArray
    """Share of the session's decode selections that its manifest's hot set does not cover."""
    promised: FloatArray
    """The manifest's expectation of it, with the ends of its interval."""
    promised_low: FloatArray
    promised_high: FloatArray
    n_judges: IntArray
    """Held-out sessions behind the promise."""

    def __len__(self) -> int:
        return len(self.days)

    @classmethod
    def of(cls, rows: Sequence[tuple[int, float, float, float, float, int]]) -> Evidence:
        """From (day, measured, promised, low, high, judges) of each session, in their order."""
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 6)
        days, measured, promised, low, high, judges = table.T
        return cls(days.astype(np.int64), measured, promised, low, high, judges.astype(np.int64))


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a workload. Days are days since 1970."""

    state: DriftState = "steady"
    since_day: int | None = None
    """When the last change began."""
    rebuilt: bool = False
    """Whether profiles are built from the traffic since then alone."""
    after_sequence: int = -1
    """Only manifests first served after this one tell how traffic has been since the last change."""
    n_sessions: int = 0
    promised: Interval | None = None
    measured: Interval | None = None


def recent_sessions(days: IntArray) -> int:
    """Of sessions sorted by day, how many of the last ones are recent: whole days, as few as have enough."""
    if len(days) <= RECENT_SESSIONS:
        return len(days)
    return int(len(days) - np.searchsorted(days, days[-RECENT_SESSIONS], side="left"))


def reviewed(before: State, evidence: Evidence, newest_sequence: int) -> State:
    """The state after looking at all evidence that counts, that of manifests after ``before.after_sequence``.

    Traffic has moved when the recent sessions' mean excess over the *upper* end of their promises is above zero, its
    interval included, and the misses are a tenth more than promised. It is steady again once the mean is no higher
    than the upper ends; in between nothing changes. The intervals are of 99%, as this is asked again and again, and
    allow for bootstraps of few sessions being too narrow. With fewer than :data:`MIN_RECENT` sessions nothing changes.
    What was served up to ``newest_sequence`` does not count any more after a change.
    """
    size = recent_sessions(evidence.days)
    if size < MIN_RECENT:
        return before
    measured, promised, low, high = (
        values[-size:]
        for values in (evidence.measured, evidence.promised, evidence.promised_low, evidence.promised_high)
    )
    upper = promised + _widening(evidence.n_judges[-size:]) * (high - promised)
    rate, excess = bootstrap_intervals(np.stack([measured, measured - upper], axis=1))
    at_least = excess.mean - float(_widening(np.array([size]))[0]) * (excess.mean - excess.low)
    now = replace(
        before,
        n_sessions=size,
        promised=_rounded(Interval(*(float(values.mean()) for values in (promised, low, high)))),
        measured=_rounded(rate),
    )
    exceeds = at_least > 0 and rate.mean > (1 + LEAST_GAIN) * float(promised.mean())
    if exceeds and (before.state == "steady" or before.rebuilt):
        # What counts is of one profile generation: a rebuilt one that disappoints has seen another change.
        return replace(
            now,
            state="moved",
            since_day=change_day(evidence, float((measured - promised).mean())),
            rebuilt=False,
            after_sequence=newest_sequence,
        )
    if before.state == "moved" and excess.mean <= 0:
        return replace(now, state="steady")
    return now


def rebuilt(before: State, n_calibration: int, n_held_out: int, newest_sequence: int, min_sessions: int = 1) -> State:
    """The state once enough sessions came since the change to build a profile from them, and to judge it.

    From then on only manifests of that profile count.
    """
    enough = n_calibration >= max(MIN_CALIBRATION, min_sessions) and n_held_out >= MIN_JUDGES
    if before.state == "moved" and not before.rebuilt and enough:
        return replace(before, rebuilt=True, after_sequence=newest_sequence)
    return before


def change_day(evidence: Evidence, excess: float) -> int:
    """The day from which on sessions lie nearer to the promise plus ``excess`` than to the promise itself.

    The day that splits them best (a cumulative sum's extreme, Page 1954); of equals the latest.
    """
    days, starts = np.unique(evidence.days, return_index=True)
    gains = evidence.measured - evidence.promised - excess / 2
    from_day_on = np.add.reduceat(gains, starts)[::-1].cumsum()
    return int(days[::-1][int(np.argmax(from_day_on))])


def _widening(n_sessions: IntArray) -> FloatArray:
    """How much wider a 99% interval of a mean is than its 95% percentile bootstrap, for so many sessions, at least 2.

    The bootstrap takes the variance with n in place of n - 1 and the normal quantile in place of Student's, here by
    its expansion (Fisher and Cornish 1960).
    """
    z = _NORMAL_99
    free = np.asarray(n_sessions, dtype=np.float64) - 1
    quantile = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    widening: FloatArray = np.sqrt((free + 1) / free) * quantile / _NORMAL_95
    return widening


def _rounded(interval: Interval) -> Interval:
    return Interval(*(round(min(max(end, 0.0), 1.0), _DIGITS) for end in (interval.mean, interval.low, interval.high)))
