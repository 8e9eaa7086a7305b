"""How far a workload's profile has moved since a day: what it was then beside what it is now. Pure.

Of two profiles a day apart the sessions in between can be told when they are few. So nothing is said unless the
sessions before the day, and those since, are each as many as a profile needs to be given to anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import BaseModel, ConfigDict

from spark_runtime.calibration.evaluation import VERDICT_RESIDENCY
from spark_runtime.calibration.tally import Tally, Window
from spark_runtime.placement import FloatArray, LayerSizes, greedy_slots, hot_set, residency_budget
from spark_service.dashboard.words import counted, day

__all__ = ["Shift", "ShiftSize", "between", "shift_since"]


class ShiftSize(BaseModel):
    """The difference between two sets of frequencies. Shares weight each layer by its selections per token."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    frequency_shift: float
    """Half the sum of absolute differences between the expected shares: 0 for the same, 1 for nothing in common."""
    residency: float
    """Share of the experts' bytes that the hot sets below are of."""
    entering: int
    """Experts that are in the later hot set alone."""
    leaving: int
    hot: int
    """Experts in the later hot set."""
    entering_share: float
    """Expected selections, by the later frequencies, of those that enter."""


class Shift(BaseModel):
    """How a profile moved since a day, or why that is not said."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    since: str
    """The first day of what is new."""
    n_before: int
    """Calibration sessions received before it."""
    n_since: int
    moved: ShiftSize | None
    sentence: str


def shift_since(
    layers: Sequence[LayerSizes], tally: Tally, window: Window, first_day: int, *, min_sessions: int
) -> Shift:
    """Compare a workload's calibration sessions before ``first_day`` (days since 1970) with all of them.

    ``window`` says which count now; as of that day the same bounds held. At least ``min_sessions`` and never fewer than
    1 must be on either side.
    """
    days = tally.sides["calibration"]
    old = tally.until(first_day - 1)
    as_of = replace(window, today=first_day - 1) if window.today else window
    now, before = tally.votes("calibration", window), old.votes("calibration", as_of)
    n_since = sum(days[one].votes.n_sessions for one in days if one >= first_day and window.factor(one))
    needed = max(1, min_sessions)

    def told(sentence: str, moved: ShiftSize | None = None) -> Shift:
        return Shift(since=day(first_day), n_before=before.n_sessions, n_since=n_since, moved=moved, sentence=sentence)

    if not n_since:
        return told(f"Unchanged: no calibration session came since {day(first_day)}.")
    for side, found in (("before", before.n_sessions), ("since", n_since)):
        if found < needed:
            return told(
                f"How far it moved cannot be said yet: {found} of {counted(needed, 'session')} needed came {side} "
                f"{day(first_day)}, {needed - found} more needed."
            )
    moved = between(layers, before.frequencies(), now.frequencies())
    return told(
        f"Since {day(first_day)} {moved.frequency_shift:.1%} of the expected selections moved to other experts: "
        f"{counted(moved.entering, 'expert')} of {moved.hot:,} changed in the hot set at {moved.residency:.0%}, worth "
        f"{moved.entering_share:.1%} of the selections. {counted(n_since, 'new session')}, {before.n_sessions:,} "
        "before; some of it is chance, and only missed promises show that traffic has changed.",
        moved,
    )


def between(layers: Sequence[LayerSizes], before: Sequence[FloatArray], after: Sequence[FloatArray]) -> ShiftSize:
    """What differs between two sets of frequencies of one model, with hot sets at the residency of verdicts."""
    budget = residency_budget(layers, VERDICT_RESIDENCY)
    sets = [hot_set(one, greedy_slots(one, layers, budget)) for one in (before, after)]
    top_k = np.array([layer.top_k for layer in layers], dtype=np.float64)
    shifts, shares, counts = [], [], np.zeros(3, dtype=np.int64)
    for old, new, was, now in zip(before, after, *sets, strict=True):
        entering = np.setdiff1d(now, was)
        counts += (len(entering), len(np.setdiff1d(was, now)), len(now))
        shifts.append(float(np.abs(new - old).sum()) / 2)
        shares.append(float(new[entering].sum()))
    return ShiftSize(
        frequency_shift=_bounded(top_k @ np.array(shifts) / top_k.sum()),
        residency=VERDICT_RESIDENCY,
        entering=int(counts[0]),
        leaving=int(counts[1]),
        hot=int(counts[2]),
        entering_share=_bounded(top_k @ np.array(shares) / top_k.sum()),
    )


def _bounded(rate: float) -> float:
    return min(max(float(rate), 0.0), 1.0)
