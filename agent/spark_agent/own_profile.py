"""A profile from this machine's own sessions, and placements by it. Pure but for its clock's day.

The same split, votes and judging as the service's: held-out sessions never calibrate, and nothing is promised where too
few of them judge. Newer sessions count more, so that the profile follows the traffic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spark_agent.own_counts import Limits
from spark_runtime.calibration.evaluation import MIN_SESSIONS, Plan, Stratum
from spark_runtime.calibration.sessions import SessionPart, Sessions, merge_parts
from spark_runtime.calibration.tally import Tally, Window, tally_of
from spark_runtime.manifest_build import Basis, assemble_manifest, place_layers
from spark_runtime.placement import (
    FloatArray,
    bootstrap_intervals,
    cold_hit_rates,
    greedy_slots,
    hot_set,
    layer_sizes,
    uniform_slots,
)
from spark_runtime.votes import FULL_WEIGHT_TOKENS, by_layer
from spark_schemas.ids import MAX_COUNT
from spark_schemas.manifest import Expectation, PlacementManifest
from spark_schemas.model import ModelShape
from spark_schemas.profile import LayerFrequencies, Profile

__all__ = ["ALL_SESSIONS", "HALF_LIFE_DAYS", "OwnProfile", "own_frequencies", "own_profile"]

HALF_LIFE_DAYS = 14.0
"""After so many days a session of one's own is worth half."""
ALL_SESSIONS = "all-own-sessions"
"""Name of the profile of all workloads of a model together."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class OwnProfile:
    """What one workload's own sessions say of a model."""

    shape: ModelShape
    workload: str
    frequency: tuple[FloatArray, ...]
    """Of each MoE layer, ``[n_experts]``; sums to one."""
    revision: str
    n_calibration: int
    n_held_out: int
    tokens_calibration: int
    tokens_held_out: int
    _tally: Tally
    _window: Window
    _sessions: Sessions
    _others: Mapping[str, Tally]

    @property
    def suffices(self) -> bool:
        """Whether enough was decoded to start from: as much as gives one session its full vote."""
        return self.tokens_calibration >= FULL_WEIGHT_TOKENS

    @property
    def held_out(self) -> Sessions:
        """The sessions that judge."""
        return self._sessions.where(self._sessions.held_out)

    def expectation(self, slots: Sequence[int]) -> Expectation | None:
        """What these slots would miss, filled by the profile and never changed; ``None`` with too few to judge it."""
        judges = self.held_out
        if len(judges) < MIN_SESSIONS:
            return None
        sizes = layer_sizes(self.shape)
        counts = by_layer(judges.counts, [size.n_experts for size in sizes])
        slot_bytes = sum(count * size.expert_bytes for count, size in zip(slots, sizes, strict=True))
        even = [np.arange(count) for count in uniform_slots(sizes, slot_bytes)]
        rates = np.stack([cold_hit_rates(counts, placed) for placed in (hot_set(self.frequency, slots), even)], axis=1)
        own, uniform = bootstrap_intervals(rates)
        return Expectation(cold_hit_rate=own.mean, low=own.low, high=own.high, uniform_cold_hit_rate=uniform.mean)

    def profile(self) -> Profile:
        """Curves, comparison with this machine's other workloads, and a verdict from the held-out sessions."""
        sizes = layer_sizes(self.shape)
        judges = self.held_out
        others = {
            name: votes.frequencies()
            for name, tally in sorted(self._others.items())
            if (votes := tally.votes("calibration", self._window)).n_sessions
        }
        own = list(self.frequency)
        oracle = self._tally.votes("held_out").mean_shares()
        plan = Plan.of(sizes, {self.workload: own}, own, others, oracle)
        rates = plan.trials.judge(judges) if len(judges) else None
        found = plan.evaluate([Stratum(self.workload, 1, self.n_calibration, len(judges), rates)])
        selections = self._tally.votes("calibration", self._window).selections(MAX_COUNT)
        return Profile(
            fingerprint=self.shape.fingerprint,
            workload=self.workload,
            phase="decode",
            revision=self.revision,
            n_calibration=self.n_calibration,
            n_held_out=self.n_held_out,
            tokens_calibration=self.tokens_calibration,
            tokens_held_out=self.tokens_held_out,
            layers=tuple(
                LayerFrequencies(block=layer.block, shares=tuple(shares.tolist()), selections=tuple(selected))
                for layer, shares, selected in zip(self.shape.layers, self.frequency, selections, strict=True)
            ),
            curves=found.curves,
            mismatch=found.mismatch,
            verdict=found.verdict,
            verdict_reason=found.verdict_reason,
        )

    def manifest(
        self, n_ctx: int, *, slots: Sequence[int] | None = None, vram_bytes: int | None = None, reserve_bytes: int = 0
    ) -> PlacementManifest:
        """A placement by this profile: for given slots, or for those that fit ``vram_bytes``.

        Never signed, and good on this machine alone. Raises ``BudgetTooSmallError`` under the floor.
        """
        sizes = layer_sizes(self.shape)
        if slots is None:
            fixed = self.shape.core_bytes + self.shape.context_bytes(n_ctx) + reserve_bytes
            slots = greedy_slots(self.frequency, sizes, (vram_bytes or 0) - fixed)
        judged = self.profile()
        basis = Basis(
            self.workload,
            "decode",
            self.revision,
            self.n_calibration,
            self.n_held_out,
            judged.verdict,
            judged.verdict_reason,
        )
        return assemble_manifest(
            self.shape,
            basis,
            place_layers(self.shape, self.frequency, slots),
            self.expectation(slots),
            n_ctx=n_ctx,
            reserve_bytes=reserve_bytes,
            vram_bytes=vram_bytes,
        )


def own_frequencies(
    shape: ModelShape, groups: Iterable[Sequence[SessionPart]], today: int, *, half_life_days: float = HALF_LIFE_DAYS
) -> tuple[FloatArray, ...] | None:
    """Expert frequencies of one workload, each layer sums to one; ``None`` where too little was decoded to start from.

    No session may have parts in two of the ``groups``, each of which is forgotten before the next is asked for.
    """
    n_experts = [layer.n_experts for layer in shape.layers]
    tally = Tally(tuple(n_experts))
    for group in groups:
        merged = merge_parts(group)
        if merged is not None:
            tally += tally_of(n_experts, merged.where(~merged.held_out))
    votes = tally.votes("calibration", Window(today, Limits().max_age_days, half_life_days))
    return tuple(votes.frequencies()) if votes.n_sessions and votes.tokens >= FULL_WEIGHT_TOKENS else None


def own_profile(
    shape: ModelShape,
    parts: Mapping[str, Sequence[SessionPart]],
    workload: str | None,
    today: int,
    *,
    half_life_days: float = HALF_LIFE_DAYS,
) -> OwnProfile | None:
    """The profile of one workload's sessions, or of all together (``None``); ``None`` without any that calibrate."""
    chosen = list(parts.get(workload, ())) if workload is not None else [one for of in parts.values() for one in of]
    merged = merge_parts(chosen)
    if merged is None:
        return None
    n_experts = [layer.n_experts for layer in shape.layers]
    window = Window(today, Limits().max_age_days, half_life_days)
    tally = tally_of(n_experts, merged)
    votes = tally.votes("calibration", window)
    if not votes.n_sessions:
        return None
    held_out = tally.votes("held_out", window)
    others = {
        name: tally_of(n_experts, found)
        for name, of in parts.items()
        if workload is not None and name != workload and (found := merge_parts(of)) is not None
    }
    identity = f"{shape.fingerprint}\n{workload or ALL_SESSIONS}\n{today} {half_life_days!r}\n"
    sides = f"{tally.identity('calibration', window)} {tally.identity('held_out', window)}"
    return OwnProfile(
        shape=shape,
        workload=workload or ALL_SESSIONS,
        frequency=tuple(votes.frequencies()),
        revision=hashlib.sha256(f"spark-own-profile-{_VERSION}\n{identity}{sides}".encode()).hexdigest(),
        n_calibration=votes.n_sessions,
        n_held_out=held_out.n_sessions,
        tokens_calibration=votes.tokens,
        tokens_held_out=held_out.tokens,
        _tally=tally,
        _window=window,
        _sessions=merged,
        _others=others,
    )
