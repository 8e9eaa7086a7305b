"""What this machine's own sessions selected, kept so that the next start knows it. Never uploaded from here.

One row is a session, or a part of one: its decode selections and reuse distances as packed numbers, its keyed hash, its
day. Bounded by number, bytes and age. The counts are a convenience: a file that is broken is moved aside and a new one
begun, and a full disk costs the newest session's counts, never an answer.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from spark_agent.errors import SparkError
from spark_agent.paths import ensure_private_dir
from spark_agent.spool_file import BUSY_TIMEOUT_S, CACHE_KIB, transaction
from spark_runtime.calibration.sessions import SessionPart
from spark_schemas.histogram import SessionHistogram
from spark_schemas.invariants import check_session
from spark_schemas.model import ModelShape

__all__ = ["Limits", "OwnCounts", "OwnCountsError", "OwnWorkload", "today"]

_APPLICATION_ID = 0x53504B32  # "SPK2"
_VERSION = 1
_SCHEMA = (
    "CREATE TABLE models (fingerprint TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT",
    """
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        content_id TEXT NOT NULL UNIQUE,
        fingerprint TEXT NOT NULL,
        workload TEXT NOT NULL,
        session_hash TEXT NOT NULL,
        day INTEGER NOT NULL,
        tokens INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        counts BLOB NOT NULL,
        reuse BLOB NOT NULL
    ) STRICT
    """,
    "CREATE INDEX sessions_of ON sessions (fingerprint, workload, id)",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {_VERSION}",
)
_OF_PART = "content_id, workload, session_hash, tokens, day, counts, reuse"
_GROUP_ROWS = 32
"""Read at once by who only adds them up: unpacked, all of a large model's sessions take hundreds of megabytes."""
_BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


class OwnCountsError(SparkError):
    """The agent's own counts cannot be read or written now; what is served does not depend on them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept."""

    max_sessions: int = 512
    """Of one model and workload; the oldest leave."""
    max_bytes: int = 64 * 2**20
    """Of all packed counts; the oldest leave."""
    max_age_days: int = 180
    """Older ones no longer count."""
    young: int = 16
    """They are deleted once there are so many younger ones of their model and workload: a clock that jumps ahead for a
    day deletes nothing."""


@dataclass(frozen=True, slots=True)
class OwnWorkload:
    """What is kept of one model and workload."""

    fingerprint: str
    model_name: str | None
    workload: str
    sessions: int
    """Distinct ones."""
    tokens: int
    """Decoded."""
    bytes: int
    last_day: int
    """Days since 1970."""


def today() -> int:
    """The UTC day, days since 1970; nothing finer is kept."""
    return dt.datetime.now(dt.UTC).date().toordinal() - dt.date(1970, 1, 1).toordinal()


class OwnCounts:
    """Several processes may open one file, and threads may share one object."""

    def __init__(self, path: Path, warn: Callable[[str], None], limits: Limits | None = None) -> None:
        """Nothing is opened yet; ``warn`` hears of a broken file that was moved aside."""
        self.path = path
        self.limits = limits or Limits()
        self._warn = warn
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was added is in it already."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def add(self, shape: ModelShape, session: SessionHistogram, day: int | None = None) -> bool:
        """Keep a session's decode counts; ``False`` where there are none or the same are here already.

        Raises :class:`OwnCountsError` when they cannot be written, ``InvariantError`` for counts that cannot be true.
        """
        if session.decode is None or session.reuse is None:
            return False
        check_session(session, shape)
        counts = _packed([layer.counts for layer in session.decode.layers])
        reuse = _packed([layer.distances for layer in session.reuse])
        row = (
            session.content_id(shape.fingerprint),
            shape.fingerprint,
            session.workload,
            session.session_hash,
            today() if day is None else day,
            session.decode.tokens,
            len(counts) + len(reuse),
            counts,
            reuse,
        )
        with self._using() as connection, transaction(connection):
            connection.execute(
                "INSERT INTO models VALUES (?, ?) ON CONFLICT (fingerprint) DO UPDATE SET body = excluded.body",
                (shape.fingerprint, shape.model_dump_json()),
            )
            added = connection.execute(
                "INSERT OR IGNORE INTO sessions "
                "(content_id, fingerprint, workload, session_hash, day, tokens, bytes, counts, reuse) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            ).rowcount
            self._prune(connection, shape.fingerprint, session.workload)
        return bool(added)

    def workloads(self, fingerprint: str | None = None) -> list[OwnWorkload]:
        """What is kept, by model and workload; no file is empty, and none is made."""
        if not self.path.exists():
            return []
        with self._using() as connection:
            rows = connection.execute(
                "SELECT s.fingerprint, max(m.body), s.workload, count(DISTINCT s.session_hash), sum(s.tokens), "
                "sum(s.bytes), max(s.day) FROM sessions s LEFT JOIN models m ON m.fingerprint = s.fingerprint "
                "WHERE ?1 IS NULL OR s.fingerprint = ?1 "
                "GROUP BY s.fingerprint, s.workload ORDER BY s.fingerprint, s.workload",
                (fingerprint,),
            ).fetchall()
        return [OwnWorkload(row[0], _name_of(row[1]), *row[2:]) for row in rows]

    def parts(self, shape: ModelShape, now: int | None = None) -> dict[str, list[SessionPart]]:
        """What counts of a model's sessions, by workload; rows that cannot be true are left out and said."""
        if not self.path.exists():
            return {}
        oldest = (today() if now is None else now) - self.limits.max_age_days
        with self._using() as connection:
            rows = connection.execute(
                f"SELECT {_OF_PART} FROM sessions WHERE fingerprint = ? AND day > ? ORDER BY id",  # noqa: S608
                (shape.fingerprint, oldest),
            ).fetchall()
        found: dict[str, list[SessionPart]] = {}
        for part in self._read(shape, rows):
            found.setdefault(part.workload, []).append(part)
        return found

    def groups(self, shape: ModelShape, workload: str, now: int | None = None) -> Iterator[list[SessionPart]]:
        """As :meth:`parts`, of one workload: some sessions at a time, each with all its parts, for what adds them up.

        What is deleted meanwhile is left out.
        """
        if not self.path.exists():
            return
        oldest = (today() if now is None else now) - self.limits.max_age_days
        with self._using() as connection:
            keys = connection.execute(
                "SELECT session_hash, id FROM sessions WHERE fingerprint = ? AND workload = ? AND day > ? "
                "ORDER BY session_hash, id",
                (shape.fingerprint, workload, oldest),
            ).fetchall()
        ids: list[int] = []
        for _, same in itertools.groupby(keys, key=lambda key: key[0]):
            ids += [key for _, key in same]
            if len(ids) >= _GROUP_ROWS:
                yield from self._group(shape, ids)
                ids = []
        yield from self._group(shape, ids)

    def _group(self, shape: ModelShape, ids: list[int]) -> Iterator[list[SessionPart]]:
        with self._using() as connection:
            query = f"SELECT {_OF_PART} FROM sessions WHERE id = ?"  # noqa: S608
            found = [connection.execute(query, (key,)).fetchone() for key in ids]
        parts = self._read(shape, [row for row in found if row is not None])
        if parts:
            yield parts

    def _read(self, shape: ModelShape, rows: list[Any]) -> list[SessionPart]:
        found = []
        for row in rows:
            with suppress(ValueError, zlib.error):
                found.append(_part(shape, *row))
        refused = len(rows) - len(found)
        if refused:
            self._warn(f"{refused} of this machine's own sessions in {self.path} are damaged and do not count")
        return found

    def forget(self, fingerprint: str | None = None, workload: str | None = None) -> int:
        """Delete what is kept of a model, of a workload, or all; how many rows that were."""
        if not self.path.exists():
            return 0
        with self._using() as connection:
            with transaction(connection):
                gone = connection.execute(
                    "DELETE FROM sessions WHERE (?1 IS NULL OR fingerprint = ?1) AND (?2 IS NULL OR workload = ?2)",
                    (fingerprint, workload),
                ).rowcount
                _forget_models(connection)
            connection.execute("PRAGMA incremental_vacuum").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return gone

    def _prune(self, connection: sqlite3.Connection, fingerprint: str, workload: str) -> None:
        limits, of = self.limits, (fingerprint, workload)
        connection.execute(
            "DELETE FROM sessions WHERE fingerprint = ?1 AND workload = ?2 AND id NOT IN (SELECT id FROM sessions "
            "WHERE fingerprint = ?1 AND workload = ?2 ORDER BY id DESC LIMIT ?3)",
            (*of, limits.max_sessions),
        )
        newest = connection.execute(
            "SELECT max(day) FROM sessions WHERE fingerprint = ? AND workload = ?", of
        ).fetchone()[0]
        oldest = newest - limits.max_age_days
        connection.execute(
            "DELETE FROM sessions WHERE fingerprint = ?1 AND workload = ?2 AND day <= ?3 AND (SELECT count(*) FROM "
            "sessions WHERE fingerprint = ?1 AND workload = ?2 AND day > ?3) >= ?4",
            (*of, oldest, limits.young),
        )
        while connection.execute("SELECT coalesce(sum(bytes), 0) FROM sessions").fetchone()[0] > limits.max_bytes:
            connection.execute("DELETE FROM sessions WHERE id = (SELECT min(id) FROM sessions)")
        _forget_models(connection)

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _opened(self.path)
                yield self._connection
            except sqlite3.Error as error:
                if _is_broken(error):
                    self.close()
                    self._move_aside(error)
                raise OwnCountsError(
                    f"this machine's own counts in {self.path} cannot be used: {error}",
                    "free disk space, or remove them: spark profiles forget --all",
                ) from error
            except OSError as error:
                raise OwnCountsError(
                    f"this machine's own counts in {self.path} cannot be used: {error.strerror}",
                    "check the folder's permissions and space",
                ) from error

    def _move_aside(self, error: sqlite3.Error) -> None:
        aside = self.path.with_name(f"{self.path.name}.broken")
        try:
            self.path.replace(aside)
            for ending in ("-wal", "-shm"):
                self.path.with_name(self.path.name + ending).unlink(missing_ok=True)
        except OSError as failure:
            self._warn(f"{self.path} is broken ({error}) and cannot be moved aside: {failure.strerror}")
        else:
            self._warn(f"{self.path} was broken ({error}): it is {aside.name} now, and counting starts anew")


def _opened(path: Path) -> sqlite3.Connection:
    ensure_private_dir(path.parent)
    # SQLite would make it readable by everyone.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        application, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if version > _VERSION or application not in {0, _APPLICATION_ID}:
            raise OwnCountsError(
                f"{path} is of another program or a newer version (application {application}, version {version})",
                "update Spark, or move the file away",
            )
        if application == 0:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        # The last session may go with the power; the file stays whole.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        with transaction(connection):
            if connection.execute("PRAGMA application_id").fetchone()[0] == 0:
                for statement in _SCHEMA:
                    connection.execute(statement)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_broken(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _BROKEN


def _forget_models(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM models WHERE fingerprint NOT IN (SELECT fingerprint FROM sessions)")


def _name_of(body: str | None) -> str | None:
    try:
        return None if body is None else ModelShape.model_validate_json(body).name
    except ValidationError:
        return None  # another version's words; the counts do not depend on it


def _packed(layers: list[tuple[int, ...]]) -> bytes:
    return zlib.compress(np.concatenate([np.asarray(layer, dtype="<i8") for layer in layers]).tobytes())


def _unpacked(packed: bytes, sizes: list[int]) -> tuple[NDArray[np.int64], ...]:
    expected = 8 * sum(sizes)
    inflater = zlib.decompressobj()
    raw = inflater.decompress(packed, expected + 1)
    if len(raw) != expected:
        raise ValueError(f"{len(raw)} bytes of counts, expected {expected}")
    values = np.frombuffer(raw, dtype="<i8").astype(np.int64)
    if (values < 0).any():
        raise ValueError("counts below 0")
    return tuple(np.split(values, np.cumsum(sizes)[:-1]))


def _part(
    shape: ModelShape,
    content_id: str,
    workload: str,
    session_hash: str,
    tokens: int,
    day: int,
    counts: bytes,
    reuse: bytes,
) -> SessionPart:
    sizes = [layer.n_experts for layer in shape.layers]
    selected, distances = _unpacked(counts, sizes), _unpacked(reuse, [size + 1 for size in sizes])
    for layer, mine, far in zip(shape.layers, selected, distances, strict=True):
        if int(mine.sum()) != tokens * layer.top_k or int(far.sum()) != int(mine.sum()):
            raise ValueError(f"block {layer.block}: counts that do not add up to {tokens} tokens")
    if len(bytes.fromhex(session_hash)) != 32 or len(bytes.fromhex(content_id)) != 32:
        raise ValueError("a hash that is none")
    return SessionPart(content_id, workload, session_hash, tokens, selected, distances, day)
