"""Asking a running service for a backup, and fetching it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spark_schemas.api import API_PREFIX
from spark_service.backup import put_in_place, require_free, working_folder
from spark_service.errors import BackupError

__all__ = ["fetch_backup"]

CHUNK_BYTES = 2**20
MAX_ANSWER_BYTES = 2**24


def fetch_backup(
    url: str, target: Path, *, token: str | None, force: bool = False, keep: bool = False
) -> dict[str, Any]:
    """Let the service at ``url`` make a backup, write it to ``target`` and return the service's receipt.

    The service's own copy is removed afterwards unless ``keep``. Raises :class:`RefusedError` where something is at
    ``target`` already, unless ``force``; :class:`BackupError` for all that goes wrong on the way.
    """
    require_free(target, force=force)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with _request(url, "POST", "/admin/backup", headers) as answer:
        receipt = _json(url, answer)
    path = f"/admin/backups/{receipt['name']}"
    with working_folder(target.parent) as folder:
        partial = folder / "backup.partial"
        partial.touch(mode=0o600)
        digest = hashlib.sha256()
        with _request(url, "GET", path, headers) as answer, partial.open("wb") as file:
            for chunk in _chunks(url, answer):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != receipt["sha256"]:
            raise BackupError(
                f"backup from {url}: found SHA-256 {digest.hexdigest()}, expected {receipt['sha256']}", "try again"
            )
        put_in_place(partial, target, force=force)
    if not keep:
        with _request(url, "DELETE", path, headers):
            pass
    return receipt


@contextmanager
def _request(url: str, method: str, path: str, headers: dict[str, str]) -> Iterator[HTTPResponse]:
    # Redirects are not followed: the token is for this host alone.
    with closing(_connection(url)) as connection:
        try:
            connection.request(method, urlsplit(url).path.rstrip("/") + API_PREFIX + path, headers=headers)
            answer = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise _unreachable(url, error) from error
        if answer.status not in (200, 201):
            raise _refusal(url, answer)
        yield answer


def _chunks(url: str, answer: HTTPResponse) -> Iterator[bytes]:
    try:
        while chunk := answer.read(CHUNK_BYTES):
            yield chunk
    except (OSError, HTTPException) as error:
        raise _unreachable(url, error) from error


def _unreachable(url: str, error: Exception) -> BackupError:
    return BackupError(
        f"service {url}: {error or type(error).__name__}, expected an answer",
        "check that it runs and that the address is right",
    )


def _connection(url: str) -> HTTPConnection:
    expected = "expected http://HOST:PORT or https://HOST"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BackupError(f"service {url!r}: {error}, {expected}", "correct --service") from error
    if parts.scheme not in ("http", "https") or not host:
        raise BackupError(f"service: found {url!r}, {expected}", "correct --service")
    return HTTPSConnection(host, port) if parts.scheme == "https" else HTTPConnection(host, port)


def _refusal(url: str, answer: HTTPResponse) -> BackupError:
    try:
        problem = json.loads(answer.read(MAX_ANSWER_BYTES))
        detail, hint = str(problem["detail"]), str(problem.get("hint") or "see the service's log")
    except (ValueError, KeyError, TypeError, AttributeError):
        detail, hint = answer.reason, "check that this is the address of a spark-service"
    return BackupError(f"service {url} answered {answer.status}: {detail}", hint)


def _json(url: str, answer: HTTPResponse) -> dict[str, Any]:
    try:
        receipt = json.loads(answer.read(MAX_ANSWER_BYTES))
        if not all(isinstance(receipt[name], str) for name in ("name", "sha256")):
            raise TypeError
    except (ValueError, KeyError, TypeError) as error:
        raise BackupError(
            f"service {url}: found an answer that is no receipt of a backup, expected one",
            "check that this is the address of a spark-service",
        ) from error
    return dict(receipt)
