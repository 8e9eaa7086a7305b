"""A simulation: which policies, profiles and residencies, over what was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar, cast, get_args

from spark_agent.errors import SparkError, UsageError
from spark_agent.simulation.counts import count_rows, given_profile
from spark_agent.simulation.early import early_start, given_guesses, is_given, parse_early
from spark_agent.simulation.rows import Report, Row, TunedRow
from spark_agent.simulation.sources import Source
from spark_agent.simulation.speeds import Speeds
from spark_runtime.early_fetch import EarlyFetch
from spark_runtime.simulator.policies import CACHES, POLICIES, Cache, PolicyName
from spark_runtime.simulator.study import (
    PROFILES,
    Judgement,
    PhaseOf,
    ProfileName,
    Study,
    TraceTooSmallError,
    equal_slots,
    placed_slots,
)
from spark_runtime.simulator.tuning import TunedEarly, tune, tune_early

if TYPE_CHECKING:
    from spark_agent.simulation.machines import MachineFigures
    from spark_runtime.simulator.guesses import EarlyStart, Guesser

__all__ = ["Plan", "SlotsOf", "run"]

_SINGLE_TOKEN: tuple[PolicyName, ...] = ("belady", "lru_unprotected")
SlotsOf = Literal["layer", "placed", "pool"]
"""The same share of each layer's experts, or slots of each layer's own by the profile's frequency per byte, or one pool
that starts with equal shares."""
_Name = TypeVar("_Name", bound=str)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to simulate."""

    policies: tuple[PolicyName, ...]
    sharings: tuple[SlotsOf, ...]
    profiles: tuple[ProfileName, ...]
    given: str | None
    """A file of a profile, for ``given``."""
    residencies: tuple[float, ...]
    positions: tuple[int, ...]
    phase: PhaseOf
    batch: int
    ubatch: int
    pageable_share: float
    """Of the copies, from memory that is not locked."""
    tune: bool
    early: tuple[EarlyFetch, ...]
    """Ways of fetching early, each beside nothing early."""
    guesses: str | None
    """What guesses start from: ``none``, ``calibrated``, ``kept`` or a file; ``None``: as the profile."""
    placed_asked: bool
    """Whether slots by frequency were named: then also for what does not move."""
    asked: bool
    """Whether policies were named: those that cannot be had are then an error's reason, not left out."""

    @classmethod
    def of(
        cls,
        *,
        policies: Sequence[str],
        sharings: Sequence[str],
        profiles: Sequence[str],
        residencies: Sequence[float],
        positions: tuple[int, ...],
        phase: str,
        batch: int,
        ubatch: int,
        pageable_share: float,
        tune: bool,
        early: Sequence[str] = (),
        guesses: str | None = None,
    ) -> Plan:
        """Check what was typed; raise :class:`UsageError`."""
        if not 0 <= pageable_share <= 1:
            raise UsageError(f"--pageable: found {pageable_share:g}, expected a share from 0 to 1")
        if guesses is not None and not early:
            raise UsageError("--guesses says what is fetched early, and nothing is", "pass --early too, e.g. 1:0.3")
        for share in residencies:
            if not 0 < share <= 1:
                raise UsageError(f"--residency: found {share:g}, expected a share above 0, at most 1", "e.g. 0.6")
        names = [name for name in PROFILES if name != "given"]
        files = [name for name in profiles if name not in names]
        if len(files) > 1:
            raise UsageError(f"--profile: found {files[0]!r} and {files[1]!r}, expected at most one file")
        known = tuple(cast(ProfileName, "given" if name in files else name) for name in profiles)
        return cls(
            policies=_names("--policy", policies, POLICIES) or POLICIES,
            sharings=_names("--sharing", sharings, get_args(SlotsOf)) or get_args(SlotsOf),
            profiles=tuple(dict.fromkeys(known)) or ("none", "own"),
            given=files[0] if files else None,
            residencies=tuple(dict.fromkeys(residencies)) or (0.3, 0.6, 0.8),
            positions=positions,
            phase=_names("--phase", [phase], get_args(PhaseOf))[0],
            batch=batch,
            ubatch=ubatch,
            pageable_share=pageable_share,
            tune=tune,
            early=parse_early(early),
            guesses=guesses,
            placed_asked="placed" in sharings,
            asked=bool(policies),
        )

    @property
    def in_batches(self) -> bool:
        """Whether calls have several tokens."""
        return self.batch > 1 or self.phase != "decode"


def _names(option: str, found: Sequence[str], allowed: Sequence[_Name]) -> tuple[_Name, ...]:
    for name in found:
        if name not in allowed:
            raise UsageError(f"{option}: found {name!r}, expected one of {', '.join(allowed)}")
    return tuple(dict.fromkeys(cast("Sequence[_Name]", found)))


def run(
    plan: Plan, source: Source, workload: str | None, figures: MachineFigures | None, advance: Callable[[float], None]
) -> Report:
    """Simulate; raises :class:`SparkError` when the input cannot answer at all."""
    report = Report([], [], [*source.notes])
    speeds = Speeds.of(figures, source, plan, report)
    if plan.early and source.kind != "trace":
        raise SparkError(
            "fetching early needs the order of selections, so a trace", "spark-agent record --trace FOLDER"
        )
    if plan.early and ("scored" not in plan.policies or "pool" not in plan.sharings):
        raise UsageError("--early is of the scored policy in one pool", "leave --policy scored and --sharing pool in")
    if source.kind == "trace":
        _trace_rows(plan, source, workload, report, speeds, advance)
    else:
        count_rows(plan, source, workload, report)
    if speeds is not None:
        report.rows = [replace(row, predicted_tok_s=speeds.tok_s(row)) for row in report.rows]
    return report


def _trace_rows(
    plan: Plan,
    source: Source,
    workload: str | None,
    report: Report,
    speeds: Speeds | None,
    advance: Callable[[float], None],
) -> None:
    if workload is not None and workload not in source.workloads:
        raise SparkError(f"no session of {workload}", f"found {', '.join(sorted(set(source.workloads)))}")
    trace, kept = source.trace(plan.phase)
    given = None if plan.given is None else given_profile(plan.given, source, kept)
    report.notes += [note for note in source.notes if note not in report.notes]
    guesser = _guesser() if plan.early else None
    guesses = None
    if plan.guesses is not None and is_given(plan.guesses):
        guesses = given_guesses(plan.guesses, source, trace, kept)
    try:
        study = Study(
            trace,
            source.workloads,
            source.held_out,
            phase=plan.phase,
            batch=plan.batch,
            prompt_batch=plan.ubatch,
            given=given,
            judged=workload,
            guesser=guesser,
            given_guesses=guesses,
        )
    except TraceTooSmallError as error:
        raise SparkError(str(error), "record more sessions with --trace") from error
    report.n_sessions, report.n_calibration = len(study.judging), len(study.calibrating)
    if not study.held_out.any():
        report.notes.append("no session is on the held-out side: all of them judge, and none may calibrate")
    if plan.early and plan.in_batches:
        _note(report, "only single tokens are guessed for: nothing is fetched early in calls of several")
    for residency in plan.residencies:
        for cache, profile, slots_of in _combinations(plan, report, len(study.calibrating)):
            try:
                slots = _slots(study, residency, profile, slots_of)
                row = _row(study.judge(cache, slots, profile, plan.positions), cache, profile, residency, slots)
            except TraceTooSmallError as error:
                _note(report, f"{profile} profiles are left out: {error}")
                continue
            row = replace(row, sharing=slots_of if cache.policy in CACHES or slots_of == "placed" else None)
            report.rows.append(_finished(row, study, slots, plan, cache))
            advance(1)
        if plan.tune:
            _tune(plan, study, residency, report, speeds)


def _slots(study: Study, residency: float, profile: ProfileName, slots_of: SlotsOf) -> list[int]:
    frequency = study.frequency(profile) if slots_of == "placed" else None
    if frequency is None:
        return equal_slots(study.trace, residency)
    return placed_slots(study.trace, residency, frequency)


def _guesser() -> Guesser:
    from spark_runtime.guess_replay import NativeGuesser

    return NativeGuesser()


def _combinations(plan: Plan, report: Report, n_calibration: int) -> Iterator[tuple[Cache, ProfileName, SlotsOf]]:
    for policy in plan.policies:
        if policy in _SINGLE_TOKEN and plan.in_batches:
            _note(report, f"{policy} is left out: it takes one token at a time")
            continue
        moves = policy in CACHES
        kinds: tuple[SlotsOf, ...] = ("layer", "placed") if policy == "static" and plan.placed_asked else ("layer",)
        for sharing in plan.sharings if moves else kinds:
            if policy == "lru_unprotected" and sharing == "pool":
                if "layer" not in plan.sharings:
                    _note(report, f"{policy} is left out: it exists with slots of each layer's own only")
                continue
            # What a cache with the future in view, or one without a profile, starts with changes nothing to speak of.
            profiles: Sequence[ProfileName] = plan.profiles
            if policy == "uniform":
                profiles = ("none",)
            elif policy == "static":
                profiles = [name for name in plan.profiles if name != "none"]
            elif policy == "oracle":
                profiles = ("own",)
            for profile in profiles:
                # Without a profile nothing says where more slots are worth more.
                if sharing != "placed" or profile != "none":
                    cache = Cache(policy, "pool" if sharing == "pool" else "layer")
                    for way in (cache, *_early_ways(plan, cache, early_start(plan.guesses, profile, n_calibration))):
                        yield way, profile, sharing


def _early_ways(plan: Plan, cache: Cache, start: EarlyStart) -> list[Cache]:
    if cache.policy != "scored" or cache.sharing != "pool":
        return []
    return [replace(cache, early=early, early_from=start) for early in plan.early]


def _row(judged: Judgement, cache: Cache, profile: ProfileName, residency: float, slots: Sequence[int]) -> Row:
    rate, early = judged.cold_hit_rate, judged.early
    return Row(
        policy=cache.policy,
        sharing=None,
        profile="held-out" if cache.policy == "oracle" else profile,
        residency=residency,
        slots=sum(slots),
        cold_hit_rate=rate.mean,
        low=rate.low,
        high=rate.high,
        cold_hits_per_token=judged.cold_hits_per_token,
        loads_per_token=judged.loads_per_token,
        predicted_tok_s=None,
        phase="decode",
        n_sessions=judged.n_sessions,
        early_experts=None if early is None else cache.early.experts,
        early_threshold=None if early is None else cache.early.threshold,
        early_guesses=None if early is None else cache.early_from,
        early_per_selection=None if early is None else early.fetched,
        early_used_per_selection=None if early is None else early.used,
        early_wasted_per_selection=None if early is None else early.wasted,
        early_wasted_bytes_per_token=None if early is None else early.wasted_bytes_per_token,
        early_layers_per_token=None if early is None else early.layers_by_experts,
        parts=judged.parts,
    )


def _finished(row: Row, study: Study, slots: Sequence[int], plan: Plan, cache: Cache) -> Row:
    sizes = study.trace.expert_bytes
    scored = cache.policy == "scored"
    return replace(
        row,
        phase=plan.phase,
        slot_bytes=None if sizes is None else sum(count * size for count, size in zip(slots, sizes, strict=True)),
        decay=cache.decay if scored else None,
        prior_tokens=cache.prior_tokens if scored and row.profile != "none" else None,
    )


def _tune(plan: Plan, study: Study, residency: float, report: Report, speeds: Speeds | None) -> None:
    for sharing in plan.sharings:
        for profile in plan.profiles:
            if sharing == "placed" and profile == "none":
                continue
            cache = Cache("scored", "pool" if sharing == "pool" else "layer")
            try:
                slots = _slots(study, residency, profile, sharing)
                found = tune(study, cache, slots, profile)
                cache = replace(cache, decay=found.decay, prior_tokens=found.prior_tokens)
                early = _tuned_early(plan, study, cache, slots, profile, speeds)
                start = early_start(plan.guesses, profile, len(study.calibrating))
                ways = [cache, *_early_ways(plan, cache, start)]
                if early is not None and early.early not in {way.early for way in ways}:
                    ways.append(replace(cache, early=early.early, early_from=start))
                judged = [(way, study.judge(way, slots, profile, plan.positions)) for way in ways]
            except TraceTooSmallError as error:
                _note(report, f"{profile} profiles are not tuned: {error}")
                continue
            report.tuned.append(
                TunedRow(
                    sharing,
                    profile,
                    residency,
                    found.decay,
                    found.prior_tokens,
                    found.cold_hit_rate,
                    found.default_cold_hit_rate,
                    found.tried,
                    None if early is None else early.early.experts,
                    None if early is None or not early.early.experts else early.early.threshold,
                    None if early is None else round(early.tok_s, 2),
                    None if early is None else round(early.usual_tok_s, 2),
                )
            )
            for way, judgement in judged:
                row = replace(_row(judgement, way, profile, residency, slots), policy="scored_tuned", sharing=sharing)
                report.rows.append(_finished(row, study, slots, plan, way))


def _tuned_early(
    plan: Plan, study: Study, cache: Cache, slots: Sequence[int], profile: ProfileName, speeds: Speeds | None
) -> TunedEarly | None:
    """Only where something is fetched early, and figures say which way is faster."""
    if not plan.early or speeds is None or cache.sharing != "pool" or plan.in_batches:
        return None
    return tune_early(study, cache, slots, profile, speeds.judged_tok_s)


def _note(report: Report, text: str) -> None:
    if text not in report.notes:
        report.notes.append(text)
