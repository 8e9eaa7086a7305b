"""The spool: histograms that were accepted on this machine and have not reached the service yet.

One row is one session (or a part of one), kept exactly as counted. Before rows are sent they are sealed into parcels
(see :mod:`spark_agent.batch`): a parcel's members never change again, so whatever was sent before a crash is sent
again with the same content id, and the service counts it once.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from spark_agent import spool_recorded, spool_served
from spark_agent.errors import RefusedError, SpoolError, SpoolFullError
from spark_agent.recorded import Stretch
from spark_agent.spool_file import explained, open_database, transaction
from spark_schemas.histogram import SessionHistogram
from spark_schemas.invariants import check_session
from spark_schemas.model import ModelShape

__all__ = ["MAX_BYTES", "PendingRow", "RejectedRow", "Spool", "SpoolStats"]

MAX_BYTES = 256 * 2**20
"""Default bound of all kept histograms, bytes of JSON: thousands of sessions of a large model."""

UPLOADED_IDS_KEPT = 100_000
"""Content ids remembered after upload, so that counting a transcript again does not send it again."""

_COLUMNS = (
    "id, content_id, fingerprint, session_hash, workload, split, tokens, bytes, created_day, parcel, attempts, "
    "next_try, last_error"
)


@dataclass(frozen=True)
class PendingRow:
    """A waiting row without its counts: what planning needs."""

    id: int
    content_id: str
    fingerprint: str
    session_hash: str
    workload: str
    split: str
    tokens: int
    bytes: int
    """Of its JSON."""
    created_day: str
    """UTC day; nothing finer is kept."""
    parcel: int | None
    """Lowest row id of its parcel, or ``None`` while it may still be grouped freely."""
    attempts: int
    next_try: float
    """Seconds since the epoch before which it need not be tried again."""
    last_error: str | None


@dataclass(frozen=True)
class RejectedRow:
    """A row the service (or a newer schema) will not take: kept aside until a person tries it again."""

    content_id: str
    fingerprint: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class SpoolStats:
    """What ``upload status`` reports."""

    pending: int
    bytes: int
    """Of the JSON of all kept rows, pending and rejected."""
    rejected: int
    dropped: int
    """Rows given up, ever, because the spool was full."""
    last_error: str | None
    """Of the latest attempt; ``None`` once one succeeded."""
    next_try: float | None
    """Seconds since the epoch of the earliest next attempt, if any row has failed before."""


class Spool:
    """Several processes may open one spool, and threads may share one object."""

    def __init__(self, path: Path, connection: sqlite3.Connection, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._connection = connection
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: Path, *, max_bytes: int = MAX_BYTES) -> Self:
        """Open or create the spool; raise :class:`SpoolError` if the file cannot be one."""
        return cls(path, open_database(path), max_bytes)

    def close(self) -> None:
        """Close the file; every accepted row is on the disk already."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def add(
        self,
        model: ModelShape,
        session: SessionHistogram,
        counted: Sequence[Stretch] = (),
        *,
        served: Sequence[bytes] = (),
        transcribed: Sequence[bytes] = (),
        even_if_served: bool = False,
    ) -> bool:
        """Keep a session's counts; return once they would survive a power cut.

        ``counted`` says which stretches of a recorded conversation they are of, for :meth:`recorded`, and
        ``transcribed`` are its marks; ``served`` are the marks of a served one. Who counts a conversation first counts
        all of it (:mod:`spark_agent.served`).

        ``False``: the same counts are here already, were uploaded, or were rejected; or they are of a served
        conversation that recordings count, or of a recorded one that was served, unless ``even_if_served``. Raises
        :class:`~spark_schemas.invariants.InvariantError` for counts that cannot be true and
        :class:`SpoolFullError` when there is no room; then nothing has changed. Anything but a histogram is refused
        with :class:`RefusedError`.
        """
        if type(session) is not SessionHistogram:
            raise RefusedError(
                f"only histograms may be uploaded, found {type(session).__name__}",
                hint="token-level traces rebuild text: they stay on this machine",
            )
        check_session(session, model)
        body = session.model_dump_json()
        size = len(body.encode())
        if size > self.max_bytes:
            raise SpoolFullError(
                f"one session's counts take {size} bytes, the spool {self.path} holds at most {self.max_bytes}",
                hint="open it with a larger limit",
            )
        content_id = session.content_id(model.fingerprint)
        with self._writing() as connection:
            if spool_served.is_recorded(connection, model.fingerprint, served) or (
                not even_if_served and spool_served.is_served(connection, model.fingerprint, transcribed)
            ):
                return False
            spool_recorded.note(connection, model.fingerprint, session, content_id, counted)
            spool_served.note_recorded(connection, model.fingerprint, transcribed, content_id)
            spool_served.note_served(connection, model.fingerprint, served, content_id)
            if _is_known(connection, content_id):
                return False
            connection.execute(
                "INSERT INTO models VALUES (?, ?) ON CONFLICT DO UPDATE SET body = excluded.body "
                "WHERE body <> excluded.body",
                (model.fingerprint, model.model_dump_json()),
            )
            self._insert(connection, content_id, model.fingerprint, session, size, body)
            self._drop_oldest(connection)
        return True

    def recorded(self, fingerprint: str, session_hash: str, workload: str) -> list[Stretch]:
        """Return the stretches of a session's conversations whose counts are here or were uploaded."""
        with self._reading() as connection:
            return spool_recorded.of_session(connection, fingerprint, session_hash, workload)

    def note_open(self, fingerprint: str, marks: Sequence[bytes]) -> None:
        """Remember a conversation that is being served, of which counts will come, unless recordings count it."""
        with self._writing() as connection:
            spool_served.note_open(connection, fingerprint, marks)

    def forget_open(self, fingerprint: str) -> None:
        """Forget the conversations of a model whose counts never came, as their agent was killed."""
        with self._writing() as connection:
            spool_served.forget_open(connection, fingerprint)

    def was_served(self, fingerprint: str, marks: Sequence[bytes]) -> bool:
        """Whether a conversation is being served, or its counts as served are here or were uploaded."""
        with self._reading() as connection:
            return spool_served.is_served(connection, fingerprint, marks)

    def pending(self, limit: int | None = None) -> list[PendingRow]:
        """Return the waiting rows, oldest first, without their counts."""
        with self._reading() as connection:
            return _rows(connection, "ORDER BY id LIMIT ?", (-1 if limit is None else limit,))

    def rejected(self) -> list[RejectedRow]:
        """Return the rows that were moved aside, with the reasons."""
        with self._reading() as connection:
            found = connection.execute("SELECT content_id, fingerprint, bytes, reason FROM rejected ORDER BY id")
            return [RejectedRow(*row) for row in found]

    def model(self, fingerprint: str) -> ModelShape:
        """Return the shape of a model that has rows here; raise :class:`SpoolError` if there is none."""
        with self._reading() as connection:
            row = connection.execute("SELECT body FROM models WHERE fingerprint = ?", (fingerprint,)).fetchone()
        if row is None:
            raise SpoolError(f"the spool {self.path} has no model {fingerprint}", hint="it may have just been purged")
        try:
            return ModelShape.model_validate_json(row[0])
        except ValidationError as error:
            raise SpoolError(
                f"the spool {self.path} describes model {fingerprint} in a way this version cannot read: {error}",
                hint="run the model once more with this version, which writes it anew",
            ) from error

    def bodies(self, ids: Sequence[int]) -> list[str] | None:
        """Return the rows' JSON in the given order, or ``None`` if any of them is gone."""
        with self._reading() as connection:
            bodies = []
            for row_id in ids:
                row = connection.execute("SELECT body FROM sessions WHERE id = ?", (row_id,)).fetchone()
                if row is None:
                    return None
                bodies.append(row[0])
        return bodies

    def seal(self, form: Callable[[list[PendingRow]], Iterable[Sequence[PendingRow]]]) -> None:
        """Hand the rows that are in no parcel yet to ``form`` and make each group it returns a parcel, for good.

        Runs as one transaction, so two processes never put one row into different parcels.
        """
        with self._writing() as connection:
            for group in form(_rows(connection, "WHERE parcel IS NULL ORDER BY id", ())):
                parcel = min(row.id for row in group)
                connection.executemany(
                    "UPDATE sessions SET parcel = ? WHERE id = ?", [(parcel, row.id) for row in group]
                )

    def mark_uploaded(self, ids: Iterable[int]) -> None:
        """Forget rows the service has committed, but remember their content ids."""
        keys = [(row_id,) for row_id in ids]
        with self._writing() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO uploaded (content_id) SELECT content_id FROM sessions WHERE id = ?", keys
            )
            connection.executemany("DELETE FROM sessions WHERE id = ?", keys)
            connection.execute(
                "DELETE FROM uploaded WHERE seq <= (SELECT max(seq) FROM uploaded) - ?", (UPLOADED_IDS_KEPT,)
            )
            _note_error(connection, None)

    def mark_failed(self, ids: Iterable[int], error: str, next_try: float) -> None:
        """Keep rows for another attempt, not before ``next_try`` (seconds since the epoch)."""
        with self._writing() as connection:
            connection.executemany(
                "UPDATE sessions SET attempts = attempts + 1, next_try = ?, last_error = ? WHERE id = ?",
                [(next_try, error, row_id) for row_id in ids],
            )
            _note_error(connection, error)

    def mark_rejected(self, ids: Iterable[int], reason: str) -> None:
        """Move rows aside for good, with the reason."""
        keys = [(row_id,) for row_id in ids]
        with self._writing() as connection:
            connection.executemany(
                "INSERT INTO rejected SELECT id, content_id, fingerprint, bytes, ?, body FROM sessions WHERE id = ?",
                [(reason, *key) for key in keys],
            )
            connection.executemany("DELETE FROM sessions WHERE id = ?", keys)
            _note_error(connection, reason)

    def restore_rejected(self) -> int:
        """Let rows that were moved aside wait again, as the youngest, and return how many; unreadable ones stay."""
        restored = 0
        with self._writing() as connection:
            found = connection.execute("SELECT id, content_id, fingerprint, bytes, body FROM rejected ORDER BY id")
            for row_id, content_id, fingerprint, size, body in found.fetchall():
                try:
                    session = SessionHistogram.model_validate_json(body)
                except ValidationError:
                    continue
                self._insert(connection, content_id, fingerprint, session, size, body)
                connection.execute("DELETE FROM rejected WHERE id = ?", (row_id,))
                restored += 1
            if restored:
                _note_error(connection, None)
        return restored

    def stats(self) -> SpoolStats:
        """Return the counts and the latest error, from one moment."""
        with self._reading() as connection:
            found = connection.execute(
                "SELECT (SELECT count(*) FROM sessions), "
                "(SELECT coalesce(sum(bytes), 0) FROM sessions) + (SELECT coalesce(sum(bytes), 0) FROM rejected), "
                "(SELECT count(*) FROM rejected), "
                "(SELECT value FROM notes WHERE name = 'dropped'), "
                "(SELECT value FROM notes WHERE name = 'last_error'), "
                "(SELECT min(next_try) FROM sessions WHERE attempts > 0)"
            ).fetchone()
        return SpoolStats(*found)

    def purge(self) -> int:
        """Delete every kept histogram, pending and rejected, and return how many; uploaded ids stay known."""
        with self._writing() as connection:
            _forget(connection, "SELECT content_id FROM sessions UNION SELECT content_id FROM rejected")
            count = connection.execute("DELETE FROM sessions").rowcount
            count += connection.execute("DELETE FROM rejected").rowcount
            connection.execute("DELETE FROM models")
            _note_error(connection, None)
        with self._reading() as connection:
            # Without fetching every step, SQLite would free one page only.
            connection.execute("PRAGMA incremental_vacuum").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return count

    @staticmethod
    def _insert(
        connection: sqlite3.Connection,
        content_id: str,
        fingerprint: str,
        session: SessionHistogram,
        size: int,
        body: str,
    ) -> None:
        connection.execute(
            "INSERT INTO sessions (content_id, fingerprint, session_hash, workload, split, tokens, bytes, "
            "created_day, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                content_id,
                fingerprint,
                session.session_hash,
                session.workload,
                session.split,
                session.tokens,
                size,
                dt.datetime.now(dt.UTC).date().isoformat(),
                body,
            ),
        )

    def _drop_oldest(self, connection: sqlite3.Connection) -> None:
        """Get below the bound: rejected rows first, then the oldest rows, whole parcels at once.

        Half a parcel would be merged into something the service has not seen, and counted twice.
        """
        kept = "(SELECT coalesce(sum(bytes), 0) FROM sessions) + (SELECT coalesce(sum(bytes), 0) FROM rejected)"
        while connection.execute(f"SELECT {kept}").fetchone()[0] > self.max_bytes:
            oldest = "FROM rejected WHERE id = (SELECT min(id) FROM rejected)"
            _forget(connection, f"SELECT content_id {oldest}")
            gone = connection.execute(f"DELETE {oldest}").rowcount
            if not gone:
                row_id, parcel = connection.execute("SELECT id, parcel FROM sessions ORDER BY id LIMIT 1").fetchone()
                _forget(connection, "SELECT content_id FROM sessions WHERE id = ? OR parcel = ?", (row_id, parcel))
                gone = connection.execute("DELETE FROM sessions WHERE id = ? OR parcel = ?", (row_id, parcel)).rowcount
            connection.execute("UPDATE notes SET value = value + ? WHERE name = 'dropped'", (gone,))

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, explained(self.path), transaction(self._connection):
            yield self._connection

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, explained(self.path):
            yield self._connection


def _rows(connection: sqlite3.Connection, rest: str, values: tuple[object, ...]) -> list[PendingRow]:
    found = connection.execute(f"SELECT {_COLUMNS} FROM sessions {rest}", values)  # noqa: S608
    return [PendingRow(*row) for row in found]


def _is_known(connection: sqlite3.Connection, content_id: str) -> bool:
    found = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM sessions WHERE content_id = :id) "
        "OR EXISTS (SELECT 1 FROM uploaded WHERE content_id = :id) "
        "OR EXISTS (SELECT 1 FROM rejected WHERE content_id = :id)",
        {"id": content_id},
    )
    return bool(found.fetchone()[0])


def _note_error(connection: sqlite3.Connection, error: str | None) -> None:
    connection.execute("UPDATE notes SET value = ? WHERE name = 'last_error'", (error,))


def _forget(connection: sqlite3.Connection, content_ids: str, values: tuple[object, ...] = ()) -> None:
    """What the histograms that a query names are of may be counted again."""
    spool_recorded.forget(connection, content_ids, values)
    spool_served.forget(connection, content_ids, values)
