"""From tallies and held-out sessions to a profile. Pure.

The same sessions give the same bits, wherever they come from, in whatever order, batch by batch or all at once, added
one by one or counted anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from spark_runtime.calibration.evaluation import Plan, Stratum
from spark_runtime.calibration.sessions import SessionPart, Sessions, merge_parts
from spark_runtime.calibration.tally import Tally, Window, tally_of
from spark_runtime.calibration.trials import FloatArray, Rates, joined
from spark_runtime.placement import layer_sizes, weighted_mean
from spark_schemas.ids import MAX_COUNT, Phase
from spark_schemas.mix import Mix
from spark_schemas.model import ModelShape
from spark_schemas.profile import LayerFrequencies, Profile
from spark_service.executors import Executor, LocalExecutor
from spark_service.live import LiveEvaluation, live_verdict

__all__ = [
    "BUILDER_VERSION",
    "BuiltProfile",
    "HeldOut",
    "Inputs",
    "Judges",
    "Member",
    "build_profile",
    "revision_of",
    "tally_batches",
]

BUILDER_VERSION = 2
"""Raised whenever the same sessions would give another profile."""

HeldOut = Callable[[], Iterable[Sessions]]
"""Gives the held-out sessions of a workload, each of them whole in one batch, as often as it is called."""


@dataclass(frozen=True, slots=True)
class Member:
    """One workload of what a profile is of, and what it is worth there; alone it is worth 1."""

    workload: str
    weight: int
    tally: Tally
    held_out: HeldOut
    since_day: int | None = None
    """Where its traffic has changed, the day since which all of these came, days since 1970."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a profile is built from: its workloads, sorted by name, and of all others their calibration sessions."""

    members: tuple[Member, ...]
    others: Mapping[str, Tally]
    window: Window = field(default_factory=Window)
    live: LiveEvaluation = field(default_factory=LiveEvaluation)
    """What agents measured, of a single workload in decode."""

    @classmethod
    def of_parts(cls, shape: ModelShape, workload: str, parts: Mapping[str, Sequence[SessionPart]]) -> Inputs:
        """From stored parts by workload, all in memory; ``workload`` may be a mix."""
        n_experts = [layer.n_experts for layer in shape.layers]
        merged = {name: merge_parts(parts[name]) for name in sorted(parts) if parts[name]}
        tallies = {name: tally_of(n_experts, found) for name, found in merged.items() if found is not None}
        mix = Mix.parse(workload)
        members = []
        for name, weight in mix.members:
            own = merged.get(name)
            judges = [] if own is None else [own.where(own.held_out)]
            held_out = partial(list[Sessions], judges)
            members.append(Member(name, weight, tallies.get(name, Tally(tuple(n_experts))), held_out))
        return cls(tuple(members), {name: tally for name, tally in tallies.items() if name not in mix.names})


@dataclass(frozen=True, slots=True)
class Judges:
    """The held-out sessions of one workload of a profile, and what it is worth there."""

    weight: int
    held_out: HeldOut


@dataclass(frozen=True, slots=True)
class BuiltProfile:
    """A profile with the held-out sessions that judged it, for the expectations of its manifests."""

    profile: Profile
    judges: tuple[Judges, ...]


def tally_batches(n_experts: Sequence[int], batches: Iterable[Sessions], executor: Executor) -> Tally:
    """The tally of sessions that come in batches, each session whole in one of them, in bounded memory."""
    total = Tally(tuple(n_experts))
    for part in executor.map(partial(tally_of, tuple(n_experts)), batches):
        total += part
    return total


def revision_of(fingerprint: str, workload: str, phase: Phase, inputs: Inputs) -> str:
    """SHA-256 over everything a profile is built from: changes exactly when that does."""
    window = inputs.window
    digest = hashlib.sha256(f"spark-profile-{BUILDER_VERSION}\n{fingerprint}\n{workload}\n{phase}\n".encode())
    if window.days or window.half_life_days:
        digest.update(f"{window.today} {window.days} {window.half_life_days!r}\n".encode())
    for member in inputs.members:
        identities = [member.tally.identity(side, window) for side in ("calibration", "held_out")]
        digest.update("{} {}\n".format(*identities).encode())
    for name in sorted(inputs.others):
        if identity := inputs.others[name].identity("calibration", window):
            digest.update(f"{name} {identity}\n".encode())
    for member in inputs.members:
        if member.since_day is not None:
            digest.update(f"{member.workload} since {member.since_day}\n".encode())
    digest.update(inputs.live.identity)
    return digest.hexdigest()


def build_profile(
    shape: ModelShape,
    workload: str,
    phase: Phase,
    revision: str,
    inputs: Inputs,
    executor: Executor | None = None,
    *,
    warnings: Sequence[str] = (),
) -> BuiltProfile | None:
    """Build the profile of a workload, or of a mix, and judge it by its held-out sessions.

    The split is recomputed from each session's hash, for the other workloads too: no held-out session ever calibrates.
    Each workload of a mix is counted and judged as it is alone; the mix is the weighted mean, and is compared with the
    other workloads' profiles and with those of its own workloads. ``None`` where a workload has no calibration
    sessions.
    """
    window = inputs.window
    votes = [member.tally.votes("calibration", window) for member in inputs.members]
    if not all(one.n_sessions for one in votes):
        return None
    # Old sessions judge as much as new ones do, or not at all.
    judging = replace(window, half_life_days=0.0)
    held_out = [member.tally.votes("held_out", judging) for member in inputs.members]
    alone = {member.workload: one.frequencies() for member, one in zip(inputs.members, votes, strict=True)}
    weights = [member.weight for member in inputs.members]
    own = _mixed(list(alone.values()), weights)
    others = {
        name: other.frequencies()
        for name in sorted(inputs.others)
        if (other := inputs.others[name].votes("calibration", window)).n_sessions
    }
    oracle = _mixed([one.mean_shares() for one in held_out], weights)
    plan = Plan.of(layer_sizes(shape), alone, own, others, oracle)
    rates: list[Rates | None] = [None] * len(votes)
    if all(one.n_sessions for one in held_out):
        rates = [_judge(plan, member.held_out, window, executor or LocalExecutor(1)) for member in inputs.members]
    strata = [
        Stratum(member.workload, member.weight, one.n_sessions, judges.n_sessions, of_sessions)
        for member, one, judges, of_sessions in zip(inputs.members, votes, held_out, rates, strict=True)
    ]
    evaluation = plan.evaluate(strata)
    verdict, reason = live_verdict(evaluation.verdict, evaluation.verdict_reason, inputs.live)
    calibration = sum(votes[1:], start=votes[0])
    selections = calibration.selections(MAX_COUNT)
    profile = Profile(
        fingerprint=shape.fingerprint,
        workload=workload,
        phase=phase,
        revision=revision,
        n_calibration=calibration.n_sessions,
        n_held_out=sum(one.n_sessions for one in held_out),
        tokens_calibration=min(calibration.tokens, MAX_COUNT),
        tokens_held_out=min(sum(one.tokens for one in held_out), MAX_COUNT),
        layers=tuple(
            LayerFrequencies(block=layer.block, shares=tuple(own[index].tolist()), selections=tuple(selections[index]))
            for index, layer in enumerate(shape.layers)
        ),
        curves=evaluation.curves,
        mismatch=evaluation.mismatch,
        live=inputs.live.points,
        live_comparisons=inputs.live.comparisons,
        warnings=tuple(warnings),
        verdict=verdict,
        verdict_reason=reason,
    )
    judges = tuple(Judges(member.weight, partial(_within, member.held_out, window)) for member in inputs.members)
    return BuiltProfile(profile, judges)


def _mixed(frequencies: Sequence[Sequence[FloatArray]], weights: Sequence[int]) -> list[FloatArray]:
    """Weighted means of ``frequencies[member][layer][expert]``, in the order given: sorted, so that no bit differs."""
    return [weighted_mean(layer, weights) for layer in zip(*frequencies, strict=True)]


def _judge(plan: Plan, held_out: HeldOut, window: Window, executor: Executor) -> Rates:
    batches = (batch for batch in _within(held_out, window) if len(batch))
    return joined(list(executor.map(plan.trials.judge, batches)))


def _within(held_out: HeldOut, window: Window) -> Iterable[Sessions]:
    for batch in held_out():
        if not window.days:
            yield batch
            continue
        oldest = window.today - window.days
        yield batch.where(batch.days > oldest)
