"""Sessions as arrays: parts added up, and the two sides of the split. Pure.

Values per (layer, expert) lie one layer after the other in one axis, as :mod:`spark_runtime.votes` takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from spark_schemas.ids import MAX_COUNT
from spark_schemas.split import split_of

__all__ = ["IntArray", "Rows", "SessionPart", "Sessions", "merge_parts", "merge_rows"]

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
    day: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Stored histograms of one model, workload and phase, a row each, in any order."""

    content_ids: Sequence[str]
    hashes: Sequence[str]
    days: IntArray
    """When each was received, days since 1970."""
    tokens: IntArray
    counts: IntArray
    """``[row, experts of all layers]``."""
    reuse: IntArray | None
    """``[row, n_experts + 1 distances of all layers]``; ``None`` unless every row has them."""

    def __len__(self) -> int:
        return len(self.hashes)

    def take(self, chosen: Sequence[int] | IntArray) -> Rows:
        """Some of the rows."""
        picked = np.asarray(chosen, dtype=np.intp)
        return Rows(
            [self.content_ids[index] for index in picked],
            [self.hashes[index] for index in picked],
            self.days[picked],
            self.tokens[picked],
            self.counts[picked],
            None if self.reuse is None else self.reuse[picked],
        )

    @classmethod
    def of(cls, parts: Sequence[SessionPart]) -> Self:
        """Rows of at least one part."""
        known = [part.reuse for part in parts if part.reuse is not None]
        return cls(
            [part.content_id for part in parts],
            [part.session_hash for part in parts],
            np.array([part.day for part in parts], dtype=np.int64),
            np.array([part.tokens for part in parts], dtype=np.int64),
            np.stack([np.concatenate(part.counts) for part in parts]),
            np.stack([np.concatenate(layers) for layers in known]) if len(known) == len(parts) else None,
        )

    @classmethod
    def joined(cls, several: Sequence[Rows]) -> Rows:
        """All rows of at least one set."""
        known = [rows.reuse for rows in several if rows.reuse is not None]
        return cls(
            [content_id for rows in several for content_id in rows.content_ids],
            [session_hash for rows in several for session_hash in rows.hashes],
            np.concatenate([rows.days for rows in several]),
            np.concatenate([rows.tokens for rows in several]),
            np.concatenate([rows.counts for rows in several]),
            np.concatenate(known) if len(known) == len(several) else None,
        )


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions of one model, workload and phase, sorted by hash, each with all its parts added up.

    No session's counts are above 2^53 in sum, so that they add up exactly in 64-bit integers and floats alike.
    """

    hashes: tuple[str, ...]
    identities: tuple[int, ...]
    """Sum of each session's content ids as numbers, modulo 2^256: what it was made of."""
    days: IntArray
    """When its last part was received."""
    tokens: IntArray
    counts: IntArray
    reuse: IntArray | None

    def __len__(self) -> int:
        return len(self.hashes)

    def where(self, wanted: NDArray[np.bool_]) -> Sessions:
        """The sessions that a mask names."""
        picked = np.flatnonzero(wanted)
        return Sessions(
            tuple(self.hashes[index] for index in picked),
            tuple(self.identities[index] for index in picked),
            self.days[picked],
            self.tokens[picked],
            self.counts[picked],
            None if self.reuse is None else self.reuse[picked],
        )

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """Which of them judge, decided by the hash alone: a stored label is never trusted."""
        return np.array([split_of(session_hash) == "held_out" for session_hash in self.hashes], dtype=bool)


def merge_parts(parts: Iterable[SessionPart]) -> Sessions | None:
    """:func:`merge_rows` for parts, of which there may be none."""
    rows = list(parts)
    return merge_rows(Rows.of(rows)) if rows else None


def merge_rows(rows: Rows) -> Sessions:
    """Add up the rows of each session of one workload.

    The order of rows changes nothing. Sessions without a single selection are left out: they have no shares and no
    rate.
    """
    order = sorted(range(len(rows)), key=lambda index: rows.hashes[index])
    hashes = [rows.hashes[index] for index in order]
    starts = [index for index in range(len(order)) if index == 0 or hashes[index] != hashes[index - 1]]
    counts, tokens = rows.counts[order], rows.tokens[order]
    reuse = None if rows.reuse is None else rows.reuse[order]
    sizes = np.diff([*starts, len(order)])
    # Legal counts can exceed 2^53 in sum. Halving a whole session keeps its shares, to a part in 2^53.
    sums = np.add.reduceat(counts.sum(axis=1, dtype=np.float64), starts)
    if sums.max() > MAX_COUNT:
        shifts = np.repeat(np.where(sums > MAX_COUNT, np.frexp(sums / MAX_COUNT)[1], 0), sizes)[:, None]
        counts = counts >> shifts
        reuse = None if reuse is None else reuse >> shifts
    if len(starts) < len(order):
        counts = np.add.reduceat(counts, starts, axis=0)
        reuse = None if reuse is None else np.add.reduceat(reuse, starts, axis=0)
    identities = [int(rows.content_ids[index], 16) for index in order]
    ends = [*starts[1:], len(order)]
    merged = Sessions(
        tuple(hashes[start] for start in starts),
        tuple(sum(identities[start:end]) % 2**256 for start, end in zip(starts, ends, strict=True)),
        np.maximum.reduceat(rows.days[order], starts),
        np.array(
            [min(sum(tokens[start:end].tolist()), MAX_COUNT) for start, end in zip(starts, ends, strict=True)],
            dtype=np.int64,
        ),
        counts,
        reuse,
    )
    seen: NDArray[np.bool_] = counts.max(axis=1) > 0
    return merged if seen.all() else merged.where(seen)
