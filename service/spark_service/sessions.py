"""Sessions as arrays: parts added up, and the two sides of the split. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_schemas.ids import MAX_COUNT
from spark_schemas.split import split_of

__all__ = ["IntArray", "Session", "SessionPart", "merge_parts", "split_sessions", "stack_counts"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SessionPart:
    """One stored histogram in one phase: ``counts[layer][expert]`` and, for decode, ``reuse[layer][distance]``."""

    content_id: str
    workload: str
    session_hash: str
    tokens: int
    counts: tuple[IntArray, ...]
    reuse: tuple[IntArray, ...] | None


@dataclass(frozen=True, slots=True)
class Session:
    """All parts of one session of one workload in one phase, added up. No layer's sum is above 2^53."""

    session_hash: str
    tokens: int
    counts: tuple[IntArray, ...]
    reuse: tuple[IntArray, ...] | None


def merge_parts(parts: Iterable[SessionPart]) -> list[Session]:
    """Add up the parts of each session of one workload; sessions come sorted by hash.

    The result does not depend on the order of the parts. Sessions without a single selection are left out: they have
    no shares and no rate.
    """
    by_session: dict[str, list[SessionPart]] = {}
    for part in sorted(parts, key=lambda part: part.content_id):
        by_session.setdefault(part.session_hash, []).append(part)
    sessions = [_merge(session_hash, by_session[session_hash]) for session_hash in sorted(by_session)]
    return [session for session in sessions if any(layer.any() for layer in session.counts)]


def split_sessions(sessions: Iterable[Session]) -> tuple[list[Session], list[Session]]:
    """Return (calibration, held-out), decided by the hash alone: a stored label is never trusted."""
    calibration: list[Session] = []
    held_out: list[Session] = []
    for session in sessions:
        (held_out if split_of(session.session_hash) == "held_out" else calibration).append(session)
    return calibration, held_out


def stack_counts(sessions: Sequence[Session]) -> list[IntArray]:
    """Counts of at least one session side by side, ``counts[layer][session, expert]``, to judge them all at once."""
    return [np.stack(layer) for layer in zip(*(session.counts for session in sessions), strict=True)]


def _merge(session_hash: str, parts: Sequence[SessionPart]) -> Session:
    layers = list(zip(*(part.counts for part in parts), strict=True))
    # Legal counts can exceed 64 bits in sum. Halving a whole session keeps its shares, to a part in 2^53.
    largest = max(math.fsum(float(array.sum(dtype=np.float64)) for array in layer) for layer in layers)
    shift = max(0, math.frexp(largest / MAX_COUNT)[1]) if largest > MAX_COUNT else 0
    known = [part.reuse for part in parts if part.reuse is not None]
    reuse = None
    if len(known) == len(parts):
        reuse = tuple(_add(layer, shift) for layer in zip(*known, strict=True))
    return Session(
        session_hash,
        min(sum(part.tokens for part in parts), MAX_COUNT),
        tuple(_add(layer, shift) for layer in layers),
        reuse,
    )


def _add(arrays: Sequence[IntArray], shift: int) -> IntArray:
    total = arrays[0] >> shift
    for array in arrays[1:]:
        total = total + (array >> shift)
    return total
