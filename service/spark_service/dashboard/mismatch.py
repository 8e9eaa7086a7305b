"""How every workload's profile does on every other workload's held-out sessions, and which one fits most. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from spark_schemas.ids import Verdict
from spark_schemas.profile import Profile
from spark_service.dashboard.profile_page import rate_at
from spark_service.dashboard.words import counted, percent
from spark_service.nearest import NEAREST_RESIDENCY, most_general

__all__ = ["MAX_SHOWN", "MatrixCell", "MatrixRow", "MismatchMatrix", "mismatch_matrix"]

MAX_SHOWN = 24
"""Workloads of a matrix: those of the most sessions."""


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class MatrixCell(_View):
    """One profile on one workload's held-out sessions."""

    profile: str
    """Whose profile."""
    cold_hit_rate: float
    low: float | None
    """``None``: a single session gives no interval."""
    high: float | None
    is_own: bool
    excess: float
    """Above the lowest of the row."""

    @property
    def shade(self) -> int:
        """How far above the lowest, from 0 to 5: each step twice as far, the first from one point on."""
        return sum(self.excess >= 0.01 * 2**step for step in range(5))


class MatrixRow(_View):
    """One workload that judges."""

    workload: str
    n_calibration: int
    n_held_out: int
    verdict: Verdict | None
    cells: tuple[MatrixCell | None, ...]
    """In the order of the matrix's profiles; ``None`` where nothing was held out."""
    best: str | None
    uniform: float | None
    """What the first experts of every layer miss."""


class MismatchMatrix(_View):
    """All of them, at one residency."""

    residency: float
    profiles: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    left_out: int
    """Workloads that are not shown because there are too many."""
    advice: str
    """Which profile to use for traffic that is none of these, or all of them."""
    missing: str | None
    """In place of the matrix."""


def mismatch_matrix(profiles: Mapping[str, Profile]) -> MismatchMatrix:
    """The matrix of all workloads of a model by name, each a profile of a single workload."""
    busiest = sorted(profiles, key=lambda name: (-_sessions(profiles[name]), name))
    shown = tuple(sorted(busiest[:MAX_SHOWN]))
    rows = tuple(_row(profiles[name], shown) for name in shown)
    missing = None
    if not profiles:
        missing = "No profiles yet: no workload of this model has calibration sessions."
    elif len(profiles) == 1:
        [name] = profiles
        missing = f"Nothing to compare with: {name} is this model's only workload so far."
    elif not any(row.n_held_out for row in rows):
        missing = "No held-out sessions yet in any workload: nothing says how a profile does on other traffic."
    return MismatchMatrix(
        residency=NEAREST_RESIDENCY,
        profiles=shown,
        rows=rows,
        left_out=len(profiles) - len(shown),
        advice=_advice(profiles),
        missing=missing,
    )


def _sessions(profile: Profile) -> int:
    return profile.n_calibration + profile.n_held_out


def _row(judge: Profile, shown: tuple[str, ...]) -> MatrixRow:
    rates = {
        row.workload: (row.cold_hit_rate, row.low, row.high)
        for row in judge.mismatch
        if row.residency == NEAREST_RESIDENCY
    }
    for point in judge.curves:
        if (point.policy, point.residency) == ("own", NEAREST_RESIDENCY):
            rates[judge.workload] = (point.cold_hit_rate, point.low, point.high)
    known = {name: rates[name] for name in shown if name in rates}
    lowest = min((rate for rate, _, _ in known.values()), default=0.0)
    single = judge.n_held_out < 2
    return MatrixRow(
        workload=judge.workload,
        n_calibration=judge.n_calibration,
        n_held_out=judge.n_held_out,
        verdict=judge.verdict,
        cells=tuple(
            MatrixCell(
                profile=name,
                cold_hit_rate=known[name][0],
                low=None if single else known[name][1],
                high=None if single else known[name][2],
                is_own=name == judge.workload,
                excess=known[name][0] - lowest,
            )
            if name in known
            else None
            for name in shown
        ),
        best=min(known, key=lambda name: (known[name][0], name)) if known else None,
        uniform=rate_at(judge, "uniform", NEAREST_RESIDENCY),
    )


def _advice(profiles: Mapping[str, Profile]) -> str:
    found = most_general(profiles)
    if found is None:
        return (
            "Which profile suits other traffic best cannot be said yet: that needs held-out sessions of at least two "
            "workloads."
        )
    return (
        f"For traffic that none of these describes use {found.workload}: with {NEAREST_RESIDENCY:.0%} of the experts "
        f"it misses {percent(found.cold_hit_rate)} on {counted(found.n_sessions, 'held-out session')} of "
        f"{counted(found.n_workloads, 'other workload')}, the least of all. For a mix in known proportions, mix their "
        "profiles."
    )
