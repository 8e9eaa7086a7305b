"""Removal of stored parts: by session on request, by age for retention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Self

import duckdb

from spark_service.db import drift, history
from spark_service.db.aging import Rewritten, rewrite_without, take_out
from spark_service.db.connection import Database
from spark_service.db.segments import SegmentFolder
from spark_service.db.tallies import forget_day, forget_session

__all__ = ["Removal", "days_before", "parts_of_day"]


@dataclass(slots=True)
class Removal:
    """One removal: segments are written anew before the transaction, and the old ones go after it."""

    folder: SegmentFolder
    column: str
    value: str | date
    rewritten: Sequence[Rewritten]
    removed: int = 0
    """Parts removed so far."""

    @classmethod
    def prepared(cls, database: Database, folder: SegmentFolder, column: str, value: str | date) -> Self:
        """Write what will be left of segments; the caller holds the lock of all writers until :meth:`finish`."""
        return cls(folder, column, value, rewrite_without(database, folder, column, value))

    def session(self, cursor: duckdb.DuckDBPyConnection, session_hash: str) -> int:
        """Remove a session's parts and remember its hash, so that nothing of it is taken again; return how many."""
        cursor.execute("INSERT INTO deleted_sessions VALUES (?) ON CONFLICT DO NOTHING", [session_hash])
        drift.forget_session(cursor, session_hash)
        history.forget_session(cursor, session_hash)
        forget_session(cursor, self.folder, session_hash)
        return self._remove(cursor)

    def day(self, cursor: duckdb.DuckDBPyConnection, day: date) -> int:
        """Remove the parts received on a day and remember their content ids; return how many parts.

        Not the sessions' hashes: a conversation that goes on today may have begun before. What its agent sends anew is
        other counts and is taken; a repeat of what was removed is not.
        """
        cursor.execute(
            "INSERT INTO expired_parts SELECT content_id FROM parts WHERE received_day = ? ON CONFLICT DO NOTHING",
            [day],
        )
        forget_day(cursor, self.folder, day)
        cursor.execute("DELETE FROM agent_uploads WHERE received_day <= ?", [day])
        return self._remove(cursor)

    def finish(self) -> None:
        """Remove the files that no longer count, after the commit."""
        for file in self.rewritten:
            self.folder.remove(file.old)

    def _remove(self, cursor: duckdb.DuckDBPyConnection) -> int:
        # Column names are this module's own.
        chosen = f"FROM parts WHERE {self.column} = ?"
        [(count,)] = cursor.execute(f"SELECT count(*) {chosen}", [self.value]).fetchall()
        cursor.execute(
            f"DELETE FROM histograms WHERE content_id IN (SELECT content_id {chosen})",  # noqa: S608
            [self.value],
        )
        cursor.execute(f"DELETE FROM live WHERE content_id IN (SELECT content_id {chosen})", [self.value])  # noqa: S608
        take_out(cursor, self.column, self.value, self.rewritten)
        cursor.execute(f"DELETE {chosen}", [self.value])
        self.removed += int(count)
        return int(count)


def days_before(cursor: duckdb.DuckDBPyConnection, day: date) -> list[date]:
    """Days before this one on which parts were received that are still stored, oldest first."""
    query = "SELECT DISTINCT received_day FROM parts WHERE received_day < ? ORDER BY received_day"
    return [row[0] for row in cursor.execute(query, [day]).fetchall()]


def parts_of_day(cursor: duckdb.DuckDBPyConnection, day: date) -> int:
    """Stored parts that were received on a day."""
    [(count,)] = cursor.execute("SELECT count(*) FROM parts WHERE received_day = ?", [day]).fetchall()
    return int(count)
