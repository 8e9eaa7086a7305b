"""What the page of one workload's profile says: verdict, curves, and how many sessions each claim rests on. Pure.

Nothing is claimed that held-out sessions do not support: what is missing is said, with the number that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from spark_runtime.calibration.evaluation import MIN_SESSIONS, VERDICT_RESIDENCY
from spark_runtime.placement import floor_bytes, layer_sizes
from spark_schemas.drift import Drift
from spark_schemas.ids import Phase, Policy, Verdict
from spark_schemas.mix import Mix
from spark_schemas.model import ModelShape
from spark_schemas.profile import LiveComparison, LivePolicy, Profile
from spark_service.dashboard.heat_map import LayerRow, layer_rows
from spark_service.dashboard.shift import Shift
from spark_service.dashboard.words import CURVES, VERDICTS, count, counted, interval, percent, points
from spark_service.live import MIN_SESSIONS as MIN_LIVE

__all__ = [
    "Claim",
    "Curve",
    "CurveValue",
    "LiveSessions",
    "ModelName",
    "ProfilePage",
    "VerdictView",
    "curves_of",
    "profile_page",
    "rate_at",
    "verdict_of",
]

Tone = Literal["good", "neutral", "bad", "unknown"]

_ORDER: tuple[Policy, ...] = ("uniform", "lru", "other", "own", "oracle")
_HELD_OUT_SHARE = 5
"""About one session in so many judges."""


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class ModelName(_View):
    """A model as pages name it."""

    fingerprint: str
    name: str | None
    architecture: str
    layers: int
    experts: int
    expert_bytes_total: int

    @classmethod
    def of(cls, shape: ModelShape) -> ModelName:
        """Of a stored shape; its name is whatever a file said and can be anything."""
        return cls(
            fingerprint=shape.fingerprint,
            name=shape.name,
            architecture=shape.architecture,
            layers=len(shape.layers),
            experts=sum(layer.n_experts for layer in shape.layers),
            expert_bytes_total=shape.expert_bytes_total,
        )

    @property
    def label(self) -> str:
        """Its name, or where it has none its identity."""
        return self.name or self.fingerprint


class CurveValue(_View):
    """One rate with its 95% interval over sessions."""

    residency: float
    cold_hit_rate: float
    low: float | None
    """``None``: a single session gives no interval."""
    high: float | None
    n_sessions: int


class Curve(_View):
    """One policy's rates by residency."""

    policy: Policy | LivePolicy
    label: str
    basis: Literal["held_out", "live"]
    """Computed from the counts of held-out sessions, or measured by agents on held-out sessions that they ran."""
    points: tuple[CurveValue, ...]
    missing: str | None = None
    """Why there is nothing, and how much more it needs."""


class VerdictView(_View):
    """What follows for somebody who has to decide."""

    verdict: Verdict | None
    tone: Tone
    headline: str
    sentence: str
    reason: str
    """The evaluation's own words, with every number."""


class Claim(_View):
    """What a part of the page says, and how many sessions it is of."""

    what: str
    n_sessions: int
    of: str


class ProfilePage(_View):
    """The page of a workload's, or a mix's, profile."""

    model: ModelName
    workload: str
    phase: Phase
    revision: str
    is_mix: bool
    n_calibration: int
    n_held_out: int
    tokens_calibration: int
    tokens_held_out: int
    verdict: VerdictView
    curves: tuple[Curve, ...]
    curves_missing: str | None
    """In place of all curves from counts."""
    floor_residency: float
    """The least share of the experts' bytes that works; curves are level below it."""
    mixing: str | None
    """Of a mix, what it gains over each of its workloads' profile alone."""
    live_comparisons: tuple[LiveComparison, ...]
    drift: Drift | None
    shift: Shift | None
    """``None`` of a mix: its workloads' own pages tell."""
    layers: tuple[LayerRow, ...]
    claims: tuple[Claim, ...]
    warnings: tuple[str, ...]

    @property
    def drawn(self) -> tuple[Curve, ...]:
        """Curves that have points."""
        return tuple(curve for curve in self.curves if curve.points)

    @property
    def rows(self) -> list[tuple[float, list[CurveValue | None]]]:
        """The points of :attr:`drawn` by residency, ``None`` where a curve has none there."""
        columns = [{point.residency: point for point in curve.points} for curve in self.drawn]
        residencies = sorted({residency for column in columns for residency in column})
        return [(residency, [column.get(residency) for column in columns]) for residency in residencies]


@dataclass(frozen=True, slots=True)
class LiveSessions:
    """Held-out sessions that ran with this profile, and without any, at the residency that most of each had."""

    with_profile: int
    without: int


def profile_page(profile: Profile, shape: ModelShape, shift: Shift | None, live: LiveSessions) -> ProfilePage:
    """The page of a profile of this model."""
    is_mix = len(Mix.parse(profile.workload).names) > 1
    measured = sum(point.n_sessions for point in profile.live)
    claims = [
        Claim(what="frequencies and the heat map", n_sessions=profile.n_calibration, of="calibration sessions"),
        Claim(what="curves and verdict", n_sessions=profile.n_held_out, of="held-out sessions that no profile saw"),
        Claim(what="what agents measured", n_sessions=measured, of="other held-out sessions that ran in tiers"),
    ]
    if profile.drift is not None:
        claims.append(
            Claim(what="whether traffic has changed", n_sessions=profile.drift.n_sessions, of="recent sessions")
        )
    return ProfilePage(
        model=ModelName.of(shape),
        workload=profile.workload,
        phase=profile.phase,
        revision=profile.revision,
        is_mix=is_mix,
        n_calibration=profile.n_calibration,
        n_held_out=profile.n_held_out,
        tokens_calibration=profile.tokens_calibration,
        tokens_held_out=profile.tokens_held_out,
        verdict=verdict_of(profile),
        curves=curves_of(profile, live),
        curves_missing=None if profile.curves else _no_curves(profile),
        floor_residency=floor_bytes(layer_sizes(shape)) / shape.expert_bytes_total,
        mixing=_mixing(profile),
        live_comparisons=profile.live_comparisons,
        drift=profile.drift,
        shift=shift,
        layers=layer_rows(profile, shape),
        claims=tuple(claims),
        warnings=profile.warnings,
    )


def rate_at(profile: Profile, policy: Policy, residency: float) -> float | None:
    """One point of a curve; ``None`` where it has none."""
    found = (point for point in profile.curves if (point.policy, point.residency) == (policy, residency))
    return next((point.cold_hit_rate for point in found), None)


def verdict_of(profile: Profile) -> VerdictView:
    """The verdict in one sentence for a developer, with the numbers at the residency that decides."""
    own, uniform, lru = (rate_at(profile, policy, VERDICT_RESIDENCY) for policy in ("own", "uniform", "lru"))
    tones: Mapping[Verdict | None, Tone] = {
        "profile": "good",
        "pin": "good",
        "cache_only": "neutral",
        "no_gain": "bad",
        None: "unknown",
    }
    headline = VERDICTS[profile.verdict]
    enough = min(profile.n_calibration, profile.n_held_out) >= MIN_SESSIONS
    if profile.phase == "prefill" and enough and own is not None and uniform is not None:
        headline = "Prompts have no verdict"
        sentence = (
            f"With {VERDICT_RESIDENCY:.0%} of the experts in video memory this profile misses {percent(own)} of the "
            f"selections in prompts that it has never seen, the first experts {percent(uniform)}. Whether a cache does "
            "better cannot be told: prompts are counted without reuse distances."
        )
    elif profile.verdict is None or own is None or uniform is None:
        sentence = _undecided(profile)
    else:
        sentence = _decided(profile.verdict, own, uniform, lru)
    return VerdictView(
        verdict=profile.verdict,
        tone=tones[profile.verdict],
        headline=headline,
        sentence=sentence,
        reason=profile.verdict_reason,
    )


def _decided(verdict: Verdict, own: float, uniform: float, lru: float | None) -> str:
    with_memory = f"With {VERDICT_RESIDENCY:.0%} of the experts in video memory"
    cache = "" if lru is None else f", a cache that starts without a profile {percent(lru)}"
    if verdict == "profile":
        return (
            f"{with_memory} this profile misses {percent(own)} of the selections in sessions that it has never seen; "
            f"the first experts in its place would miss {percent(uniform)}{cache}."
        )
    if verdict == "pin":
        return (
            f"{with_memory} its hottest experts, kept for good, miss {percent(own)} of the selections in sessions it "
            f"has never seen; the first experts would miss {percent(uniform)}{cache}, and moving experts is no better."
        )
    if verdict == "cache_only":
        told = "a cache that starts without a profile" if lru is None else f"a cache without a profile misses {lru:.1%}"
        return (
            f"{with_memory} {told}, this profile placed once {percent(own)}, the first experts {percent(uniform)}: let "
            "agents adapt as they do by default, and do not expect much of the profile beyond a session's start."
        )
    return (
        f"{with_memory} this profile misses {percent(own)} and the first experts {percent(uniform)}{cache}: no clear "
        "difference. More memory helps here; choosing experts does not."
    )


def _undecided(profile: Profile) -> str:
    missing = max(0, MIN_SESSIONS - profile.n_held_out)
    hint = ""
    if missing and len(Mix.parse(profile.workload).names) == 1:
        hint = (
            f" About one session in {_HELD_OUT_SHARE} is held out to judge, so expect some "
            f"{missing * _HELD_OUT_SHARE} more sessions until then."
        )
    return f"{profile.verdict_reason[0].upper()}{profile.verdict_reason[1:]}.{hint}"


def _no_curves(profile: Profile) -> str:
    if len(Mix.parse(profile.workload).names) > 1:
        return f"No curves yet: {profile.verdict_reason}."
    return (
        f"No held-out sessions yet: {MIN_SESSIONS} more needed. The profile is there ("
        f"{counted(profile.n_calibration, 'calibration session')}), but nothing has tested it, so nothing is promised."
    )


def curves_of(profile: Profile, live: LiveSessions) -> tuple[Curve, ...]:
    """All curves in the order of the legend; those that agents measured say what is missing where nothing is."""
    curves = []
    for policy in _ORDER:
        found = [point for point in profile.curves if point.policy == policy]
        if found:
            points_of = tuple(
                _value(one.residency, one.cold_hit_rate, one.low, one.high, profile.n_held_out) for one in found
            )
            curves.append(Curve(policy=policy, label=CURVES[policy], basis="held_out", points=points_of))
        elif policy == "lru" and profile.curves:
            curves.append(_without(policy, "held_out", "prompts are counted without reuse distances: no cache follows"))
    counts: Sequence[tuple[LivePolicy, int, str]] = (
        ("live_profile", live.with_profile, "that ran with this profile"),
        ("live_unprofiled", live.without, "that ran without a profile"),
    )
    for measured, there, which in counts:
        known = [point for point in profile.live if point.policy == measured]
        if known:
            values = tuple(_value(one.residency, one.cold_hit_rate, one.low, one.high, one.n_sessions) for one in known)
            curves.append(Curve(policy=measured, label=CURVES[measured], basis="live", points=values))
        else:
            curves.append(_without(measured, "live", _not_measured(profile, there, which)))
    place = next((index for index, curve in enumerate(curves) if curve.policy == "own"), 0)
    curves.insert(place + 1, curves.pop(len(curves) - 2))
    return tuple(curves)


def _not_measured(profile: Profile, there: int, which: str) -> str:
    if profile.phase != "decode":
        return "agents measure generated tokens alone"
    if "+" in profile.workload:
        return "nobody can say it of a mix: agents measure single workloads"
    return (
        f"not measured yet: {max(1, MIN_LIVE - there)} more held-out sessions needed {which} at one residency "
        f"({there} of {MIN_LIVE}); counts cannot tell it, as it depends on the order of tokens"
    )


def _without(policy: Policy | LivePolicy, basis: Literal["held_out", "live"], missing: str) -> Curve:
    return Curve(policy=policy, label=CURVES[policy], basis=basis, points=(), missing=missing)


def _value(residency: float, rate: float, low: float, high: float, n_sessions: int) -> CurveValue:
    single = n_sessions < 2
    return CurveValue(
        residency=residency,
        cold_hit_rate=rate,
        low=None if single else low,
        high=None if single else high,
        n_sessions=n_sessions,
    )


def _mixing(profile: Profile) -> str | None:
    names = Mix.parse(profile.workload).names
    own = next(
        (one for one in profile.curves if (one.policy, one.residency) == ("own", VERDICT_RESIDENCY)),
        None,
    )
    if len(names) == 1 or own is None:
        return None
    alone = [row for row in profile.mismatch if row.residency == VERDICT_RESIDENCY and row.workload in names]
    best = min(alone, key=lambda row: (row.cold_hit_rate, row.workload))
    told = ", ".join(f"{row.workload} alone {percent(row.cold_hit_rate)}" for row in alone)
    return (
        f"On the mix with {VERDICT_RESIDENCY:.0%} resident this profile misses {percent(own.cold_hit_rate)} "
        f"({interval(own.low, own.high)}, {count(profile.n_held_out)} held-out sessions); {told}. Mixing is worth "
        f"{points(own.cold_hit_rate - best.cold_hit_rate)} against the best of them."
    )
