"""From stored parts to a profile. Pure: the same parts give the same bits, wherever and in whatever order they come."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spark_runtime.placement import frequencies, layer_sizes
from spark_schemas.ids import MAX_COUNT, Phase
from spark_schemas.model import ModelShape
from spark_schemas.profile import LayerFrequencies, Profile
from spark_service.evaluation import evaluate
from spark_service.sessions import IntArray, Session, SessionPart, merge_parts, split_sessions

__all__ = ["BUILDER_VERSION", "BuiltProfile", "build_profile", "revision_of"]

BUILDER_VERSION = 1
"""Raised whenever the same parts would give another profile."""


@dataclass(frozen=True, slots=True)
class BuiltProfile:
    """A profile with the held-out sessions that judged it, for the expectations of its manifests."""

    profile: Profile
    held_out: tuple[Session, ...]


def revision_of(fingerprint: str, workload: str, phase: Phase, content_ids: Mapping[str, Sequence[str]]) -> str:
    """SHA-256 over everything a profile is built from.

    ``content_ids`` are by workload: all of this one's, and the calibration parts of the others, which the curves
    compare with.
    """
    digest = hashlib.sha256(f"spark-profile-{BUILDER_VERSION}\n{fingerprint}\n{workload}\n{phase}\n".encode())
    for name in sorted(content_ids):
        for content_id in sorted(content_ids[name]):
            digest.update(f"{name} {content_id}\n".encode())
    return digest.hexdigest()


def build_profile(
    shape: ModelShape, workload: str, phase: Phase, revision: str, parts: Mapping[str, Sequence[SessionPart]]
) -> BuiltProfile | None:
    """Build a workload's profile from parts by workload: its own, and the other workloads' calibration parts.

    The split is recomputed from each session's hash, for the other workloads too: no held-out session ever calibrates.
    ``None`` without calibration sessions.
    """
    calibration, held_out = split_sessions(merge_parts(parts.get(workload, ())))
    if not calibration:
        return None
    own = frequencies([session.counts for session in calibration], [session.tokens for session in calibration])
    others = {}
    for name in sorted(set(parts) - {workload}):
        sessions, _ = split_sessions(merge_parts(parts[name]))
        if sessions:
            others[name] = frequencies([session.counts for session in sessions], [one.tokens for one in sessions])
    evaluation = evaluate(layer_sizes(shape), workload, own, others, held_out, len(calibration))
    profile = Profile(
        fingerprint=shape.fingerprint,
        workload=workload,
        phase=phase,
        revision=revision,
        n_calibration=len(calibration),
        n_held_out=len(held_out),
        tokens_calibration=_total(session.tokens for session in calibration),
        tokens_held_out=_total(session.tokens for session in held_out),
        layers=tuple(
            LayerFrequencies(
                block=layer.block,
                shares=tuple(own[index].tolist()),
                selections=tuple(_selections(calibration, index).tolist()),
            )
            for index, layer in enumerate(shape.layers)
        ),
        curves=evaluation.curves,
        verdict=evaluation.verdict,
        verdict_reason=evaluation.verdict_reason,
    )
    return BuiltProfile(profile, tuple(held_out))


def _selections(sessions: Sequence[Session], layer: int) -> IntArray:
    """Selections per expert of a layer over all sessions, held at the largest count that the schema can say."""
    total = np.zeros_like(sessions[0].counts[layer])
    for session in sessions:
        # Held at each step: two numbers of at most 2^53 never leave 64 bits.
        np.minimum(total + session.counts[layer], MAX_COUNT, out=total)
    return total


def _total(counts: Iterable[int]) -> int:
    """Sum in Python's unbounded integers, held at the largest count that the schema can say."""
    return min(sum(counts), MAX_COUNT)
