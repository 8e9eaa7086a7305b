"""The spool's memory of recorded conversations: which stretches the kept and uploaded histograms are of.

Written in the transaction that keeps a histogram, so a crash never counts a stretch twice or loses it. What leaves the
spool unsent is forgotten, so that it can be recorded again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from spark_agent.recorded import Stretch
from spark_schemas.histogram import SessionHistogram

__all__ = ["forget", "note", "of_session"]

STRETCHES_KEPT = 100_000
MARKS_KEPT_BYTES = 32 * 2**20
"""Of digests in all: those of two billion tokens."""


def note(
    connection: sqlite3.Connection,
    fingerprint: str,
    session: SessionHistogram,
    content_id: str,
    counted: Sequence[Stretch],
) -> None:
    """Remember what a histogram is of; the oldest are forgotten where it becomes too much."""
    if not counted:
        return
    connection.executemany(
        "INSERT INTO recorded (fingerprint, session_hash, workload, content_id, start, stop, marks) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (fingerprint, session.session_hash, session.workload, content_id, one.start, one.end, one.marks)
            for one in counted
        ],
    )
    while True:
        rows, size = connection.execute("SELECT count(*), coalesce(sum(length(marks)), 0) FROM recorded").fetchone()
        if rows <= STRETCHES_KEPT and size <= MARKS_KEPT_BYTES:
            return
        few = max(1, rows // 100)
        connection.execute("DELETE FROM recorded WHERE seq IN (SELECT seq FROM recorded ORDER BY seq LIMIT ?)", (few,))


def of_session(connection: sqlite3.Connection, fingerprint: str, session_hash: str, workload: str) -> list[Stretch]:
    """The remembered stretches of a session under one workload."""
    found = connection.execute(
        "SELECT start, stop, marks FROM recorded WHERE session_hash = ? AND fingerprint = ? AND workload = ? "
        "ORDER BY seq",
        (session_hash, fingerprint, workload),
    )
    return [Stretch(*row) for row in found]


def forget(connection: sqlite3.Connection, content_ids: str, values: tuple[object, ...] = ()) -> None:
    """Forget the stretches of the histograms that a query names."""
    connection.execute(f"DELETE FROM recorded WHERE content_id IN ({content_ids})", values)  # noqa: S608
