"""Histograms as Arrow rows, to and from the database: no count passes through SQL text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from spark_schemas.histogram import PhaseHistogram, SessionHistogram
from spark_schemas.ids import Phase
from spark_service.errors import StorageError
from spark_service.sessions import IntArray, SessionPart

__all__ = ["histograms_table", "parts_from_table", "parts_table"]

_PART_COLUMNS: list[tuple[str, pa.DataType]] = [
    (name, pa.string()) for name in ("content_id", "fingerprint", "workload", "session_hash", "split")
]
_HISTOGRAM_COLUMNS: list[tuple[str, pa.DataType]] = [
    ("content_id", pa.string()),
    ("phase", pa.string()),
    ("tokens", pa.uint64()),
    ("blocks", pa.list_(pa.uint32())),
    ("n_experts", pa.list_(pa.uint32())),
    ("layer_tokens", pa.list_(pa.uint64())),
    ("counts", pa.list_(pa.uint64())),
    ("reuse", pa.list_(pa.uint64())),
]


def parts_table(sessions: Mapping[str, SessionHistogram], fingerprint: str) -> pa.Table:
    """Rows of ``parts`` for sessions by content id."""
    rows = [
        {
            "content_id": content_id,
            "fingerprint": fingerprint,
            "workload": session.workload,
            "session_hash": session.session_hash,
            "split": session.split,
        }
        for content_id, session in sessions.items()
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(_PART_COLUMNS))


def histograms_table(sessions: Mapping[str, SessionHistogram]) -> pa.Table:
    """Rows of ``histograms`` for sessions by content id, one per phase, blocks flattened one after the other."""
    rows = []
    for content_id, session in sessions.items():
        if session.prefill is not None:
            rows.append(_histogram_row(content_id, "prefill", session.prefill, None))
        if session.decode is not None:
            reuse = [count for layer in session.reuse or () for count in layer.distances]
            rows.append(_histogram_row(content_id, "decode", session.decode, reuse))
    return pa.Table.from_pylist(rows, schema=pa.schema(_HISTOGRAM_COLUMNS))


def _histogram_row(content_id: str, phase: Phase, part: PhaseHistogram, reuse: list[int] | None) -> dict[str, object]:
    return {
        "content_id": content_id,
        "phase": phase,
        "tokens": part.tokens,
        "blocks": [layer.block for layer in part.layers],
        "n_experts": [len(layer.counts) for layer in part.layers],
        "layer_tokens": [layer.tokens for layer in part.layers],
        "counts": [count for layer in part.layers for count in layer.counts],
        "reuse": reuse,
    }


def parts_from_table(table: pa.Table) -> list[SessionPart]:
    """Read parts with the columns content_id, workload, session_hash, tokens, n_experts, counts and reuse."""
    return [_part(_Row(table, index)) for index in range(table.num_rows)]


class _Row:
    """One row of an Arrow table; lists come as int64 arrays without passing through Python numbers."""

    def __init__(self, table: pa.Table, index: int) -> None:
        self._table = table
        self._index = index

    def value(self, column: str) -> object:
        return self._table[column][self._index].as_py()

    def array(self, column: str) -> IntArray | None:
        scalar = self._table[column][self._index]
        if not scalar.is_valid:
            return None
        values: IntArray = scalar.values.to_numpy(zero_copy_only=False).astype(np.int64)
        return values


def _part(row: _Row) -> SessionPart:
    n_experts, counts, reuse = row.array("n_experts"), row.array("counts"), row.array("reuse")
    if n_experts is None or counts is None:
        raise StorageError(f"histogram {row.value('content_id')} has no counts", "restore a backup")
    return SessionPart(
        content_id=str(row.value("content_id")),
        workload=str(row.value("workload")),
        session_hash=str(row.value("session_hash")),
        tokens=int(str(row.value("tokens"))),
        counts=_unflatten(counts, n_experts),
        reuse=None if reuse is None else _unflatten(reuse, n_experts + 1),
    )


def _unflatten(flat: IntArray, lengths: IntArray) -> tuple[IntArray, ...]:
    return tuple(np.split(flat, np.cumsum(lengths)[:-1]))
