"""Histograms as Arrow rows, to and from the database: no count passes through SQL text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from spark_runtime.calibration.sessions import IntArray, SessionPart
from spark_schemas.model import ModelShape
from spark_service.errors import StorageError
from spark_service.packed import PackedPhase, PackedSession, pack_counts, unpack_counts

__all__ = [
    "HISTOGRAM_SCHEMA",
    "PART_COLUMNS",
    "histograms_table",
    "parts_from_table",
    "repacked_table",
]

_HISTOGRAM_COLUMNS: list[tuple[str, pa.DataType]] = [
    ("content_id", pa.string()),
    ("phase", pa.string()),
    ("tokens", pa.uint64()),
    ("blocks", pa.list_(pa.uint32())),
    ("n_experts", pa.list_(pa.uint32())),
    ("layer_tokens", pa.list_(pa.uint64())),
    ("counts", pa.binary()),
    ("reuse", pa.binary()),
]
HISTOGRAM_SCHEMA = pa.schema(_HISTOGRAM_COLUMNS)
"""Rows of ``histograms``, in the database and in segments."""

PART_COLUMNS = ("content_id", "workload", "session_hash", "tokens", "n_experts", "counts", "reuse")
"""What a :class:`SessionPart` is read from."""

_Sessions = Mapping[str, tuple[ModelShape, PackedSession]]
"""Sessions with their models, by content id."""


def histograms_table(sessions: _Sessions) -> pa.Table:
    """Rows of ``histograms``, one per phase."""
    rows = [
        _histogram_row(content_id, model, phase)
        for content_id, (model, session) in sessions.items()
        for phase in session.phases
    ]
    return pa.Table.from_pylist(rows, schema=HISTOGRAM_SCHEMA)


def _histogram_row(content_id: str, model: ModelShape, phase: PackedPhase) -> dict[str, object]:
    return {
        "content_id": content_id,
        "phase": phase.phase,
        "tokens": phase.tokens,
        "blocks": [layer.block for layer in model.layers],
        "n_experts": [layer.n_experts for layer in model.layers],
        "layer_tokens": phase.layer_tokens,
        "counts": phase.counts,
        "reuse": phase.reuse,
    }


def repacked_table(table: pa.Table) -> pa.Table:
    """Rows of ``histograms`` from rows whose counts and reuse are lists of numbers."""
    rows = [_Row(table, index) for index in range(table.num_rows)]
    for name in ("counts", "reuse"):
        lists = [row.array(name) for row in rows]
        packed = [None if values is None else pack_counts(values) for values in lists]
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(packed, pa.binary()))
    return table


def parts_from_table(table: pa.Table) -> list[SessionPart]:
    """Read parts from a table with :data:`PART_COLUMNS`."""
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

    def layers(self, column: str, lengths: IntArray) -> tuple[IntArray, ...] | None:
        """Packed counts as one array for each layer."""
        packed = self.value(column)
        if not isinstance(packed, bytes):
            return None
        return tuple(np.split(unpack_counts(packed, int(lengths.sum())), np.cumsum(lengths)[:-1]))


def _part(row: _Row) -> SessionPart:
    n_experts = row.array("n_experts")
    counts = None if n_experts is None else row.layers("counts", n_experts)
    if n_experts is None or counts is None:
        raise StorageError(f"histogram {row.value('content_id')} has no counts", "restore a backup")
    return SessionPart(
        content_id=str(row.value("content_id")),
        workload=str(row.value("workload")),
        session_hash=str(row.value("session_hash")),
        tokens=int(str(row.value("tokens"))),
        counts=counts,
        reuse=row.layers("reuse", n_experts + 1),
    )
