"""The spool's database file: opened safely, its failures told apart.

Durability: write-ahead log with ``synchronous=FULL``, so each commit is on the disk before it returns. ``NORMAL``
would survive kill -9 as well, but may lose the last commits with the power; one sync per finished session is cheap.
Not for network file systems, where the log's shared memory does not work.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_agent.errors import SpoolError, SpoolFullError
from spark_agent.paths import ensure_private_dir

__all__ = ["BUSY_TIMEOUT_S", "CACHE_KIB", "SCHEMA_VERSION", "explained", "open_database", "transaction"]

SCHEMA_VERSION = 4
BUSY_TIMEOUT_S = 10.0
CACHE_KIB = 256
"""Pages that a connection keeps. SQLite's own 2 MB fill over days, as the file grows; the system has them as well."""
_APPLICATION_ID = 0x53504B31  # "SPK1"

_SINCE_VERSION_2 = (
    """
    CREATE TABLE recorded (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        fingerprint TEXT NOT NULL,
        session_hash TEXT NOT NULL,
        workload TEXT NOT NULL,
        content_id TEXT NOT NULL,
        start INTEGER NOT NULL,
        stop INTEGER NOT NULL,
        marks BLOB NOT NULL
    ) STRICT
    """,
    "CREATE INDEX recorded_by_session ON recorded (session_hash)",
    "CREATE INDEX recorded_by_content ON recorded (content_id)",
)
_SINCE_VERSION_3 = (
    """
    CREATE TABLE served (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        fingerprint TEXT NOT NULL,
        mark BLOB NOT NULL,
        content_id TEXT NOT NULL,
        UNIQUE (mark, fingerprint, content_id)
    ) STRICT
    """,
    "CREATE INDEX served_by_content ON served (content_id)",
)
_SINCE_VERSION_4 = (
    """
    CREATE TABLE transcribed (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        fingerprint TEXT NOT NULL,
        mark BLOB NOT NULL,
        content_id TEXT NOT NULL,
        UNIQUE (mark, fingerprint, content_id)
    ) STRICT
    """,
    "CREATE INDEX transcribed_by_content ON transcribed (content_id)",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

# Bodies come last in their rows: counting bytes and planning never have to walk through them.
_SCHEMA = (
    "CREATE TABLE models (fingerprint TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT",
    # AUTOINCREMENT: an id that another process still holds never comes to mean a later session.
    """
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        content_id TEXT NOT NULL UNIQUE,
        fingerprint TEXT NOT NULL REFERENCES models,
        session_hash TEXT NOT NULL,
        workload TEXT NOT NULL,
        split TEXT NOT NULL,
        tokens INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        created_day TEXT NOT NULL,
        parcel INTEGER,
        attempts INTEGER NOT NULL DEFAULT 0,
        next_try REAL NOT NULL DEFAULT 0,
        last_error TEXT,
        body TEXT NOT NULL
    ) STRICT
    """,
    "CREATE INDEX sessions_by_parcel ON sessions (parcel)",
    """
    CREATE TABLE rejected (
        id INTEGER PRIMARY KEY,
        content_id TEXT NOT NULL UNIQUE,
        fingerprint TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        reason TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT
    """,
    "CREATE TABLE uploaded (seq INTEGER PRIMARY KEY AUTOINCREMENT, content_id TEXT NOT NULL UNIQUE) STRICT",
    "CREATE TABLE notes (name TEXT PRIMARY KEY, value ANY) STRICT",
    "INSERT INTO notes VALUES ('dropped', 0), ('last_error', NULL)",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    *_SINCE_VERSION_2,
    *_SINCE_VERSION_3,
    *_SINCE_VERSION_4,
)

_NO_ROOM = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_KEEP_HINT = "nothing was deleted; move the file away (with its -wal and -shm) and a new spool is made"


def open_database(path: Path) -> sqlite3.Connection:
    """Open or create the database and return a connection in autocommit mode, usable from any one thread at a time.

    Raises :class:`SpoolError` for a file that is not a spool, is damaged, or was written by a newer version.
    """
    try:
        ensure_private_dir(path.parent)
        # SQLite would create it readable by everyone; its -wal and -shm take this file's mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise SpoolError(f"cannot open the spool {path}: {error}", hint="check its permissions and space") from error
    with explained(path):
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        with explained(path):
            _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn SQLite's failures into :class:`SpoolError` with the file's name and what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        primary = None if code is None else code & 0xFF
        if code in _NO_ROOM:
            raise SpoolFullError(
                f"no room to write the spool {path}: {error}",
                hint="free disk space or quota; what was accepted before is intact, this change was not made",
            ) from error
        if primary in _DAMAGED:
            raise SpoolError(f"{path} is not a readable spool: {error}", hint=_KEEP_HINT) from error
        if primary in _BUSY:
            raise SpoolError(
                f"the spool {path} was held by another process for over {BUSY_TIMEOUT_S:g} s",
                hint="try again; see which process holds it with `fuser`",
            ) from error
        raise SpoolError(f"the spool {path} failed: {error}", hint="check its permissions and the disk") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block as one write transaction: all of it or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A full disk may have rolled back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    # One transaction, so that all reads see the file before or after another process makes it a spool.
    connection.execute("BEGIN")
    try:
        _check_identity(connection, path)
    finally:
        if connection.in_transaction:
            connection.execute("COMMIT")
    if connection.execute("PRAGMA application_id").fetchone()[0] == 0:
        # Lets a purge give its pages back without room for a second copy; must precede the first table.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    # Purged and uploaded counts leave no readable trace in free pages.
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    connection.execute(f"PRAGMA journal_size_limit = {4 * 2**20}")
    with transaction(connection):
        _check_identity(connection, path)  # Again: another process may have been faster.
        for statement in _missing(connection):
            connection.execute(statement)


def _missing(connection: sqlite3.Connection) -> list[str]:
    """What turns the file into a spool of this version."""
    application, version = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if application == 0:
        return list(_SCHEMA)
    later = ((2, _SINCE_VERSION_2), (3, _SINCE_VERSION_3), (4, _SINCE_VERSION_4))
    return [statement for since, statements in later if version < since for statement in statements]


def _check_identity(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if application == 0 and version == 0 and tables == 0:
        return
    if application != _APPLICATION_ID:
        raise SpoolError(f"{path} is a database of something else, expected a Spark spool", hint=_KEEP_HINT)
    if version > SCHEMA_VERSION:
        raise SpoolError(
            f"the spool {path} has schema version {version}, expected at most {SCHEMA_VERSION}: a newer Spark wrote it",
            hint="update Spark; the file was left as it is",
        )


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    # Changing the journal mode does not wait for other processes by itself, unlike every later statement.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
