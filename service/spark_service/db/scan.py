"""Histograms read back in bounded memory, from the database and from segments, in order of content id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from spark_schemas.ids import Phase
from spark_service.db.connection import Database
from spark_service.db.rows import HISTOGRAM_SCHEMA
from spark_service.db.segments import Segment, SegmentFolder
from spark_service.errors import StorageError

__all__ = ["Snapshot", "snapshot"]

_LOCATED = (
    "SELECT content_id, workload, session_hash, received_day, segment FROM parts JOIN ("
    "SELECT content_id, NULL::VARCHAR AS segment FROM histograms WHERE phase = $phase "
    "UNION ALL SELECT content_id, segment FROM segment_rows WHERE phase = $phase) USING (content_id) "
)
_BY_MODEL = f"{_LOCATED} WHERE fingerprint = $fingerprint ORDER BY content_id"
_BY_ID = f"{_LOCATED} SEMI JOIN wanted USING (content_id) ORDER BY content_id"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was stored at one moment, of one phase: later commits, deletions and moves do not show."""

    keys: pa.Table
    """content_id, workload, session_hash, received_day, segment (null in the database), sorted by content id."""
    _cursor: duckdb.DuckDBPyConnection
    _segments: dict[str, Segment]
    _phase: Phase

    def tables(self, rows_per_table: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Columns of ``histograms`` and of the keys, sorted by content id; read once, forwards."""
        for start in range(0, self.keys.num_rows, rows_per_table):
            yield self._rows(self.keys.slice(start, rows_per_table), columns)

    def _rows(self, keys: pa.Table, columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([field for field in HISTOGRAM_SCHEMA if field.name in {"content_id", *columns}])
        ids = pa.concat_arrays(keys["content_id"].chunks)
        first, last = ids[0].as_py(), ids[-1].as_py()
        found = [self._from_database(keys, first, last, schema)]
        for name in pc.unique(keys["segment"].drop_null()).to_pylist():
            in_range = self._segments[str(name)].between(first, last)
            found += [table.filter(pc.is_in(table["content_id"], value_set=ids)) for table in in_range]
        rows = pa.concat_tables([table.select(schema.names).cast(schema) for table in found]).sort_by("content_id")
        if rows["content_id"].to_pylist() != ids.to_pylist():
            raise StorageError(
                f"histograms {first[:12]}… to {last[:12]}…: found {rows.num_rows} rows, expected {keys.num_rows}",
                "restore the database and its segments from one backup",
            )
        return pa.table({name: (rows if name in schema.names else keys)[name] for name in columns})

    def _from_database(self, keys: pa.Table, first: str, last: str, schema: pa.Schema) -> pa.Table:
        wanted = keys.filter(pc.is_null(keys["segment"])).select(["content_id"])
        if not wanted.num_rows:
            return schema.empty_table()
        self._cursor.register("wanted", wanted)
        try:
            # The range lets whole row groups be skipped, and no count is read of a row outside of it. The columns'
            # names are this module's own.
            rows: pa.Table = self._cursor.sql(
                f"SELECT {', '.join(schema.names)} FROM histograms JOIN wanted USING (content_id) "  # noqa: S608
                "WHERE phase = $phase AND content_id BETWEEN $first AND $last",
                params={"phase": self._phase, "first": first, "last": last},
            ).to_arrow_table()
        finally:
            self._cursor.unregister("wanted")
        return rows


@contextmanager
def snapshot(
    database: Database,
    folder: SegmentFolder,
    writing: Lock,
    phase: Phase,
    *,
    fingerprint: str | None = None,
    content_ids: Sequence[str] = (),
) -> Iterator[Snapshot]:
    """Hold what is stored of a model, or under some content ids, still for reading.

    ``writing`` is held only at the start, so that no file is replaced between finding and opening it.
    """
    with ExitStack() as stack:
        with writing:
            cursor = stack.enter_context(database.transaction())
            if fingerprint is not None:
                keys = cursor.sql(_BY_MODEL, params={"phase": phase, "fingerprint": fingerprint}).to_arrow_table()
            else:
                cursor.register("wanted", pa.table({"content_id": pa.array(content_ids, pa.string())}))
                keys = cursor.sql(_BY_ID, params={"phase": phase}).to_arrow_table()
                cursor.unregister("wanted")
            names = pc.unique(keys["segment"].drop_null()).to_pylist()
            segments = {name: stack.enter_context(folder.open(name)) for name in names}
        yield Snapshot(keys, cursor, segments, phase)
