"""The spool's memory of served conversations: digests, and of which kept or uploaded histogram each is.

A conversation that is open has no histogram yet. Written in the transaction that keeps one; what leaves the spool
unsent is forgotten, so that its transcript can be recorded.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

__all__ = ["forget", "forget_open", "is_known", "note", "note_open"]

MARKS_KEPT = 100_000
_OPEN = ""


def note_open(connection: sqlite3.Connection, fingerprint: str, marks: Sequence[bytes]) -> None:
    """Remember a conversation that is being served."""
    _insert(connection, fingerprint, marks, _OPEN)


def note(connection: sqlite3.Connection, fingerprint: str, marks: Sequence[bytes], content_id: str) -> None:
    """Remember of which conversation a histogram is; it is not open any more."""
    connection.executemany(
        "DELETE FROM served WHERE fingerprint = ? AND mark = ? AND content_id = ?",
        [(fingerprint, mark, _OPEN) for mark in marks],
    )
    _insert(connection, fingerprint, marks, content_id)


def is_known(connection: sqlite3.Connection, fingerprint: str, marks: Sequence[bytes]) -> bool:
    """Whether any of these conversations is or was served."""
    return any(
        connection.execute("SELECT 1 FROM served WHERE fingerprint = ? AND mark = ?", (fingerprint, mark)).fetchone()
        for mark in marks
    )


def forget(connection: sqlite3.Connection, content_ids: str, values: tuple[object, ...] = ()) -> None:
    """Forget the conversations of the histograms that a query names."""
    connection.execute(f"DELETE FROM served WHERE content_id IN ({content_ids})", values)  # noqa: S608


def forget_open(connection: sqlite3.Connection, fingerprint: str) -> None:
    """Forget conversations that were open when their agent was killed: their counts never came."""
    connection.execute("DELETE FROM served WHERE fingerprint = ? AND content_id = ?", (fingerprint, _OPEN))


def _insert(connection: sqlite3.Connection, fingerprint: str, marks: Sequence[bytes], content_id: str) -> None:
    connection.executemany(
        "INSERT OR IGNORE INTO served (fingerprint, mark, content_id) VALUES (?, ?, ?)",
        [(fingerprint, mark, content_id) for mark in marks],
    )
    connection.execute("DELETE FROM served WHERE seq <= (SELECT max(seq) FROM served) - ?", (MARKS_KEPT,))
