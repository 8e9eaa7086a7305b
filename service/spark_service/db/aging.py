"""Old histograms moved into segments, and deletions carried out there.

A kill at any moment loses and doubles nothing: a file is whole and on disk before the transaction that makes it count,
and goes only after the one that ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from threading import Lock

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from spark_schemas.ids import Phase
from spark_service.db.connection import Database
from spark_service.db.rows import HISTOGRAM_SCHEMA
from spark_service.db.scan import snapshot
from spark_service.db.segments import SegmentFolder

__all__ = ["Rewritten", "age_out", "registered_segments", "rewrite_without", "take_out"]

ROWS_PER_SEGMENT = 8192
"""Bounds the time that the deletion of one session holds up uploads."""
ROWS_PER_READ = 256


def registered_segments(cursor: duckdb.DuckDBPyConnection) -> list[str]:
    """Names of all files that count."""
    return [row[0] for row in cursor.execute("SELECT name FROM segments ORDER BY name").fetchall()]


def age_out(database: Database, folder: SegmentFolder, writing: Lock, before: date) -> int:
    """Move histograms received before a day into one new segment; return their number, 0 where none is left.

    The file is written while uploads go on; only the change of the tables holds ``writing``.
    """
    with database.cursor() as cursor:
        oldest = cursor.execute(
            "SELECT fingerprint, phase FROM parts JOIN histograms USING (content_id) WHERE received_day < ? "
            "ORDER BY received_day, fingerprint, phase LIMIT 1",
            [before],
        ).fetchall()
        if not oldest:
            return 0
        fingerprint, phase = oldest[0]
        rows = cursor.execute(
            "SELECT content_id FROM parts JOIN histograms USING (content_id) "
            "WHERE received_day < ? AND fingerprint = ? AND phase = ? ORDER BY received_day, content_id LIMIT ?",
            [before, fingerprint, phase, ROWS_PER_SEGMENT],
        ).fetchall()
    with snapshot(database, folder, writing, phase, content_ids=[row[0] for row in rows]) as held:
        if held.keys.num_rows:
            name, n_bytes = folder.write(held.tables(ROWS_PER_READ, HISTOGRAM_SCHEMA.names), HISTOGRAM_SCHEMA)
    # A file whose transaction fails stays until the next sweep: the failure may have come after the commit.
    if held.keys.num_rows and not _register(
        database, writing, _File(name, fingerprint, phase, n_bytes), held.keys.select(["content_id"])
    ):
        folder.remove(name)
    # Where a session was deleted meanwhile, the next call writes what is left.
    return len(rows)


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    fingerprint: str
    phase: Phase
    n_bytes: int


def _register(database: Database, writing: Lock, file: _File, moved: pa.Table) -> bool:
    """Make a file count in place of its rows; False, and nothing changed, where some of them are gone."""
    with writing, database.transaction() as cursor:
        cursor.register("moved", moved)
        [[present]] = cursor.execute(
            "SELECT count(*) FROM histograms JOIN moved USING (content_id) WHERE phase = ?", [file.phase]
        ).fetchall()
        if present != moved.num_rows:
            return False
        cursor.execute(
            "DELETE FROM histograms WHERE phase = ? AND content_id IN (SELECT content_id FROM moved)", [file.phase]
        )
        cursor.execute("INSERT INTO segment_rows SELECT content_id, ?, ? FROM moved", [file.phase, file.name])
        cursor.unregister("moved")
        cursor.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?)",
            [file.name, file.fingerprint, file.phase, moved.num_rows, file.n_bytes],
        )
    return True


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A segment without a session's rows; ``new`` is None where nothing else was in it."""

    old: str
    new: str | None
    n_bytes: int


def rewrite_without(database: Database, folder: SegmentFolder, column: str, value: str | date) -> list[Rewritten]:
    """Write the segments that hold rows of some parts anew, without them. They count after :func:`take_out`.

    The parts are those with a value in a column of ``parts``, whose name is the caller's own.

    The caller holds the lock of all writers until then. What an error leaves behind goes with the next sweep.
    """
    with database.cursor() as cursor:
        rows = cursor.execute(
            "SELECT segment, list(DISTINCT content_id) FROM segment_rows JOIN parts USING (content_id) "  # noqa: S608
            f"WHERE {column} = ? GROUP BY segment ORDER BY segment",
            [value],
        ).fetchall()
    return [_rewrite(folder, name, content_ids) for name, content_ids in rows]


def _rewrite(folder: SegmentFolder, name: str, content_ids: list[str]) -> Rewritten:
    gone = pa.array(content_ids, pa.string())
    with folder.open(name) as segment:

        def kept() -> Iterator[pa.Table]:
            for table in segment.tables():
                rest = table.filter(pc.invert(pc.is_in(table["content_id"], value_set=gone)))
                if rest.num_rows:
                    yield rest.cast(HISTOGRAM_SCHEMA)

        if next(kept(), None) is None:
            return Rewritten(name, None, 0)
        return Rewritten(name, *folder.write(kept(), HISTOGRAM_SCHEMA))


def take_out(cursor: duckdb.DuckDBPyConnection, column: str, value: str | date, rewritten: Sequence[Rewritten]) -> None:
    """Make rewritten segments count instead of the old ones, inside the transaction that deletes the parts."""
    cursor.execute(
        f"DELETE FROM segment_rows WHERE content_id IN (SELECT content_id FROM parts WHERE {column} = ?)",  # noqa: S608
        [value],
    )
    for file in rewritten:
        if file.new is not None:
            cursor.execute("UPDATE segment_rows SET segment = ? WHERE segment = ?", [file.new, file.old])
            cursor.execute(
                "INSERT INTO segments SELECT ?, fingerprint, phase, "
                "(SELECT count(*) FROM segment_rows WHERE segment = ?), ? FROM segments WHERE name = ?",
                [file.new, file.new, file.n_bytes, file.old],
            )
        cursor.execute("DELETE FROM segments WHERE name = ?", [file.old])
