"""The spool's memory of which conversations were served and which were recorded: digests, by the histogram they are of.

Who counts a conversation first counts all of it, so each memory is asked before the other is written. A conversation
that is being served has no histogram yet. Written in the transaction that keeps one; what leaves the spool unsent is
forgotten, so that it can be counted after all.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Literal

__all__ = ["forget", "forget_open", "is_recorded", "is_served", "note_open", "note_recorded", "note_served"]

MARKS_KEPT = 100_000
"""Of each kind."""
_OPEN = ""
_Table = Literal["served", "transcribed"]


def note_open(connection: sqlite3.Connection, fingerprint: str, marks: Sequence[bytes]) -> None:
    """Remember a conversation that is being served, unless recordings count it."""
    if not is_recorded(connection, fingerprint, marks):
        _insert(connection, "served", fingerprint, marks, _OPEN)


def note_served(connection: sqlite3.Connection, fingerprint: str, marks: Sequence[bytes], content_id: str) -> None:
    """Remember of which served conversation a histogram is; it is not open any more."""
    connection.executemany(
        "DELETE FROM served WHERE fingerprint = ? AND mark = ? AND content_id = ?",
        [(fingerprint, mark, _OPEN) for mark in marks],
    )
    _insert(connection, "served", fingerprint, marks, content_id)


def note_recorded(connection: sqlite3.Connection, fingerprint: str, marks: Sequence[bytes], content_id: str) -> None:
    """Remember of which recorded conversation a histogram is."""
    _insert(connection, "transcribed", fingerprint, marks, content_id)


def is_served(connection: sqlite3.Connection, fingerprint: str, marks: Sequence[bytes]) -> bool:
    """Whether serving counts any of these conversations."""
    return _is_known(connection, "served", fingerprint, marks)


def is_recorded(connection: sqlite3.Connection, fingerprint: str, marks: Sequence[bytes]) -> bool:
    """Whether recordings count any of these conversations: they did before it was served.

    Mark by mark: that one conversation with a short opening is served says nothing of another that is recorded.
    """
    return any(
        _is_known(connection, "transcribed", fingerprint, [mark]) and not is_served(connection, fingerprint, [mark])
        for mark in marks
    )


def forget(connection: sqlite3.Connection, content_ids: str, values: tuple[object, ...] = ()) -> None:
    """Forget the conversations of the histograms that a query names."""
    for table in ("served", "transcribed"):
        connection.execute(f"DELETE FROM {table} WHERE content_id IN ({content_ids})", values)  # noqa: S608


def forget_open(connection: sqlite3.Connection, fingerprint: str) -> None:
    """Forget conversations that were open when their agent was killed: their counts never came."""
    connection.execute("DELETE FROM served WHERE fingerprint = ? AND content_id = ?", (fingerprint, _OPEN))


def _is_known(connection: sqlite3.Connection, table: _Table, fingerprint: str, marks: Sequence[bytes]) -> bool:
    query = f"SELECT 1 FROM {table} WHERE fingerprint = ? AND mark = ?"  # noqa: S608
    return any(connection.execute(query, (fingerprint, mark)).fetchone() for mark in marks)


def _insert(
    connection: sqlite3.Connection, table: _Table, fingerprint: str, marks: Sequence[bytes], content_id: str
) -> None:
    connection.executemany(
        f"INSERT OR IGNORE INTO {table} (fingerprint, mark, content_id) VALUES (?, ?, ?)",  # noqa: S608
        [(fingerprint, mark, content_id) for mark in marks],
    )
    connection.execute(
        f"DELETE FROM {table} WHERE seq <= (SELECT max(seq) FROM {table}) - ?",  # noqa: S608
        (MARKS_KEPT,),
    )
