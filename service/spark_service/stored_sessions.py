"""Stored rows of counts as the sessions they came from, unchecked, so that they can be checked again."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spark_schemas.histogram import LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.split import split_of
from spark_service.db.scan import Snapshot
from spark_service.errors import StorageError
from spark_service.packed import unpack_counts

__all__ = ["StoredPart", "StoredPhase", "parts_of", "session_of"]

BATCH_ROWS = 64
_COLUMNS = (
    "content_id",
    "workload",
    "session_hash",
    "phase",
    "tokens",
    "blocks",
    "n_experts",
    "layer_tokens",
    "counts",
    "reuse",
)


@dataclass(frozen=True, slots=True)
class StoredPhase:
    """One row of counts."""

    phase: str
    tokens: int
    blocks: list[int]
    layer_tokens: list[int]
    n_experts: list[int]
    counts: bytes
    """Packed; see :mod:`spark_service.packed`."""
    reuse: bytes | None


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What is stored of a part beside its counts."""

    content_id: str
    workload: str
    session_hash: str


def parts_of(*held: Snapshot) -> Iterator[tuple[StoredPart, list[StoredPhase]]]:
    """All parts of a model with their counts, from a snapshot of each phase, in order of content id.

    Raises :class:`StorageError` for what cannot be read.
    """
    rows = heapq.merge(*map(_rows_of, held), key=_content_id)
    for _, group in itertools.groupby(rows, key=_content_id):
        found = list(group)
        yield found[0][0], [phase for _, phase in found]


def _content_id(row: tuple[StoredPart, StoredPhase]) -> str:
    return row[0].content_id


def _rows_of(held: Snapshot) -> Iterator[tuple[StoredPart, StoredPhase]]:
    for table in held.tables(BATCH_ROWS, _COLUMNS):
        for index in range(table.num_rows):
            row = {name: table[name][index] for name in _COLUMNS}
            part = StoredPart(*(row[name].as_py() for name in ("content_id", "workload", "session_hash")))
            yield part, _phase(row)


def session_of(part: StoredPart, phases: Iterable[StoredPhase]) -> SessionHistogram:
    """The session as it was sent, without validation. Raises ``ValueError`` where counts do not fit each other."""
    by_name = {phase.phase: phase for phase in phases}
    decode = by_name.get("decode")
    reuse = None
    if decode is not None and decode.reuse is not None:
        reuse = tuple(
            LayerReuse.model_construct(block=block, distances=tuple(distances))
            for block, distances in zip(
                decode.blocks, _unflatten(decode.reuse, [n + 1 for n in decode.n_experts]), strict=True
            )
        )
    return SessionHistogram.model_construct(
        session_hash=part.session_hash,
        split=split_of(part.session_hash),
        workload=part.workload,
        prefill=_histogram(by_name.get("prefill")),
        decode=_histogram(decode),
        reuse=reuse,
    )


def _histogram(phase: StoredPhase | None) -> PhaseHistogram | None:
    if phase is None:
        return None
    layers = tuple(
        LayerCounts.model_construct(block=block, tokens=tokens, counts=tuple(counts))
        for block, tokens, counts in zip(
            phase.blocks, phase.layer_tokens, _unflatten(phase.counts, phase.n_experts), strict=True
        )
    )
    return PhaseHistogram.model_construct(tokens=phase.tokens, layers=layers)


def _phase(row: Mapping[str, Any]) -> StoredPhase:
    names = ("phase", "tokens", "blocks", "layer_tokens", "n_experts", "counts", "reuse")
    return StoredPhase(*(row[name].as_py() for name in names))


def _unflatten(packed: bytes, lengths: list[int]) -> list[list[int]]:
    try:
        flat = unpack_counts(packed, max(sum(lengths), 1))
    except StorageError as error:
        raise ValueError(error.message) from error
    return [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]
