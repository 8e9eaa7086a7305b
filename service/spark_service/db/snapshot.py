"""Copying a database file that is open and between two checkpoints, and the files beside it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from spark_service.errors import StorageError, StorageFullError

__all__ = ["copy_log", "copy_snapshot", "head_of", "is_no_room", "link_files"]

HEAD_BYTES = 3 * 4096
"""The main header and the two headers that checkpoints write in turn, each with a higher number."""
CHUNK_BYTES = 2**20
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def head_of(descriptor: int) -> bytes:
    """The part of a DuckDB file that every checkpoint changes."""
    return os.pread(descriptor, HEAD_BYTES, 0)


def is_no_room(error: OSError) -> bool:
    """Whether a write failed for want of room."""
    return error.errno in _NO_ROOM


def copy_snapshot(descriptor: int, target: Path) -> None:
    """Copy an open file to ``target``, which must not exist, and wait until it is on disk.

    Raises :class:`StorageError`, :class:`StorageFullError` when there is no room; a cut copy is removed then.
    """
    try:
        with target.open("xb") as copy:
            # What is appended from here on belongs to no checkpoint that this copy knows.
            size, offset = os.fstat(descriptor).st_size, 0
            while chunk := os.pread(descriptor, min(CHUNK_BYTES, size - offset), offset):
                copy.write(chunk)
                offset += len(chunk)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError as error:
        if not isinstance(error, FileExistsError):
            target.unlink(missing_ok=True)
        raise _copy_error(target, error) from error


def copy_log(database: Path, target: Path) -> None:
    """Copy a database's write-ahead log, where there is one, to that of a database at ``target``.

    Nothing may be committed meanwhile. Raises :class:`StorageError`.
    """
    copy = target.with_name(f"{target.name}.wal")
    try:
        shutil.copyfile(database.with_name(f"{database.name}.wal"), copy)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _copy_error(copy, error) from error


def link_files(source: Path, target: Path) -> None:
    """Give every file under ``source`` a second name under ``target``; a folder that is not there holds none.

    Links take no room and outlive the removal of the first name. Where they cannot be made, files are copied.
    Raises :class:`StorageError`.
    """
    try:
        target.mkdir()
        if source.is_dir():
            shutil.copytree(source, target, copy_function=_link_or_copy, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise _copy_error(target, error) from error


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)
    return target


def _copy_error(target: Path, error: OSError) -> StorageError:
    kind = StorageFullError if is_no_room(error) else StorageError
    return kind(
        f"copy {target}: {error.strerror or error}, expected room for a copy of the database",
        "free disk space, or correct the folder's permissions",
    )
