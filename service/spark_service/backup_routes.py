"""Backups of a running service: made beside the database, fetched, removed."""

from __future__ import annotations

import datetime
import multiprocessing
import secrets
import shutil
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field, StringConstraints

from spark_schemas.api import API_PREFIX
from spark_service.backup import WORKING_PREFIX, seal, working_folder
from spark_service.backup_format import SEGMENTS_NAME
from spark_service.db.checksums import TableSum
from spark_service.db.store import Store
from spark_service.errors import RequestError, StorageError
from spark_service.settings import DATABASE_NAME

__all__ = ["BackupReceipt", "BackupRemoved", "add_backups"]

FOLDER_NAME = "backups"
WORKER_MEMORY = "256MB"
WORKER_THREADS = 1
_Name = Annotated[str, StringConstraints(pattern=r"^spark-backup-[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}\.tar$")]
_PathName = Annotated[_Name, PathParameter(description="Name that the answer to POST /api/v1/admin/backup gave.")]


class BackupReceipt(BaseModel):
    """A backup that lies beside the database, whole and synced to disk."""

    name: _Name
    bytes: int = Field(ge=0, description="Size of the file.")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the file.")
    schema_version: int = Field(ge=0, description="Version of the database schema in it.")
    created_at: str = Field(description="UTC, ISO 8601.")
    tables: dict[str, TableSum] = Field(description="Rows and content checksum by table.")
    segments: int = Field(ge=0, description="Files beside the database in it.")


class BackupRemoved(BaseModel):
    """Answer to the removal of a backup."""

    name: _Name


def add_backups(app: FastAPI, store: Store) -> None:
    """Add the routes under ``/api/v1/admin`` that make, give and remove backups."""
    folder = store.path.parent / FOLDER_NAME
    running = threading.Lock()

    @app.post(f"{API_PREFIX}/admin/backup", status_code=201)
    def make_backup() -> BackupReceipt:
        """Back up what is committed now; uploads go on meanwhile. One at a time: 409 while another one runs.

        Answered when the backup is on disk and every row in it was read back.
        """
        if not running.acquire(blocking=False):
            raise RequestError(
                409,
                "backup_running",
                "a backup is being made, expected none",
                hint="wait until it is done",
                headers={"Retry-After": "10"},
            )
        try:
            return _make_backup(store, folder)
        finally:
            running.release()

    @app.get(
        f"{API_PREFIX}/admin/backups/{{name}}",
        response_class=FileResponse,
        responses={200: {"description": "The backup", "content": {"application/x-tar": {}}}},
    )
    def get_backup(name: _PathName) -> FileResponse:
        """The bytes of a backup, a tar file."""
        return FileResponse(_existing(folder, name), media_type="application/x-tar", filename=name)

    @app.delete(f"{API_PREFIX}/admin/backups/{{name}}")
    def remove_backup(name: _PathName) -> BackupRemoved:
        """Remove a backup from the service's disk."""
        _existing(folder, name).unlink(missing_ok=True)
        return BackupRemoved(name=name)


def _make_backup(store: Store, folder: Path) -> BackupReceipt:
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    target = folder / f"spark-backup-{moment}-{secrets.token_hex(4)}.tar"
    # Of earlier processes that were killed; this one makes one backup at a time.
    for left_over in folder.glob(f"{WORKING_PREFIX}*"):
        shutil.rmtree(left_over)
    with working_folder(folder) as work:
        store.copy_to(work / DATABASE_NAME, work / SEGMENTS_NAME)
        # Reading every row back takes a processor and memory: uploads shall not share theirs.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                made = pool.submit(seal, work, target, memory=WORKER_MEMORY, threads=WORKER_THREADS).result()
            except BrokenProcessPool as error:
                raise StorageError("the process that reads the backup died", "free memory, then retry") from error
    return BackupReceipt(
        name=target.name,
        bytes=made.file.bytes,
        sha256=made.file.sha256,
        schema_version=made.manifest.schema_version,
        created_at=made.manifest.created_at,
        tables=made.manifest.tables,
        segments=len(made.manifest.segments),
    )


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise RequestError(
            404,
            "unknown_backup",
            f"backup: found no {name}, expected the name of a backup on this service",
            field="path.name",
            found=name,
            hint="make one with POST /api/v1/admin/backup",
        )
    return path
