"""Writing backups and putting them back."""

from __future__ import annotations

import datetime
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spark_service import version
from spark_service.backup_format import SEGMENTS_NAME, BackupManifest, StoredFile, file_of, pack, unpack
from spark_service.db.checksums import table_sums
from spark_service.db.connection import Database
from spark_service.db.migrate import available, pending
from spark_service.db.snapshot import copy_snapshot, is_no_room, link_files
from spark_service.errors import (
    BackupError,
    DatabaseFormatError,
    DatabaseLockedError,
    RefusedError,
    SparkServiceError,
    StorageFullError,
)
from spark_service.settings import DATABASE_NAME, Settings

__all__ = [
    "WORKING_PREFIX",
    "Backup",
    "backup_offline",
    "put_in_place",
    "require_free",
    "restore",
    "seal",
    "working_folder",
]

WORKING_PREFIX = ".spark-"
"""How the names of working folders begin; a process that is killed leaves its own."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup that was written."""

    path: Path
    file: StoredFile
    """Its name, size and SHA-256."""
    manifest: BackupManifest


@contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """An empty folder on the file system of ``parent``, removed afterwards; ``parent`` is made if it is missing.

    Whatever the operating system refuses inside is a :class:`BackupError`, or a :class:`StorageFullError`.
    """
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=WORKING_PREFIX, dir=parent) as folder:
            yield Path(folder)
    except OSError as error:
        kind = StorageFullError if is_no_room(error) else BackupError
        raise kind(
            f"folder {parent}: {error.strerror or error}, expected one that can be written and has room",
            "choose another, correct its permissions, or free disk space",
        ) from error


def seal(folder: Path, target: Path, *, memory: str, threads: int, force: bool = False) -> Backup:
    """Turn a copied database and its segments in ``folder`` into the backup ``target``.

    Every row of the copy is read: a backup that nobody can read is not written. Raises :class:`RefusedError` where
    something is at ``target`` already, unless ``force``; :class:`DatabaseError` and :class:`BackupError` otherwise.
    """
    # Folds in what was copied of a write-ahead log.
    Database(folder / DATABASE_NAME, memory=memory, threads=threads).close()
    database = Database(folder / DATABASE_NAME, memory=memory, threads=threads, read_only=True)
    try:
        schema_version = len(available()) - len(pending(database))
        tables = table_sums(database)
    finally:
        database.close()
    segments = sorted(path for path in (folder / SEGMENTS_NAME).rglob("*") if path.is_file())
    manifest = BackupManifest(
        program_version=version(),
        schema_version=schema_version,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        database=file_of(folder / DATABASE_NAME, DATABASE_NAME),
        tables=tables,
        segments=tuple(file_of(path, path.relative_to(folder).as_posix()) for path in segments),
    )
    partial = folder / "backup.partial"
    partial.touch(mode=0o600, exist_ok=False)
    with partial.open("wb") as file:
        pack(manifest, folder, file)
        file.flush()
        os.fsync(file.fileno())
    done = file_of(partial, target.name)
    put_in_place(partial, target, force=force)
    return Backup(target, done, manifest)


def require_free(target: Path, *, force: bool) -> None:
    """Raise :class:`RefusedError` where something is at ``target`` already, unless ``force``."""
    if not force and target.exists():
        raise RefusedError(f"refusing to write over {target}: it exists", "choose another name, or add --force")


def put_in_place(partial: Path, target: Path, *, force: bool) -> None:
    """Give a finished file of the same file system its name, all at once. Raises :class:`RefusedError`."""
    require_free(target, force=force)
    try:
        if force:
            partial.replace(target)
        else:
            # Unlike a rename, a link never replaces what appeared in the meantime.
            os.link(partial, target)
    except FileExistsError:
        require_free(target, force=force)
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        partial.replace(target)
    _sync_folder(target.parent)


def backup_offline(settings: Settings, target: Path, *, force: bool = False) -> Backup:
    """Back up a database that no service has open.

    Raises :class:`DatabaseLockedError` naming the service that has, and the errors of :func:`seal`.
    """
    require_free(target, force=force)
    if not settings.database.exists():
        raise BackupError(
            f"data folder {settings.data_dir}: found no {DATABASE_NAME}, expected a database to back up",
            "name its folder with --data-dir PATH",
        )
    with working_folder(target.parent) as folder:
        try:
            database = Database(settings.database, memory=settings.db_memory, threads=settings.db_threads)
        except DatabaseLockedError as error:
            raise DatabaseLockedError(
                error.message, "add --service URL to let the running service make the backup"
            ) from error
        try:
            pending(database)
            with database.frozen() as descriptor:
                link_files(settings.segments_dir, folder / SEGMENTS_NAME)
                copy_snapshot(descriptor, folder / DATABASE_NAME)
        finally:
            database.close()
        return seal(folder, target, memory=settings.db_memory, threads=settings.db_threads, force=force)


def restore(settings: Settings, source: Path, *, force: bool = False) -> BackupManifest:
    """Put a backup in the place of the data folder's database and segments.

    The backup is unpacked beside them and proved whole, its rows included, before anything is replaced. With
    ``force`` what was there is replaced, and kept aside until everything new is in place. Raises
    :class:`RefusedError` where a database is and ``force`` is not given, :class:`BackupError` for a damaged or newer
    backup, :class:`DatabaseLockedError` while a service has the database open.
    """
    if settings.database.exists() and not force:
        raise RefusedError(
            f"refusing to replace {settings.database}: it exists",
            "choose an empty folder with --data-dir PATH, or add --force to replace it",
        )
    settings.prepare_data_dir()
    with working_folder(settings.data_dir) as new, working_folder(settings.segments_dir.parent) as beside:
        manifest = unpack(source, new)
        known = len(available())
        if manifest.schema_version > known:
            raise BackupError(
                f"backup {source} has schema version {manifest.schema_version}, expected at most {known}",
                "upgrade spark-moe: a newer version wrote this backup",
            )
        _require_same_rows(settings, source, new, manifest)
        # The segments' folder may be on another file system: what is moved into its place must be on that one.
        new_segments = beside / SEGMENTS_NAME
        if manifest.segments:
            link_files(new / SEGMENTS_NAME, new_segments)
        _swap(settings, new / DATABASE_NAME, new_segments)
    return manifest


def _require_same_rows(settings: Settings, source: Path, folder: Path, manifest: BackupManifest) -> None:
    database = Database(folder / DATABASE_NAME, memory=settings.db_memory, threads=settings.db_threads, read_only=True)
    try:
        pending(database)
        found = table_sums(database)
    finally:
        database.close()
    for name in sorted(found.keys() | manifest.tables.keys()):
        if found.get(name) != manifest.tables.get(name):
            raise BackupError(
                f"backup {source}: table {name} holds {found.get(name)}, expected {manifest.tables.get(name)}",
                "use another backup",
            )


def _swap(settings: Settings, new: Path, new_segments: Path) -> None:
    """Move the old files aside and the new ones in; a failure moves the old ones back."""
    # Not in the working folders: should this process die here, what was replaced is still there.
    old = settings.data_dir / f".replaced-{os.getpid()}"
    old_segments = settings.segments_dir.with_name(f".replaced-{os.getpid()}-{SEGMENTS_NAME}")
    log = settings.database.with_name(f"{DATABASE_NAME}.wal")
    with _owned(settings.database):
        old.mkdir(mode=0o700)
        for tree in (new.parent, new_segments):
            _sync_tree(tree)
        moves = [
            (settings.database, old / settings.database.name),
            (log, old / log.name),
            (settings.segments_dir, old_segments),
            (new_segments, settings.segments_dir),
            # The database comes last: while it is missing, nothing can be started on half of a restore.
            (new, settings.database),
        ]
        moves = [(source, target) for source, target in moves if source.exists()]
        done = 0
        try:
            for source, target in moves:
                source.replace(target)
                done += 1
        except OSError:
            for source, target in reversed(moves[:done]):
                target.replace(source)
            old.rmdir()
            raise
        for folder in {settings.data_dir, settings.segments_dir.parent}:
            _sync_folder(folder)
    shutil.rmtree(old)
    if old_segments.exists():
        shutil.rmtree(old_segments)


@contextmanager
def _owned(path: Path) -> Iterator[None]:
    """Hold DuckDB's own lock on a file, so that no service has it or opens it. Its content does not matter."""
    if not path.exists():
        yield
        return
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _owner_error(path) from error
        yield


def _owner_error(path: Path) -> SparkServiceError:
    # DuckDB knows the owner's process.
    try:
        Database(path, read_only=True).close()
    except DatabaseLockedError as error:
        return error
    except DatabaseFormatError:
        pass
    return DatabaseLockedError(
        f"database {path} is open in another process, expected no owner while it is replaced", "stop the service first"
    )


def _sync_tree(folder: Path) -> None:
    if not folder.exists():
        return
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            _sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
