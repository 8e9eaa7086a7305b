"""Uploads as they are stored: counts as bytes of the narrowest whole numbers that hold them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_schemas.histogram import HistogramUpload, PhaseHistogram, SessionHistogram
from spark_schemas.ids import Phase, Split
from spark_schemas.live import LiveMisses
from spark_schemas.model import ModelShape
from spark_service.errors import StorageError

__all__ = ["PackedPhase", "PackedSession", "PackedUpload", "pack_counts", "pack_upload", "unpack_counts"]

_WIDTHS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
"""Little-endian, whatever the machine: a backup may be restored on another one."""


@dataclass(frozen=True, slots=True)
class PackedPhase:
    """One phase of a session, blocks one after the other in the order of the model's layers.

    ``counts`` and ``reuse`` are packed: n_experts entries for each block, and n_experts + 1.
    """

    phase: Phase
    tokens: int
    layer_tokens: tuple[int, ...]
    counts: bytes
    reuse: bytes | None


@dataclass(frozen=True, slots=True)
class PackedSession:
    """One checked histogram of an upload, with its content id."""

    content_id: str
    session_hash: str
    split: Split
    workload: str
    phases: tuple[PackedPhase, ...]
    live: LiveMisses | None = None


@dataclass(frozen=True, slots=True)
class PackedUpload:
    """A checked upload."""

    model: ModelShape
    sessions: tuple[PackedSession, ...]
    agent_version: str


def pack_counts(counts: NDArray[np.int64]) -> bytes:
    """Counts of at least 0 as bytes. Their number is not kept: whoever unpacks them knows it from the model."""
    largest = int(counts.max(initial=0))
    width = next(width for width in _WIDTHS if largest < 2 ** (8 * width))
    return counts.astype(_WIDTHS[width]).tobytes()


def unpack_counts(packed: bytes, length: int) -> NDArray[np.int64]:
    """Return ``length`` counts, at least 1. Raises :class:`StorageError` where the bytes are not that many numbers."""
    width, rest = divmod(len(packed), length)
    if rest or width not in _WIDTHS:
        raise StorageError(
            f"stored counts: found {len(packed)} bytes, expected {length} numbers of 1, 2, 4 or 8 bytes",
            "restore a backup",
        )
    return np.frombuffer(packed, _WIDTHS[width]).astype(np.int64)


def pack_upload(upload: HistogramUpload) -> PackedUpload:
    """Pack an upload that passed its checks."""
    fingerprint = upload.model.fingerprint
    return PackedUpload(
        upload.model, tuple(_pack_session(session, fingerprint) for session in upload.sessions), upload.agent_version
    )


def _pack_session(session: SessionHistogram, fingerprint: str) -> PackedSession:
    parts: list[tuple[Phase, PhaseHistogram | None]] = [("prefill", session.prefill), ("decode", session.decode)]
    phases: list[PackedPhase] = []
    for phase, part in parts:
        if part is None:
            continue
        reuse = None
        if phase == "decode" and session.reuse is not None:
            reuse = _flat([layer.distances for layer in session.reuse])
        counts = _flat([layer.counts for layer in part.layers])
        layer_tokens = tuple(layer.tokens for layer in part.layers)
        phases.append(PackedPhase(phase, part.tokens, layer_tokens, counts, reuse))
    return PackedSession(
        session.content_id(fingerprint),
        session.session_hash,
        session.split,
        session.workload,
        tuple(phases),
        session.live,
    )


def _flat(layers: Sequence[Sequence[int]]) -> bytes:
    return pack_counts(np.concatenate([np.array(layer, np.int64) for layer in layers]))
