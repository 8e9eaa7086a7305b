"""The database connection and its one owner, this process."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from spark_service.db.snapshot import head_of
from spark_service.errors import (
    DatabaseError,
    DatabaseFormatError,
    DatabaseLockedError,
    StorageError,
    StorageFullError,
)

__all__ = ["Database"]

log = logging.getLogger(__name__)

_MAGIC = b"DUCK"
_MAGIC_OFFSET = 8
_LOCK_HOLDER = re.compile(r"Conflicting lock is held in (?P<program>.*) \(PID (?P<pid>\d+)\)")
CHECKPOINT_WAL_BYTES = 2**24
"""A commit that leaves a longer write-ahead log is followed by a checkpoint, as DuckDB itself would do."""
_NO_ROOM = ("No space left on device", "File too large", "Disk quota exceeded", "Out of Memory")


class Database:
    """An open DuckDB file. Every use takes its own cursor: a connection shared by threads mixes up their results.

    DuckDB declares a whole database invalid when a checkpoint cannot be written (a full disk); it is then opened again
    at the next use, so that the process outlives the condition.

    Checkpoints are made here and never by DuckDB on its own: between two of them the file does not change in any part
    that counts, so that it can be copied while transactions go on in the write-ahead log.
    """

    def __init__(self, path: Path, *, memory: str = "256MB", threads: int = 2, read_only: bool = False) -> None:
        """Open or create ``path``; ``read_only`` changes nothing on disk and needs the file to be there.

        Raises :class:`DatabaseLockedError` when another process has it open, :class:`DatabaseFormatError` for a damaged
        or foreign file, :class:`DatabaseError` otherwise.
        """
        self.path = path
        self._config: dict[str, str | bool | int | float | list[str]] = {
            # A service never downloads code; only what is linked into the wheel is used.
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            # Merging small row groups at checkpoints rewrites rows of tens of kilobytes again and again, and holds up
            # commits for seconds. Row groups whose rows are all deleted are freed without it.
            "max_vacuum_tasks": 0,
            "memory_limit": memory,
            "threads": threads,
            "checkpoint_threshold": "1TB",
        }
        self._read_only = read_only
        self._lock = threading.Lock()
        self._checkpointing = threading.Lock()
        self._descriptor: int | None = None
        self._connection: duckdb.DuckDBPyConnection | None = self._connect()
        self._invalid = False
        self._generation = 0

    @property
    def generation(self) -> int:
        """How many transactions that may have changed what is read have ended; nothing was written while it stays."""
        return self._generation

    def _connect(self) -> duckdb.DuckDBPyConnection:
        _require_magic(self.path)
        try:
            connection = duckdb.connect(str(self.path), read_only=self._read_only, config=self._config)
            # Days are UTC's everywhere: in the machine's own zone an upload might be of tomorrow, or of yesterday.
            connection.execute("SET GLOBAL TimeZone = 'UTC'")
            # After opening, which is itself file access; from here on SQL reaches no file but the database.
            connection.execute("SET GLOBAL python_enable_replacements = false")
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
        except duckdb.Error as error:
            raise _open_error(self.path, error) from error
        return connection

    @contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give a cursor for one use in one thread. Raises :class:`StorageError` for whatever the database refuses."""
        cursor = self._new_cursor()
        try:
            yield cursor
        except duckdb.Error as error:
            if isinstance(error, duckdb.FatalException):
                self._invalid = True
            raise _storage_error(self.path, error) from error
        finally:
            cursor.close()

    @contextmanager
    def transaction(self, *, counted: bool = True) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give a cursor inside a transaction: committed at the end, rolled back by any exception.

        ``counted`` transactions raise :attr:`generation`, also when they fail: what a failed commit left is not known.
        """
        try:
            with self._transaction() as cursor:
                yield cursor
        finally:
            if counted:
                with self._lock:
                    self._generation += 1

    @contextmanager
    def _transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with self.cursor() as cursor:
            cursor.begin()
            try:
                yield cursor
            except BaseException:
                try:
                    cursor.rollback()
                except duckdb.Error as error:
                    # The first error is the one that says what happened.
                    log.warning("rollback failed: %s", error)
                raise
            cursor.commit()
            self._checkpoint_if_due(cursor)

    def _checkpoint_if_due(self, cursor: duckdb.DuckDBPyConnection) -> None:
        if self._read_only:
            return
        try:
            log_bytes = self.path.with_name(f"{self.path.name}.wal").stat().st_size
        except FileNotFoundError:
            return
        if log_bytes < CHECKPOINT_WAL_BYTES:
            return
        # While the file is being copied the log grows; the first commit afterwards folds it in.
        if not self._checkpointing.acquire(blocking=False):
            return
        try:
            cursor.execute("CHECKPOINT")
        except duckdb.TransactionException:
            # A reader that began before a deletion holds it up. The log grows, and the next commit tries again.
            log.debug("checkpoint of %s put off", self.path)
        except duckdb.Error as error:
            # What was committed stays in the log and is safe: the caller's transaction has not failed.
            log.warning("checkpoint of %s failed, to be tried again: %s", self.path, error)
            self._invalid = self._invalid or isinstance(error, duckdb.FatalException)
        finally:
            self._checkpointing.release()

    @contextmanager
    def frozen(self) -> Iterator[int]:
        """Keep the file as it is for one use of its descriptor, while transactions go on in the write-ahead log.

        What was committed is folded into it before if that is possible: a reader that began before a deletion keeps
        DuckDB from it. File and log together are all that was committed, as they are after a kill. Raises
        :class:`StorageError` for what the database refuses, and at the end if the file was changed after all.
        """
        with self._checkpointing:
            with self.cursor() as cursor:
                try:
                    cursor.execute("CHECKPOINT")
                except duckdb.TransactionException:
                    log.info("copying %s with its write-ahead log: a reader holds up its checkpoint", self.path)
            descriptor = self._open_descriptor()
            head = head_of(descriptor)
            yield descriptor
            if head_of(descriptor) != head:
                raise StorageError(
                    f"database {self.path} was checkpointed while it was copied, expected no checkpoint", "try again"
                )

    def _open_descriptor(self) -> int:
        # Kept as long as the database is open: POSIX drops a process's lock on a file when it closes any descriptor
        # of that file, and then a second owner could open it.
        with self._lock:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptor

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _new_cursor(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            if self._connection is None:
                raise StorageError(f"database {self.path} is closed, expected it open", "restart the service")
            if self._invalid:
                self._reopen(self._connection)
            return self._connection.cursor()

    def _reopen(self, connection: duckdb.DuckDBPyConnection) -> None:
        log.warning("opening %s again after a fatal database error", self.path)
        connection.close()
        try:
            self._connection = self._connect()
        except DatabaseError as error:
            raise StorageError(error.message, error.hint) from error
        self._invalid = False

    def close(self, *, checkpoint: bool = True) -> None:
        """Checkpoint and close; closing twice is harmless. Raises :class:`StorageError` if the checkpoint fails."""
        with self._checkpointing, self._lock:
            connection, self._connection = self._connection, None
            if connection is None:
                return
            try:
                if checkpoint and not self._invalid and not self._read_only:
                    connection.execute("CHECKPOINT")
            except duckdb.Error as error:
                raise _storage_error(self.path, error) from error
            finally:
                connection.close()
                self._close_descriptor()


def _require_magic(path: Path) -> None:
    """Refuse foreign files before DuckDB sees them: it would look for an extension that reads them."""
    try:
        with path.open("rb") as file:
            head = file.read(_MAGIC_OFFSET + len(_MAGIC))
    except FileNotFoundError:
        return
    except OSError as error:
        raise DatabaseError(
            f"database {path}: {error.strerror or error}, expected a file that can be read and written",
            "correct its permissions, or choose another folder with --data-dir PATH",
        ) from error
    if head[_MAGIC_OFFSET:] != _MAGIC:
        raise DatabaseFormatError(
            f"database {path}: found a file that is not a DuckDB database, expected one made by spark-service",
            "move the file away, or choose another folder with --data-dir PATH",
        )


def _open_error(path: Path, error: duckdb.Error) -> DatabaseError:
    text = str(error).strip()
    if holder := _LOCK_HOLDER.search(text):
        program = Path(holder["program"]).name
        return DatabaseLockedError(
            f"database {path} is open in process {holder['pid']} ({program}), expected no other owner",
            f"stop process {holder['pid']}, or choose another folder with --data-dir PATH",
        )
    if "Could not set lock" in text:
        return DatabaseLockedError(
            f"database {path} is open in another process, expected no other owner",
            "stop the other spark-service, or choose another folder with --data-dir PATH",
        )
    # A later DuckDB's file is not damage: the advice must not be to throw it away.
    if any(sign in text for sign in ("Corrupt", "not a valid DuckDB", "Could not read enough bytes")):
        return DatabaseFormatError(
            f"database {path} is damaged: {text}", "restore it from a backup, or move it away to start empty"
        )
    return DatabaseError(
        f"database {path} cannot be opened: {text}", "correct what it says, or choose another folder with --data-dir"
    )


def _storage_error(path: Path, error: duckdb.Error) -> StorageError:
    text = str(error).strip().splitlines()[0]
    if isinstance(error, duckdb.OutOfMemoryException) or any(sign in str(error) for sign in _NO_ROOM):
        return StorageFullError(f"database {path}: no room left ({text})", "free disk space or memory, then retry")
    return StorageError(f"database {path}: {text}", "retry; if it stays, read the service's log")
