"""From tallies and held-out sessions to a profile. Pure.

The same sessions give the same bits, wherever they come from, in whatever order, batch by batch or all at once, added
one by one or counted anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from spark_runtime.placement import layer_sizes
from spark_schemas.ids import MAX_COUNT, Phase
from spark_schemas.model import ModelShape
from spark_schemas.profile import LayerFrequencies, Profile
from spark_service.evaluation import Plan
from spark_service.executors import Executor, LocalExecutor
from spark_service.sessions import SessionPart, Sessions, merge_parts
from spark_service.tally import Tally, Window, tally_of
from spark_service.trials import Rates, joined

__all__ = ["BUILDER_VERSION", "BuiltProfile", "HeldOut", "Inputs", "build_profile", "revision_of", "tally_batches"]

BUILDER_VERSION = 2
"""Raised whenever the same sessions would give another profile."""

HeldOut = Callable[[], Iterable[Sessions]]
"""Gives the held-out sessions of a workload, each of them whole in one batch, as often as it is called."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a workload's profile is built from. Of the other workloads only calibration sessions are used."""

    own: Tally
    others: Mapping[str, Tally]
    held_out: HeldOut
    window: Window = field(default_factory=Window)

    @classmethod
    def of_parts(cls, shape: ModelShape, workload: str, parts: Mapping[str, Sequence[SessionPart]]) -> Inputs:
        """From stored parts by workload, all in memory."""
        n_experts = [layer.n_experts for layer in shape.layers]
        merged = {name: merge_parts(parts[name]) for name in sorted({*parts, workload}) if parts.get(name)}
        tallies = {name: tally_of(n_experts, found) for name, found in merged.items() if found is not None}
        own = merged.get(workload)
        judges = [] if own is None else [own.where(own.held_out)]
        others = {name: tally for name, tally in tallies.items() if name != workload}
        return cls(tallies.get(workload, Tally(tuple(n_experts))), others, lambda: judges)


@dataclass(frozen=True, slots=True)
class BuiltProfile:
    """A profile with the held-out sessions that judged it, for the expectations of its manifests."""

    profile: Profile
    held_out: HeldOut


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
    digest.update(f"{inputs.own.identity('calibration', window)} {inputs.own.identity('held_out', window)}\n".encode())
    for name in sorted(inputs.others):
        if identity := inputs.others[name].identity("calibration", window):
            digest.update(f"{name} {identity}\n".encode())
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
    """Build a workload's profile and judge it by its held-out sessions.

    The split is recomputed from each session's hash, for the other workloads too: no held-out session ever calibrates.
    ``None`` without calibration sessions.
    """
    window = inputs.window
    calibration = inputs.own.votes("calibration", window)
    if not calibration.n_sessions:
        return None
    # Old sessions judge as much as new ones do, or not at all.
    held_out = inputs.own.votes("held_out", replace(window, half_life_days=0.0))
    own = calibration.frequencies()
    others = {
        name: votes.frequencies()
        for name in sorted(inputs.others)
        if (votes := inputs.others[name].votes("calibration", window)).n_sessions
    }
    rates = None
    plan = Plan.of(layer_sizes(shape), workload, own, others, held_out.mean_shares())
    if held_out.n_sessions:
        rates = _judge(plan, inputs, executor or LocalExecutor(1))
    evaluation = plan.evaluate(rates, calibration.n_sessions)
    selections = calibration.selections(MAX_COUNT)
    profile = Profile(
        fingerprint=shape.fingerprint,
        workload=workload,
        phase=phase,
        revision=revision,
        n_calibration=calibration.n_sessions,
        n_held_out=held_out.n_sessions,
        tokens_calibration=min(calibration.tokens, MAX_COUNT),
        tokens_held_out=min(held_out.tokens, MAX_COUNT),
        layers=tuple(
            LayerFrequencies(block=layer.block, shares=tuple(own[index].tolist()), selections=tuple(selections[index]))
            for index, layer in enumerate(shape.layers)
        ),
        curves=evaluation.curves,
        mismatch=evaluation.mismatch,
        warnings=tuple(warnings),
        verdict=evaluation.verdict,
        verdict_reason=evaluation.verdict_reason,
    )
    return BuiltProfile(profile, partial(_within, inputs.held_out, window))


def _judge(plan: Plan, inputs: Inputs, executor: Executor) -> Rates:
    batches = (batch for batch in _within(inputs.held_out, inputs.window) if len(batch))
    return joined(list(executor.map(plan.trials.judge, batches)))


def _within(held_out: HeldOut, window: Window) -> Iterable[Sessions]:
    for batch in held_out():
        if not window.days:
            yield batch
            continue
        oldest = window.today - window.days
        yield batch.where(batch.days > oldest)
