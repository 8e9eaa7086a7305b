"""What really goes over the wire, byte for byte, and peers that keep to no protocol."""

from __future__ import annotations

import datetime as dt
import getpass
import gzip
import json
import socket
import threading
import time
from pathlib import Path

import pytest
import raw_peers
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from spark_agent import __version__
from spark_agent.config import Config, Consent, save_config
from spark_agent.env import Environment
from spark_agent.errors import ServiceUnreachableError
from spark_agent.http import ServiceClient, _retry_after_s
from spark_agent.paths import config_path, spool_path
from spark_agent.spool import Spool
from spark_agent.upload import RetryPolicy, flush
from spark_schemas.histogram import HistogramUpload

RECEIPT = b'{"accepted": 1, "duplicates": 0}'
ONCE = RetryPolicy(attempts=1)


def answer(body: bytes, *headers: str, status: str = "202 Accepted", content_type: str = "application/json") -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


@pytest.fixture
def waiting(make_model, make_session) -> str:
    """One session in the person's spool; returns its workload."""
    with Spool.open(spool_path()) as spool:
        model = make_model()
        assert spool.add(model, make_session(model, decode=3000))
    return "chat"


@pytest.fixture
def attempt(spool: Spool, make_model, make_session):
    """One flush of one session to a raw peer."""
    model = make_model()
    assert spool.add(model, make_session(model, decode=3000))

    def call(url: str):
        consent = Consent(True, dt.datetime.now(dt.UTC), url)
        with ServiceClient(url, timeout_s=60) as client:
            return flush(spool, client, consent, environment=Environment(), retry=ONCE, ignore_waits=True)

    return call


def test_the_bytes_shown_are_the_bytes_on_the_wire_and_nothing_says_who_sent_them(agent_cli_in_home, waiting) -> None:
    taken: list[bytes] = []

    def talk(connection: socket.socket) -> None:
        taken.append(raw_peers.read_request(connection))
        # A cookie would let the service tell machines apart.
        connection.sendall(answer(RECEIPT, "Set-Cookie: id=42; Max-Age=31536000; Path=/"))

    with raw_peers.raw_peer(talk) as url:
        save_config(config_path(), Config(service_url=url).with_consent(True, url))
        shown = agent_cli_in_home("upload", "show")
        assert taken == [], "showing sends nothing"
        agent_cli_in_home("upload", "flush")
    (request,) = taken
    head, _, body = request.partition(b"\r\n\r\n")
    assert zstandard.ZstdDecompressor().decompress(body) + b"\n" == shown
    lines = head.decode("ascii").split("\r\n")
    assert lines[0] == "POST /api/v1/histograms HTTP/1.1"
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
    assert headers["user-agent"] == f"spark-agent/{__version__}"
    assert set(headers) == {
        "host",
        "accept",
        "accept-encoding",
        "connection",
        "user-agent",
        "content-type",
        "content-encoding",
        "content-length",
        "idempotency-key",
    }
    said = head + b"\n" + shown
    for secret in (socket.gethostname(), getpass.getuser(), str(Path.home()), str(spool_path().parent)):
        # A short user name may stand anywhere by chance.
        assert len(secret) < 6 or secret.encode() not in said
    upload = HistogramUpload.model_validate_json(shown)
    assert set(json.loads(shown)) == {"schema_version", "agent_version", "model", "sessions"}
    assert all(set(json.loads(one.model_dump_json())) >= {"session_hash", "workload"} for one in upload.sessions)


@pytest.fixture
def agent_cli_in_home(capfdbinary):
    """Run ``spark-agent`` in this process and return what it printed, as bytes."""
    from spark_agent import cli
    from spark_agent.output import run_app

    def run(*arguments: str) -> bytes:
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_app(cli.app, list(arguments))
        shown = capfdbinary.readouterr()
        assert not ended.value.code, shown.err
        return shown.out

    return run


def test_no_cookie_comes_back() -> None:
    heads: list[bytes] = []

    def talk(connection: socket.socket) -> None:
        heads.append(raw_peers.read_request(connection))
        connection.sendall(answer(b'{"profiles": []}', "Set-Cookie: id=42", "Connection: close", status="200 OK"))

    with raw_peers.raw_peer(talk) as url, ServiceClient(url) as client:
        client.profiles()
        client.profiles()
    assert len(heads) == 2
    assert all(b"cookie" not in head.lower() for head in heads)


LIES = {
    "nothing": b"",
    "not http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "html with 200": answer(b"<html>Welcome</html>", status="200 OK", content_type="text/html"),
    "html with 202": answer(b"<html>Welcome</html>", content_type="text/html"),
    "receipt with 200": answer(RECEIPT, status="200 OK"),
    "fewer": answer(b'{"accepted": 0, "duplicates": 0}'),
    "more": answer(b'{"accepted": 5, "duplicates": 0}'),
    "negative": answer(b'{"accepted": 2, "duplicates": -1}'),
    "fractions": answer(b'{"accepted": 0.5, "duplicates": 0.5}'),
    "strings": answer(b'{"accepted": "1", "duplicates": "0"}'),
    "another shape": answer(b'{"ok": true}'),
    "a list": answer(b"[1, 0]"),
    "null": answer(b"null"),
    "not json": answer(b"accepted"),
    "deep": answer(b"[" * 200_000),
    "not utf-8": answer(b'{"accepted": 1, "duplicates": 0, "\xff": 0}'),
    "redirect": answer(b"", "Location: http://127.0.0.1:9/", status="307 Temporary Redirect"),
    "redirect nowhere": answer(b"", "Location: http://[:", status="302 Found"),
    "empty": answer(b""),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "longer than said": b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\nContent-Length: 3\r\n\r\n"
    + RECEIPT,
    "shorter than said": b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n"
    + RECEIPT,
    "two lengths": answer(RECEIPT, "Content-Length: 5"),
    "broken chunks": b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "gzip bomb": answer(gzip.compress(b" " * 50_000_000), "Content-Encoding: gzip"),
    "endless head": b"HTTP/1.1 202 Accepted\r\n" + b"X-A: " + b"a" * 1_000_000,
    "server error": answer(b"oops", status="500 Internal Server Error", content_type="text/plain"),
    "unknown status": answer(b"oops", status="799 Whatever"),
    "switching": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "retry at no date": answer(b"", "Retry-After: Sun, 99 Nov 99999 99:99:99 +99999999", status="503 Busy"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_service_that_lies_costs_an_error_and_nothing_else(spool, attempt, lie) -> None:
    def talk(connection: socket.socket) -> None:
        raw_peers.read_request(connection)
        connection.sendall(LIES[lie])

    with raw_peers.raw_peer(talk) as url:
        report = attempt(url)
    assert report.last_error
    assert (report.uploaded, report.duplicates, report.rejected, report.pending) == (0, 0, 0, 1)
    assert spool.stats().last_error == report.last_error
    with raw_peers.raw_peer(
        lambda connection: (raw_peers.read_request(connection), connection.sendall(answer(RECEIPT)))[1]
    ) as url:
        assert attempt(url).uploaded == 1, "the same row arrives at an honest one"


@pytest.mark.parametrize("part", ["head", "body", "request"])
def test_a_service_that_drips_is_given_up(spool, attempt, monkeypatch, part) -> None:
    """Each byte comes in time, the answer never does."""
    monkeypatch.setattr("spark_agent.http.MAX_EXCHANGE_S", 0.5)
    ending = threading.Event()

    def talk(connection: socket.socket) -> None:
        if part != "request":
            raw_peers.read_request(connection)
        if part == "body":
            connection.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\n\r\n")
        while not ending.wait(0.02):
            if part == "request":
                connection.recv(1)
            else:
                connection.sendall(b" " if part == "body" else b"x")

    with raw_peers.raw_peer(talk) as url:
        report = attempt(url)
        ending.set()
    assert "did not finish its answer in 0.5 s" in report.last_error
    assert report.pending == 1


def test_a_call_can_be_given_up_from_another_thread() -> None:
    asked, ending = threading.Event(), threading.Event()

    def talk(connection: socket.socket) -> None:
        raw_peers.read_request(connection)
        asked.set()
        ending.wait(120)

    with raw_peers.raw_peer(talk) as url, ServiceClient(url) as client:

        def give_up() -> None:
            assert asked.wait(120)
            client.abort()

        thread = threading.Thread(target=give_up)
        thread.start()
        with pytest.raises(ServiceUnreachableError, match="given up"):
            client.profiles()
        thread.join()
        ending.set()
        with pytest.raises(ServiceUnreachableError, match="given up"):
            client.profiles()


@given(value=st.text() | st.from_regex(r"[A-Z][a-z]{2}, \d{1,4} [A-Z][a-z]{2} \d{1,6} \d+:\d+:\d+ [+-]\d{1,12}"))
def test_any_retry_after_is_a_number_or_nothing(value: str) -> None:
    found = _retry_after_s(value, value)
    assert found is None or 0 <= found < 10**12


def test_a_date_to_come_back_at_is_by_the_services_clock() -> None:
    assert _retry_after_s("Sun, 06 Nov 1994 08:51:37 GMT", "Sun, 06 Nov 1994 08:49:37 GMT") == 120
    assert _retry_after_s("Sun, 06 Nov 2094 08:51:37 GMT", "Sun, 06 Nov 2094 08:49:37 GMT") == 120
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 600))
    assert 480 <= (_retry_after_s(later, "not a date") or 0) <= 600
