"""The client of ``backup --service`` against services that refuse, lie and hang up."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from spark_service.backup_client import fetch_backup
from spark_service.errors import BackupError, RefusedError

CONTENT = b"a backup" * 10_000
RECEIPT = {"name": "spark-backup.tar", "sha256": hashlib.sha256(CONTENT).hexdigest(), "tables": {}}
Answers = dict[str, tuple[int, bytes]]


@pytest.fixture
def service() -> Iterator[tuple[str, Answers, list[tuple[str, str, str | None]]]]:
    """A server: its address, its answers by method, and the requests that it got."""
    answers: Answers = {
        "POST": (201, json.dumps(RECEIPT).encode()),
        "GET": (200, CONTENT),
        "DELETE": (200, b"{}"),
    }
    seen: list[tuple[str, str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            seen.append((self.command, self.path, self.headers["Authorization"]))
            status, content = answers[self.command]
            self.send_response(status)
            self.send_header("Content-Length", str(len(CONTENT) if self.command == "GET" else len(content)))
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815  the names that http.server calls

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", answers, seen
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("keep", [False, True])
def test_a_backup_is_made_fetched_and_removed(service: Any, tmp_path: Path, keep: bool) -> None:
    url, _, seen = service
    target = tmp_path / "a.tar"
    assert fetch_backup(f"{url}/", target, token="s3cret", keep=keep) == RECEIPT
    assert target.read_bytes() == CONTENT
    assert target.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
    expected = [
        ("POST", "/api/v1/admin/backup", "Bearer s3cret"),
        ("GET", "/api/v1/admin/backups/spark-backup.tar", "Bearer s3cret"),
        ("DELETE", "/api/v1/admin/backups/spark-backup.tar", "Bearer s3cret"),
    ]
    assert seen == expected[: 2 if keep else 3]


def test_nothing_is_asked_for_when_the_target_is_taken(service: Any, tmp_path: Path) -> None:
    url, _, seen = service
    (tmp_path / "a.tar").write_text("mine")
    with pytest.raises(RefusedError):
        fetch_backup(url, tmp_path / "a.tar", token=None)
    assert seen == []
    fetch_backup(url, tmp_path / "a.tar", token=None, force=True)
    assert seen[0][2] is None


PROBLEM = json.dumps({"detail": "a backup is being made", "hint": "wait until it is done"}).encode()


@pytest.mark.parametrize(
    ("method", "status", "content", "says"),
    [
        ("POST", 409, PROBLEM, "answered 409: a backup is being made"),
        ("POST", 401, b"<html>", "answered 401: Unauthorized"),
        ("POST", 500, b'{"detail": 1}', "answered 500: 1"),
        ("POST", 307, b"", "answered 307"),
        ("POST", 201, b"[]", "no receipt of a backup"),
        ("POST", 201, b"{}", "no receipt of a backup"),
        ("POST", 201, b'{"name": 1, "sha256": 2}', "no receipt of a backup"),
        ("POST", 201, b"\xff", "no receipt of a backup"),
        ("GET", 404, PROBLEM, "answered 404"),
        ("GET", 200, CONTENT[:-1] + b"x", "found SHA-256"),
        ("GET", 200, CONTENT[:-1], "found SHA-256"),
    ],
)
def test_what_goes_wrong_is_named_and_leaves_nothing(
    service: Any, tmp_path: Path, method: str, status: int, content: bytes, says: str
) -> None:
    url, answers, seen = service
    answers[method] = (status, content)
    with pytest.raises(BackupError, match=says):
        fetch_backup(url, tmp_path / "a.tar", token="s3cret")
    assert list(tmp_path.iterdir()) == []
    # What could not be fetched stays where it is, and no other host hears of the token.
    assert [entry[0] for entry in seen] == ["POST", "GET"][: 1 if method == "POST" else 2]
