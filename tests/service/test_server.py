"""The real process: what it announces, how it stops, what a kill leaves."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from spark_schemas.split import split_of
from spark_service.db.store import Store
from spark_service.errors import AddressError
from spark_service.server import bind

Start = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``spark-service run`` on a free port; give the process and its announcement."""
    running: list[subprocess.Popen[str]] = []

    def run(*options: str, **environment: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        command = [sys.executable, "-m", "spark_service.cli", "run", "-p", "0", "--data-dir", str(tmp_path / "data")]
        with (tmp_path / "stderr").open("a") as stderr:
            process = subprocess.Popen(
                [*command, "--json", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **environment},
            )
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (tmp_path / "stderr").read_text()
        return process, json.loads(line)

    yield run
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def upload(base_url: str, body: bytes, key: str = "a") -> httpx2.Response:
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    return httpx2.post(f"{base_url}/api/v1/histograms", content=body, headers=headers, timeout=240)


def test_a_kill_after_the_answer_loses_nothing(start: Start, make: Any, tmp_path: Path) -> None:
    shape = make.shape()
    sessions = make.sessions(shape, 3, 2)
    process, started = start("--open")
    assert upload(started["base_url"], make.body(shape, sessions)).status_code == 202
    process.kill()
    process.wait()
    store = Store.open(tmp_path / "data" / "service.duckdb", threads=1)
    keys = store.part_keys(shape.fingerprint, "decode")
    assert {key.content_id for key in keys} == {session.content_id(shape.fingerprint) for session in sessions}
    assert len(store.parts([key.content_id for key in keys], "decode")) == 5
    assert sum(split_of(key.session_hash) == "held_out" for key in keys) == 2
    assert store.add_upload(make.upload(shape, sessions), "b", "b").duplicates == 5
    store.close()


def is_refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=240).close()
    except OSError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(start: Start, make: Any, until: Any, tmp_path: Path, number: signal.Signals) -> None:
    """What is under way when it comes is stored and answered."""
    process, started = start("--open")
    assert set(started) == {"base_url", "data_dir", "schema_version", "version"}
    assert started["data_dir"] == str(tmp_path / "data")
    shape = make.shape()
    body = make.body(shape, make.sessions(shape, 3, 0))
    address = ("127.0.0.1", int(started["base_url"].rpartition(":")[2]))
    head = "POST /api/v1/histograms HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nIdempotency-Key: a\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(address, timeout=240) as under_way:
        under_way.sendall(head.encode() + body[:100])
        # Whoever came later was answered, so this half is there.
        assert httpx2.get(f"{started['base_url']}/healthz", timeout=240).status_code == 200
        process.send_signal(number)
        until(lambda: is_refused(address))
        under_way.sendall(body[100:])
        answer = b"".join(iter(lambda: under_way.recv(65536), b""))
    assert process.wait(120) == 0
    assert answer.startswith(b"HTTP/1.1 202 ")
    assert process.stdout is not None
    assert process.stdout.read() == ""
    log = (tmp_path / "stderr").read_text()
    assert "Traceback" not in log
    # Checkpointed: everything is in the one file.
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["service.duckdb"]


def test_a_second_owner_and_a_taken_port_are_refused(start: Start, tmp_path: Path) -> None:
    process, started = start(SPARKMOE_SERVICE_TOKEN="s3cret-token")
    url = started["base_url"]
    assert httpx2.get(f"{url}/api/v1/profiles", timeout=240).status_code == 401
    assert httpx2.get(f"{url}/readyz", timeout=240).status_code == 401
    assert httpx2.get(f"{url}/healthz", timeout=240).status_code == 200
    command = [sys.executable, "-m", "spark_service.cli", "run", "--data-dir"]
    second = subprocess.run(
        [*command, str(tmp_path / "data"), "-p", "0"], capture_output=True, text=True, check=False, timeout=240
    )
    assert (second.returncode, second.stdout) == (1, "")
    assert f"service.duckdb is open in process {process.pid}" in second.stderr
    assert f"hint: stop process {process.pid}" in second.stderr
    port = url.rsplit(":", 1)[1]
    third = subprocess.run(
        [*command, str(tmp_path / "other"), "--open", "-p", port],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert (third.returncode, third.stdout) == (1, "")
    assert f"error: cannot listen on 127.0.0.1 port {port}: Address already in use" in third.stderr
    assert "hint: " in third.stderr
    assert "Traceback" not in second.stderr + third.stderr


def test_binding_before_anything_else() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=240):
            pass
        with pytest.raises(AddressError, match=f"port {port}: Address already in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["a..b", "999.1.1.1.invalid"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(AddressError, match="cannot listen"):
        bind(host, 0)


def test_a_kill_amid_uploads_loses_none_that_was_answered(start: Start, make: Any, tmp_path: Path) -> None:
    shape = make.shape([(4, 1, 1)])
    sessions = [make.session(shape, make.hash(number), decode=10) for number in range(40)]
    process, started = start("--open")
    answered: list[int] = []
    enough = threading.Event()

    def send(numbers: range) -> None:
        for number in numbers:
            try:
                answer = upload(started["base_url"], make.body(shape, [sessions[number]]), str(number))
            except httpx2.TransportError:
                return
            assert answer.json() == {"accepted": 1, "duplicates": 0}
            answered.append(number)
            if len(answered) >= 12:
                enough.set()

    senders = [threading.Thread(target=send, args=[range(first, 40, 4)]) for first in range(4)]
    for sender in senders:
        sender.start()
    assert enough.wait(120)
    process.kill()
    process.wait()
    for sender in senders:
        sender.join(120)
    store = Store.open(tmp_path / "data" / "service.duckdb", threads=1)
    stored = [key.content_id for key in store.part_keys(shape.fingerprint, "decode")]
    ids = [session.content_id(shape.fingerprint) for session in sessions]
    assert {ids[number] for number in answered} <= set(stored)
    assert len(stored) == len(set(stored)) == len(store.parts(stored, "decode"))
    # Sent again under their keys, all are stored exactly once, with the receipts of the first time.
    for number, session in enumerate(sessions):
        body = make.body(shape, [session])
        receipt = store.add_upload(make.upload(shape, [session]), str(number), hashlib.sha256(body).hexdigest())
        assert receipt.accepted == 1
    assert len(store.part_keys(shape.fingerprint, "decode")) == 40
    store.close()
