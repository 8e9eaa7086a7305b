"""Two profiles side by side: two workloads, or one as its latest sessions make it beside all of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from spark_runtime.calibration.evaluation import RESIDENCIES, VERDICT_RESIDENCY
from spark_runtime.placement import layer_sizes
from spark_schemas.ids import Phase
from spark_schemas.mix import Mix
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile
from spark_service.dashboard.heat_map import shares_of
from spark_service.dashboard.mismatch import MismatchMatrix
from spark_service.dashboard.profile_page import ModelName, VerdictView, verdict_of
from spark_service.dashboard.shift import ShiftSize, between
from spark_service.dashboard.words import counted, interval, percent, points

__all__ = ["Cell", "ComparePage", "Cross", "MixRate", "MixView", "RateRow", "Side", "SideView", "compare_page"]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Cell(_View):
    """A rate with its 95% interval over sessions."""

    cold_hit_rate: float
    low: float | None
    """``None``: a single session gives no interval."""
    high: float | None


class SideView(_View):
    """One of the two."""

    workload: str
    period: str | None
    """Which sessions; ``None``: as served now."""
    label: str
    revision: str
    n_calibration: int
    n_held_out: int
    verdict: VerdictView


class RateRow(_View):
    """Both at one residency, each profile on the held-out sessions of its own side."""

    residency: float
    a: Cell | None
    a_uniform: Cell | None
    b: Cell | None
    b_uniform: Cell | None


class Cross(_View):
    """One side's profile on the other side's held-out sessions."""

    profile: str
    sessions: str
    n_held_out: int
    other: Cell
    own: Cell
    sentence: str


class MixRate(_View):
    """One profile on the held-out sessions of the mix."""

    profile: str
    is_mix: bool
    rate: Cell


class MixView(_View):
    """What one profile for mixed traffic would miss, beside each of its workloads' own profile alone."""

    name: str
    sentence: str
    rates: tuple[MixRate, ...]


class ComparePage(_View):
    """The page: what was asked for, both sides, and every workload against every other."""

    model: ModelName
    phase: Phase
    sides: tuple[SideView, SideView] | None
    sides_missing: str | None
    """Why there are no two sides."""
    rates: tuple[RateRow, ...]
    difference: ShiftSize | None
    difference_sentence: str
    crosses: tuple[Cross, ...]
    crosses_missing: str | None
    matrix: MismatchMatrix
    mix: MixView | None


@dataclass(frozen=True, slots=True)
class Side:
    """A profile and which sessions were chosen for it; ``None``: as served now."""

    profile: Profile
    period: str | None = None

    @property
    def label(self) -> str:
        """What to call it."""
        return self.profile.workload if self.period is None else f"{self.profile.workload}, {self.period}"


def compare_page(
    shape: ModelShape,
    phase: Phase,
    sides: tuple[Side, Side] | None,
    missing: str | None,
    matrix: MismatchMatrix,
    mixed: Profile | str | None,
) -> ComparePage:
    """The page; without two sides ``missing`` says why. ``mixed`` is a mix's profile, or why there is none."""
    model, mix = ModelName.of(shape), _mix(mixed)
    if sides is None:
        return ComparePage(
            model=model,
            phase=phase,
            sides=None,
            sides_missing=missing,
            rates=(),
            difference=None,
            difference_sentence="",
            crosses=(),
            crosses_missing=None,
            matrix=matrix,
            mix=mix,
        )
    a, b = sides
    difference = between(layer_sizes(shape), shares_of(a.profile), shares_of(b.profile))
    crosses = tuple(one for one in (_cross(a, b), _cross(b, a)) if one is not None)
    return ComparePage(
        model=model,
        phase=phase,
        sides=(_side(a), _side(b)),
        sides_missing=None,
        rates=tuple(
            RateRow(
                residency=residency,
                a=_own(a.profile, "own", residency),
                a_uniform=_own(a.profile, "uniform", residency),
                b=_own(b.profile, "own", residency),
                b_uniform=_own(b.profile, "uniform", residency),
            )
            for residency in RESIDENCIES
            if a.profile.curves or b.profile.curves
        ),
        difference=difference,
        difference_sentence=_difference(a, b, difference),
        crosses=crosses,
        crosses_missing=None if crosses else _no_crosses(a, b),
        matrix=matrix,
        mix=mix,
    )


def _mix(mixed: Profile | str | None) -> MixView | None:
    if mixed is None or isinstance(mixed, str):
        return None if mixed is None else MixView(name="", sentence=mixed, rates=())
    own = _own(mixed, "own", VERDICT_RESIDENCY)
    if own is None:
        return MixView(name=mixed.workload, sentence=f"Nothing can be said yet: {mixed.verdict_reason}.", rates=())
    names = Mix.parse(mixed.workload).names
    rates = [MixRate(profile=mixed.workload, is_mix=True, rate=own)] + [
        MixRate(profile=row.workload, is_mix=False, rate=_cell(mixed, row.cold_hit_rate, row.low, row.high))
        for row in mixed.mismatch
        if row.residency == VERDICT_RESIDENCY and row.workload in names
    ]
    best = min(rates, key=lambda one: (one.rate.cold_hit_rate, not one.is_mix, one.profile))
    return MixView(
        name=mixed.workload,
        sentence=(
            f"Use {best.profile}: with {VERDICT_RESIDENCY:.0%} of the experts it misses least on this mix, "
            f"{percent(best.rate.cold_hit_rate)} on {counted(mixed.n_held_out, 'held-out session')}."
        ),
        rates=tuple(sorted(rates, key=lambda one: (one.rate.cold_hit_rate, not one.is_mix, one.profile))),
    )


def _side(side: Side) -> SideView:
    profile = side.profile
    return SideView(
        workload=profile.workload,
        period=side.period,
        label=side.label,
        revision=profile.revision,
        n_calibration=profile.n_calibration,
        n_held_out=profile.n_held_out,
        verdict=verdict_of(profile),
    )


def _own(profile: Profile, policy: str, residency: float) -> Cell | None:
    for point in profile.curves:
        if (point.policy, point.residency) == (policy, residency):
            return _cell(profile, point.cold_hit_rate, point.low, point.high)
    return None


def _cell(judge: Profile, rate: float, low: float, high: float) -> Cell:
    single = judge.n_held_out < 2
    return Cell(cold_hit_rate=rate, low=None if single else low, high=None if single else high)


def _cross(ours: Side, theirs: Side) -> Cross | None:
    """Our profile on their sessions: known where their evaluation compared it, in the service's own window."""
    own = _own(theirs.profile, "own", VERDICT_RESIDENCY)
    if ours.period is not None or own is None or ours.profile.workload == theirs.profile.workload:
        return None
    for row in theirs.profile.mismatch:
        if (row.workload, row.residency) == (ours.profile.workload, VERDICT_RESIDENCY):
            other = _cell(theirs.profile, row.cold_hit_rate, row.low, row.high)
            return Cross(
                profile=ours.profile.workload,
                sessions=theirs.label,
                n_held_out=theirs.profile.n_held_out,
                other=other,
                own=own,
                sentence=_cross_sentence(ours, theirs, other, own),
            )
    return None


def _cross_sentence(ours: Side, theirs: Side, other: Cell, own: Cell) -> str:
    ends = "" if other.low is None or other.high is None else f" ({interval(other.low, other.high)})"
    return (
        f"The profile of {ours.profile.workload} misses {percent(other.cold_hit_rate)}{ends} on "
        f"{counted(theirs.profile.n_held_out, 'held-out session')} of {theirs.profile.workload}, their own profile "
        f"{percent(own.cold_hit_rate)}: {points(other.cold_hit_rate - own.cold_hit_rate)} with "
        f"{VERDICT_RESIDENCY:.0%} of the experts."
    )


def _no_crosses(a: Side, b: Side) -> str:
    if a.profile.workload == b.profile.workload:
        return "Both sides are of one workload, so neither has held-out sessions that the other has not."
    judged = [side for side in (a, b) if side.profile.n_held_out]
    if not judged:
        return "Neither side has held-out sessions, so nothing says how one profile does on the other's traffic."
    if len(Mix.parse(a.profile.workload).names) > 1 or len(Mix.parse(b.profile.workload).names) > 1:
        return "Of mixes only the profiles of their own workloads are judged on them; see the mix's page."
    return "One side's profile is judged on the other's sessions only as it is served now, not in a chosen window."


def _difference(a: Side, b: Side, found: ShiftSize) -> str:
    return (
        f"{percent(found.frequency_shift)} of the expected selections go to other experts in {b.label} than in "
        f"{a.label}; {counted(found.entering, 'expert')} of {found.hot:,} in the hot set at {found.residency:.0%} "
        f"differ, worth {percent(found.entering_share)} of {b.profile.workload}'s selections. Profiles of few sessions "
        f"differ by chance, too: these are of {a.profile.n_calibration:,} and {b.profile.n_calibration:,}."
    )
