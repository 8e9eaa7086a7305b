"""What a backup is: one tar file with the database, the files beside it and a manifest that lists them."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spark_service.db.checksums import TableSum
from spark_service.errors import BackupError

__all__ = ["MANIFEST_NAME", "SEGMENTS_NAME", "BackupManifest", "StoredFile", "file_of", "pack", "unpack"]

MANIFEST_NAME = "manifest.json"
SEGMENTS_NAME = "segments"
"""Folder of immutable files beside the database."""
CHUNK_BYTES = 2**20
MAX_MANIFEST_BYTES = 2**28
_PART = r"[A-Za-z0-9_=-][A-Za-z0-9_.=-]{0,199}"
_MEMBER = re.compile(rf"service\.duckdb|{SEGMENTS_NAME}(?:/{_PART}){{1,16}}")


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StoredFile(_Closed):
    """One file of a backup."""

    name: str
    """Path inside the backup."""
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class BackupManifest(_Closed):
    """What a backup holds, and of what."""

    format: Literal["spark-backup-1"] = "spark-backup-1"
    program_version: str
    schema_version: int = Field(ge=0)
    created_at: str
    """UTC, ISO 8601."""
    database: StoredFile
    tables: dict[str, TableSum]
    segments: tuple[StoredFile, ...] = ()

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """All files but the manifest."""
        return (self.database, *self.segments)


def file_of(path: Path, name: str) -> StoredFile:
    """Describe a file on disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return StoredFile(name=name, bytes=size, sha256=digest.hexdigest())


def pack(manifest: BackupManifest, folder: Path, target: BinaryIO) -> None:
    """Write a backup of what lies in ``folder`` under the names in the manifest, which comes first."""
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        text = (manifest.model_dump_json(indent=1) + "\n").encode()
        archive.addfile(_header(MANIFEST_NAME, len(text)), io.BytesIO(text))
        for file in manifest.files:
            with (folder / file.name).open("rb") as content:
                archive.addfile(_header(file.name, file.bytes), content)


def _header(name: str, size_bytes: int) -> tarfile.TarInfo:
    # No owner, time or mode of this machine: the same content is the same bytes.
    header = tarfile.TarInfo(name)
    header.size = size_bytes
    header.mode = 0o600
    return header


def unpack(source: Path, folder: Path) -> BackupManifest:
    """Unpack a backup into an empty folder and prove that it is whole: every file listed, present and as listed.

    Nothing is written outside ``folder`` whatever the archive says. Raises :class:`BackupError`; what was unpacked by
    then stays in ``folder``.
    """
    try:
        with source.open("rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
            members = iter(archive)
            manifest = _read_manifest(source, archive, next(members, None))
            _unpack_files(source, archive, members, manifest, folder)
    except tarfile.TarError as error:
        raise _damaged(source, str(error)) from error
    except OSError as error:
        raise BackupError(
            f"backup {source}: {error.strerror or error}, expected a file that can be read and room to unpack it",
            "correct the path, its permissions, or free disk space",
        ) from error
    return manifest


def _read_manifest(source: Path, archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> BackupManifest:
    content = None
    if member is not None and member.name == MANIFEST_NAME and 0 < member.size <= MAX_MANIFEST_BYTES:
        content = archive.extractfile(member) if member.isreg() else None
    if content is None:
        found = "an empty archive" if member is None else f"{member.name!r} first"
        raise _damaged(source, f"{found}, expected {MANIFEST_NAME}")
    try:
        manifest = BackupManifest.model_validate_json(content.read())
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise _damaged(source, f"{MANIFEST_NAME}, {where}: {first['msg']}") from error
    names = [file.name for file in manifest.files]
    bad = next((name for name in names if not _MEMBER.fullmatch(name)), None)
    if bad is not None or len(set(names)) != len(names):
        raise _damaged(source, f"{MANIFEST_NAME} lists {bad or 'a name twice'!r}, expected names of a backup's files")
    return manifest


def _unpack_files(
    source: Path,
    archive: tarfile.TarFile,
    members: Iterator[tarfile.TarInfo],
    manifest: BackupManifest,
    folder: Path,
) -> None:
    expected = {file.name: file for file in manifest.files}
    for member in members:
        file = expected.pop(member.name, None)
        content = archive.extractfile(member) if file is not None and member.isreg() else None
        if file is None or content is None:
            raise _damaged(source, f"{member.name!r} is not in its manifest as a file, or is there twice")
        if member.size != file.bytes:
            raise _damaged(source, f"{file.name} has {member.size} bytes, expected {file.bytes}")
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as copy:
            shutil.copyfileobj(content, copy, CHUNK_BYTES)
        found = file_of(target, file.name)
        if found != file:
            raise _damaged(source, f"{file.name} has SHA-256 {found.sha256}, expected {file.sha256}")
    if expected:
        raise _damaged(source, f"{next(iter(expected))} is missing")


def _damaged(source: Path, reason: str) -> BackupError:
    return BackupError(
        f"backup {source} is not whole: {reason}",
        "use another backup, or name a file that spark-service backup wrote",
    )
