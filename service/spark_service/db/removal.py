"""Removal of stored parts: by session on request, by age for retention."""

from __future__ import annotations

from datetime import date

import duckdb

from spark_service.db.tallies import forget_day, forget_session

__all__ = ["days_before", "parts_of_day", "remove_day", "remove_session"]


def remove_session(cursor: duckdb.DuckDBPyConnection, session_hash: str) -> int:
    """Remove a session's parts and remember its hash, so that nothing of it is taken again; return how many parts."""
    cursor.execute("INSERT INTO deleted_sessions VALUES (?) ON CONFLICT DO NOTHING", [session_hash])
    forget_session(cursor, session_hash)
    return _remove(cursor, "session_hash", session_hash)


def remove_day(cursor: duckdb.DuckDBPyConnection, day: date) -> int:
    """Remove the parts received on a day and remember their content ids; return how many parts.

    Not the sessions' hashes: a conversation that goes on today may have begun before. What its agent sends anew is
    other counts and is taken; a repeat of what was removed is not.
    """
    cursor.execute(
        "INSERT INTO expired_parts SELECT content_id FROM parts WHERE received_day = ? ON CONFLICT DO NOTHING", [day]
    )
    forget_day(cursor, day)
    return _remove(cursor, "received_day", day)


def days_before(cursor: duckdb.DuckDBPyConnection, day: date) -> list[date]:
    """Days before this one on which parts were received that are still stored, oldest first."""
    query = "SELECT DISTINCT received_day FROM parts WHERE received_day < ? ORDER BY received_day"
    return [row[0] for row in cursor.execute(query, [day]).fetchall()]


def parts_of_day(cursor: duckdb.DuckDBPyConnection, day: date) -> int:
    """Stored parts that were received on a day."""
    [(count,)] = cursor.execute("SELECT count(*) FROM parts WHERE received_day = ?", [day]).fetchall()
    return int(count)


def _remove(cursor: duckdb.DuckDBPyConnection, column: str, value: str | date) -> int:
    # Column names are this module's own.
    chosen = f"FROM parts WHERE {column} = ?"
    [(count,)] = cursor.execute(f"SELECT count(*) {chosen}", [value]).fetchall()
    cursor.execute(f"DELETE FROM histograms WHERE content_id IN (SELECT content_id {chosen})", [value])  # noqa: S608
    cursor.execute(f"DELETE {chosen}", [value])
    return int(count)
