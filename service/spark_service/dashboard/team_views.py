"""What the team's page says, from what is stored and from profiles. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import BaseModel

from spark_schemas.ids import Verdict
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile
from spark_service.dashboard.render import day_text
from spark_service.db.activity import AgentUploads, LiveSize, SessionsOfDay

__all__ = [
    "Activity",
    "AgentVersion",
    "Attention",
    "DayCounts",
    "Judged",
    "Judgement",
    "MemoryClass",
    "ModelInUse",
    "Promise",
    "Saving",
    "Team",
    "WorkloadInUse",
    "activity_of",
    "judged_of",
    "memory_classes",
    "quiet_workloads",
    "rate_at",
    "residency_for",
    "saving_of",
]

SHOWN_DAYS = 90
RECENT_DAYS = 30
QUIET_DAYS = 14
LEAST_SESSIONS = 3
"""Fewest sessions of a class of memory that are told apart, as for measured rates: fewer could be known."""
USUAL_RESIDENCY = 0.6
"""Where no recent session says how much video memory its experts had."""
MEMORY_CLASSES_GB = (4, 8, 12, 16, 24, 48, 80, 141, 192)
"""Upper ends: sizes of cards that are sold. What is measured is the experts' share of one."""
_GB = 10**9

Level = Literal["bad", "warn", "plain"]


class WorkloadInUse(BaseModel):
    """A workload's sessions."""

    workload: str
    sessions: int
    calibration: int
    held_out: int
    recent_sessions: int
    """Of the last 30 days."""
    tokens: int
    """Prefill and decode."""
    last_day: str


class ModelInUse(BaseModel):
    """A model with sessions."""

    fingerprint: str
    name: str | None
    architecture: str
    expert_bytes: int
    workloads: list[WorkloadInUse]


class DayCounts(BaseModel):
    """One day: sessions whose last part came on it, and their tokens."""

    day: int
    """Days since 1970."""
    date: str
    sessions: int
    tokens: int


class AgentVersion(BaseModel):
    """What agents of one version sent in the last 30 days."""

    version: str
    uploads: int
    histograms: int
    last_day: str


class MemoryClass(BaseModel):
    """Sessions of the last 30 days whose experts had so much video memory."""

    label: str
    sessions: int


class Activity(BaseModel):
    """What was received."""

    models: list[ModelInUse]
    days: list[DayCounts]
    sessions: int
    recent_sessions: int
    tokens: int
    agents: list[AgentVersion]
    memory: list[MemoryClass]
    last_day: str | None


class Saving(BaseModel):
    """Video memory that a workload's profile saves on a machine that runs it."""

    fingerprint: str
    model_name: str | None
    workload: str
    saved_bytes: int
    resident_bytes: int
    """Of experts, with the profile."""
    needed_bytes: int
    """Without a profile, for the same share of misses."""
    cold_hit_rate: float
    """Of the profile at that size, on held-out sessions."""
    n_held_out: int
    is_measured_size: bool
    """Whether recent sessions ran at this size; else it is 60% of the experts."""
    recent_sessions: int


class Promise(BaseModel):
    """What a workload's manifests promised, and what became of it."""

    fingerprint: str
    model_name: str | None
    workload: str
    promised: float | None
    measured: float | None
    """What the promised hot set missed on the recent sessions."""
    n_recent: int
    live: float | None
    """What agents really missed, slots changing as they ran."""
    live_residency: float | None
    live_sessions: int
    state: str | None


class Attention(BaseModel):
    """One thing to look at, as a sentence with its number."""

    level: Level
    fingerprint: str | None
    workload: str | None
    text: str


class Judged(BaseModel):
    """What profiles say."""

    savings: list[Saving]
    average_saved_bytes: int | None
    """Over the recent sessions of all workloads with a verdict; those without a gain count as nothing saved."""
    promises: list[Promise]
    attention: list[Attention]
    verdicts: dict[str, Verdict | None]
    """By fingerprint and workload, with a slash between."""


class Team(BaseModel):
    """The whole page; parts that are being computed are null."""

    as_of: datetime | None
    is_current: bool
    activity: Activity | None
    judged: Judged | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """A workload's profile, or why there is none."""

    shape: ModelShape
    workload: str
    profile: Profile | None
    missing: str = ""
    """The service's own words, in place of a profile."""


def activity_of(
    models: Sequence[ModelShape],
    counts: Iterable[SessionsOfDay],
    tokens: Mapping[tuple[str, str], Mapping[int, int]],
    agents: Iterable[AgentUploads],
    sizes: Iterable[LiveSize],
    today: int,
) -> Activity:
    """Add up. ``tokens[fingerprint, workload][day]``; days since 1970."""
    by_workload: dict[tuple[str, str], list[SessionsOfDay]] = defaultdict(list)
    for one in counts:
        by_workload[one.fingerprint, one.workload].append(one)
    sessions_of_day: dict[int, int] = defaultdict(int)
    tokens_of_day: dict[int, int] = defaultdict(int)
    in_use: dict[str, list[WorkloadInUse]] = defaultdict(list)
    for (fingerprint, workload), days in sorted(by_workload.items()):
        own_tokens = tokens.get((fingerprint, workload), {})
        for one in days:
            sessions_of_day[one.day] += one.calibration + one.held_out
        for day, count in own_tokens.items():
            tokens_of_day[day] += count
        in_use[fingerprint].append(_workload_in_use(workload, days, sum(own_tokens.values()), today))
    last_day = max(sessions_of_day, default=None)
    return Activity(
        models=[
            ModelInUse(
                fingerprint=shape.fingerprint,
                name=shape.name,
                architecture=shape.architecture,
                expert_bytes=shape.expert_bytes_total,
                workloads=in_use[shape.fingerprint],
            )
            for shape in models
            if shape.fingerprint in in_use
        ],
        days=_days(sessions_of_day, tokens_of_day, today),
        sessions=sum(sessions_of_day.values()),
        recent_sessions=sum(count for day, count in sessions_of_day.items() if day > today - RECENT_DAYS),
        tokens=sum(tokens_of_day.values()),
        agents=[
            AgentVersion(
                version=one.version, uploads=one.uploads, histograms=one.histograms, last_day=day_text(one.last_day)
            )
            for one in agents
        ],
        memory=memory_classes(sizes),
        last_day=None if last_day is None else day_text(last_day),
    )


def _workload_in_use(workload: str, days: Sequence[SessionsOfDay], tokens: int, today: int) -> WorkloadInUse:
    calibration, held_out = sum(one.calibration for one in days), sum(one.held_out for one in days)
    return WorkloadInUse(
        workload=workload,
        sessions=calibration + held_out,
        calibration=calibration,
        held_out=held_out,
        recent_sessions=sum(one.calibration + one.held_out for one in days if one.day > today - RECENT_DAYS),
        tokens=tokens,
        last_day=day_text(max(one.day for one in days)),
    )


def _days(sessions: Mapping[int, int], tokens: Mapping[int, int], today: int) -> list[DayCounts]:
    """Every day from the first with sessions on, at most the last 90: a day without any is a zero, not a gap."""
    if not sessions:
        return []
    first = max(min(sessions), today - SHOWN_DAYS + 1)
    return [
        DayCounts(day=day, date=day_text(day), sessions=sessions.get(day, 0), tokens=tokens.get(day, 0))
        for day in range(first, max(today, *sessions) + 1)
    ]


def memory_classes(sizes: Iterable[LiveSize]) -> list[MemoryClass]:
    """Sessions by video memory of their experts, smallest first; classes of fewer than three together at the end."""
    counts: dict[int, int] = defaultdict(int)
    for one in sizes:
        place = sum(one.resident_bytes > end * _GB for end in MEMORY_CLASSES_GB)
        counts[place] += one.n_sessions
    shown = [
        MemoryClass(label=_class_label(place), sessions=count)
        for place, count in sorted(counts.items())
        if count >= LEAST_SESSIONS
    ]
    rare = sum(count for count in counts.values() if count < LEAST_SESSIONS)
    return shown + ([MemoryClass(label="other sizes, too few to tell apart", sessions=rare)] if rare else [])


def _class_label(place: int) -> str:
    if place == len(MEMORY_CLASSES_GB):
        return f"more than {MEMORY_CLASSES_GB[-1]} GB"
    low = MEMORY_CLASSES_GB[place - 1] if place else 0
    return f"{low} to {MEMORY_CLASSES_GB[place]} GB" if low else f"up to {MEMORY_CLASSES_GB[0]} GB"


def judged_of(
    judgements: Sequence[Judgement], sizes: Iterable[LiveSize], recent: Mapping[tuple[str, str], int]
) -> Judged:
    """What profiles save and promise, and what needs attention.

    ``recent[fingerprint, workload]`` are the sessions of the last 30 days.
    """
    ran: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in sizes:
        if one.with_profile:
            ran[one.fingerprint, one.workload] += [one.resident_bytes] * one.n_sessions
    profiles = [one for one in judgements if one.profile is not None]
    savings = []
    for judgement in profiles:
        key = (judgement.shape.fingerprint, judgement.workload)
        saving = saving_of(judgement, ran[key], recent.get(key, 0))
        if saving is not None:
            savings.append(saving)
    weighted = [(saving.saved_bytes, saving.recent_sessions) for saving in savings]
    total = sum(weight for _, weight in weighted)
    return Judged(
        savings=sorted(savings, key=lambda one: (-one.saved_bytes, one.fingerprint, one.workload)),
        average_saved_bytes=round(sum(saved * weight for saved, weight in weighted) / total) if total else None,
        promises=[promise for one in profiles if (promise := _promise(one)) is not None],
        attention=sorted(
            (found for one in judgements for found in _attention(one)),
            key=lambda found: ("bad", "warn", "plain").index(found.level),
        ),
        verdicts={
            f"{one.shape.fingerprint}/{one.workload}": None if one.profile is None else one.profile.verdict
            for one in judgements
        },
    )


def saving_of(judgement: Judgement, ran_bytes: Sequence[int], recent_sessions: int) -> Saving | None:
    """What a profile saves at the size that recent sessions ran at; ``None`` while nothing judges it.

    Without a profile there is the better of two: the first experts of every layer, or a cache that starts empty. The
    saving is what that needs more to miss as little. Where the verdict is not ``profile``, nothing is saved.
    """
    profile, total = judgement.profile, judgement.shape.expert_bytes_total
    if profile is None or profile.verdict is None or not profile.curves:
        return None
    resident = statistics.median_low(ran_bytes) if ran_bytes else round(USUAL_RESIDENCY * total)
    residency = min(resident / total, 1.0)
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for point in profile.curves:
        curves[point.policy].append((point.residency, point.cold_hit_rate))
    rate = rate_at(curves["own"], residency)
    without = [
        (at, min(rate_at(curves[policy], at) for policy in ("uniform", "lru") if policy in curves))
        for at, _ in sorted(curves["uniform"])
    ]
    needed = max(residency_for(without, rate), residency) if profile.verdict == "profile" else residency
    return Saving(
        fingerprint=profile.fingerprint,
        model_name=judgement.shape.name,
        workload=judgement.workload,
        saved_bytes=round(needed * total) - round(residency * total),
        resident_bytes=round(residency * total),
        needed_bytes=round(needed * total),
        cold_hit_rate=rate,
        n_held_out=profile.n_held_out,
        is_measured_size=bool(ran_bytes),
        recent_sessions=recent_sessions,
    )


def rate_at(curve: Sequence[tuple[float, float]], residency: float) -> float:
    """A curve of (residency, rate) between its points; with nothing resident everything misses."""
    before, rate = 0.0, 1.0
    for at, value in sorted(curve):
        if residency <= at:
            return rate + (value - rate) * (residency - before) / (at - before)
        before, rate = at, value
    return rate


def residency_for(curve: Sequence[tuple[float, float]], rate: float) -> float:
    """The smallest residency at which a curve misses no more than ``rate``: all experts where it never does."""
    before, last = 0.0, 1.0
    for at, value in sorted(curve):
        if value <= rate:
            return before + (at - before) * (last - rate) / (last - value) if last > value else at
        before, last = at, value
    return 1.0


def _promise(judgement: Judgement) -> Promise | None:
    profile = judgement.profile
    assert profile is not None  # noqa: S101  as selected
    drift = profile.drift
    points = [point for point in profile.live if point.policy == "live_profile"]
    live = max(points, key=lambda point: point.n_sessions, default=None)
    if drift is None and live is None:
        return None
    promised = None if drift is None or drift.promised is None else drift.promised.cold_hit_rate
    measured = None if drift is None or drift.measured is None else drift.measured.cold_hit_rate
    return Promise(
        fingerprint=profile.fingerprint,
        model_name=judgement.shape.name,
        workload=judgement.workload,
        promised=promised,
        measured=measured,
        n_recent=0 if drift is None else drift.n_sessions,
        live=None if live is None else live.cold_hit_rate,
        live_residency=None if live is None else live.residency,
        live_sessions=0 if live is None else live.n_sessions,
        state=None if drift is None else drift.state,
    )


def _attention(judgement: Judgement) -> list[Attention]:
    profile, workload = judgement.profile, judgement.workload

    def found(level: Level, text: str) -> Attention:
        return Attention(level=level, fingerprint=judgement.shape.fingerprint, workload=workload, text=text)

    if profile is None:
        reason = judgement.missing.removeprefix(f"{workload}: ")
        return [found("warn", f"No profile yet: {reason}.")]
    notes = []
    drift = profile.drift
    if drift is not None and drift.state == "moved" and drift.promised and drift.measured:
        built = (
            f"Profiles are built from the sessions since {drift.since} alone now"
            if drift.rebuilt
            else "A profile of the sessions since then comes as soon as there are enough of them"
        )
        notes.append(
            found(
                "bad",
                f"Traffic has moved since {drift.since}: the hot sets that agents were given miss "
                f"{drift.measured.cold_hit_rate:.1%} of selections on the {drift.n_sessions} most recent sessions, and "
                f"{drift.promised.cold_hit_rate:.1%} were promised. {built}.",
            )
        )
    notes += [
        found(
            "bad",
            f"Sessions that ran with the profile missed {100 * one.difference:.1f} points more than those without, at "
            f"{one.residency:.0%} residency ({one.n_profile} sessions against {one.n_unprofiled}).",
        )
        for one in profile.live_comparisons
        if one.low > 0
    ]
    if profile.verdict is None:
        notes.append(found("warn", f"Too few sessions to judge the profile: {profile.verdict_reason}."))
    elif profile.verdict == "no_gain":
        notes.append(found("warn", f"No gain: {profile.verdict_reason}."))
    elif profile.verdict == "cache_only":
        reason = profile.verdict_reason.partition(". Whether")[0]
        notes.append(found("plain", f"The cache does the work, not the profile: {reason}."))
    return notes


def quiet_workloads(activity: Activity, today: int) -> list[Attention]:
    """Workloads that nothing came of for two weeks."""
    oldest = day_text(today - QUIET_DAYS)
    return [
        Attention(
            level="plain",
            fingerprint=model.fingerprint,
            workload=one.workload,
            text=f"No session since {one.last_day}: agents may have stopped uploading, or nobody works on it any more.",
        )
        for model in activity.models
        for one in model.workloads
        if one.last_day < oldest
    ]
