"""Hostile requests against the real app: each refused with a reason, none a 500, nothing stored."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx2
import pytest
import uvicorn
import zstandard
from starlette.testclient import TestClient

from spark_schemas.api import PROBLEM_MEDIA_TYPE, Problem
from spark_service.app import create_app
from spark_service.db.store import Store

Post = Callable[..., httpx2.Response]
UPLOADS = "/api/v1/histograms"
BIG = 64 * 2**20


def rows(store: Store) -> dict[str, int]:
    with store._database.cursor() as cursor:
        names = [
            row[0] for row in cursor.execute("SELECT table_name FROM duckdb_tables() WHERE NOT internal").fetchall()
        ]
        return {name: cursor.execute(f'SELECT count(*) FROM "{name}"').fetchall()[0][0] for name in names}


@pytest.fixture
def untouched(store: Store) -> Iterator[None]:
    """Nothing is stored by the test."""
    before = rows(store)
    yield
    assert rows(store) == before


def refused(answer: httpx2.Response, status: int, code: str) -> Problem:
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE, answer.text
    found = Problem.model_validate_json(answer.content)
    assert (answer.status_code, found.code) == (status, code), answer.text
    assert found.detail
    assert found.hint
    # A hostile value is named, never given back whole.
    assert len(answer.content) < 2000
    return found


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(data)


def zstd_without_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19, write_content_size=False).compress(data)


def lying_zstd(claimed_bytes: int) -> bytes:
    """A frame whose header claims a size that its content does not have."""
    frame = bytearray(zstd(b"x" * 300))
    # Single segment, eight bytes of content size.
    return bytes(frame[:4]) + bytes([0b1110_0000]) + claimed_bytes.to_bytes(8, "little") + bytes(frame[7:])


BOMBS = {
    "zstd": ("zstd", lambda: zstd(b" " * BIG), 413),
    "zstd-unknown-size": ("zstd", lambda: zstd_without_size(b" " * BIG), 413),
    "zstd-huge-claim": ("zstd", lambda: lying_zstd(2**62), 400),
    "zstd-nested": ("zstd", lambda: zstd(zstd(b" " * BIG)), 400),
    "zstd-many-frames": ("zstd", lambda: zstd(b" " * 1000) * 5000, 400),
    "zstd-empty-frames": ("zstd", lambda: zstd(b"") * 100_000, 400),
    "zstd-skippable-frames": ("zstd", lambda: (b"\x50\x2a\x4d\x18" + b"\0\0\0\0") * 100_000, 400),
    "zstd-window": (
        "zstd",
        lambda: zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
        ).compress(b" " * BIG),
        400,
    ),
    "gzip": ("gzip", lambda: gzip.compress(b" " * BIG), 413),
    "gzip-nested": ("gzip", lambda: gzip.compress(gzip.compress(b" " * BIG)), 400),
    "gzip-many-members": ("gzip", lambda: gzip.compress(b" " * 1000) * 5000, 400),
    "gzip-empty-members": ("gzip", lambda: gzip.compress(b"") * 100_000, 400),
    "gzip-tail": ("gzip", lambda: gzip.compress(b"{}") + b"tail", 400),
    "gzip-cut": ("gzip", lambda: gzip.compress(b" " * 1000)[:-5], 400),
    "raw-deflate": ("gzip", lambda: zlib.compress(b"{}"), 400),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.usefixtures("untouched")
def test_bombs(post: Post, name: str) -> None:
    encoding, make, status = BOMBS[name]
    body = make()
    tracemalloc.start()
    answer = post(body, Content_Encoding=encoding)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # These are whole streams, but what they hold is no JSON.
    whole = name in ("zstd-nested", "gzip-nested", "zstd-empty-frames", "zstd-skippable-frames")
    code = {413: "body_too_large"}.get(status, "invalid_json" if whole else "bad_encoding")
    refused(answer, status, code)
    assert peak < BIG


@pytest.mark.parametrize(
    "encoding", ["gzip, gzip", "zstd,gzip", "gzip;q=1", "x-gzip", "deflate", "br", "aws-chunked", "\x00"]
)
@pytest.mark.usefixtures("untouched")
def test_encodings(post: Post, encoding: str) -> None:
    refused(post(b"{}", Content_Encoding=encoding), 415, "unsupported_encoding")


def put(path: str, value: str) -> Callable[[str], str]:
    """Replace the first value of a field in an upload's text."""

    def change(text: str) -> str:
        before, _, after = text.partition(f'"{path}":')
        assert after, path
        _, end = json.JSONDecoder().raw_decode(after)
        return f'{before}"{path}":{value}{after[end:]}'

    return change


HUGE = "1" + "0" * 400
VALUES = [
    "9007199254740993",
    "18446744073709551616",
    HUGE,
    "-1",
    "-0.0",
    "1.0",
    "1.5",
    "1e2",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    '"300"',
    "true",
    "null",
    "[300]",
    "{}",
    "0x12c",
    "+300",
    "0300",
    "300,",
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:20])
@pytest.mark.parametrize("field", ["tokens", "block", "n_experts", "top_k", "core_bytes", "schema_version"])
@pytest.mark.usefixtures("untouched")
def test_numbers(post: Post, make: Any, field: str, value: str) -> None:
    shape = make.shape()
    text = make.body(shape, make.sessions(shape, 1, 0)).decode()
    answer = post(put(field, value)(text).encode())
    assert answer.status_code in (400, 422), answer.text
    refused(answer, answer.status_code, {400: "invalid_json", 422: "invalid_histogram"}[answer.status_code])


NAMES = [
    "..",
    ".",
    "../../etc/passwd",
    "a/b",
    "a\\b",
    "%2e%2e",
    "",
    "A",
    "-a",
    "a-",
    "a\n",
    "a\x00",
    "a\u0000b",
    "ä",
    "\u202ea",
    "g" * 64,
    "a" * 1_000_000,
    "'; DROP TABLE parts; --",
    "' OR 1=1",
    "code' UNION SELECT 1",
    "${jndi:ldap://x}",
    "{{7*7}}",
    "<script>",
    "\ud800",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:20]))
@pytest.mark.usefixtures("untouched")
def test_names(client: TestClient, post: Post, make: Any, name: str) -> None:
    shape = make.shape()
    text = make.body(shape, make.sessions(shape, 1, 0)).decode()
    for field in ("workload", "session_hash", "fingerprint", "sibling", "split"):
        answer = post(put(field, json.dumps(name))(text).encode())
        assert answer.status_code in (400, 422)
        refused(answer, answer.status_code, "invalid_histogram" if answer.status_code == 422 else "invalid_json")
    if "\ud800" in name or len(name) > 1000:
        return
    quoted = "".join(f"%{byte:02x}" for byte in name.encode())
    for path in (
        f"/api/v1/profiles/{shape.fingerprint}/{quoted}",
        f"/api/v1/manifests/{shape.fingerprint}/{quoted}?vram_bytes=1&n_ctx=1",
        f"/api/v1/profiles/{quoted}/code",
        f"/api/v1/sessions/{quoted}",
        f"/api/v1/admin/backups/{quoted}",
    ):
        for method in ("GET", "DELETE", "POST", "PUT", "TRACE"):
            answer = client.request(method, path)
            assert answer.status_code in (404, 405, 422), (method, path, answer.text)
            assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
            assert len(answer.content) < 2000


BODIES: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 400, "invalid_json"),
    "nothing": (b"null", 422, "invalid_histogram"),
    "number": (b"1", 422, "invalid_histogram"),
    "list": (b"[]", 422, "invalid_histogram"),
    "object": (b"{}", 422, "invalid_histogram"),
    "deep-list": (b"[" * 100_000, 400, "invalid_json"),
    "deep-object": (b'{"a":' * 100_000, 400, "invalid_json"),
    "deep-closed": (b"[" * 100_000 + b"]" * 100_000, 400, "invalid_json"),
    "deep-inside": (b'{"sessions":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "invalid_json"),
    "many-faults": (b'{"sessions":[' + b"{}," * 200_000 + b"{}]}", 422, "invalid_histogram"),
    "many-keys": (json.dumps({f"k{n}": 0 for n in range(100_000)}).encode(), 422, "invalid_histogram"),
    "long-key": (b'{"' + b"k" * 1_000_000 + b'":1}', 422, "invalid_histogram"),
    "huge-number": (b"1" * 1_000_000, 400, "invalid_json"),
    "utf-16": ('{"a":1}'.encode("utf-16"), 400, "invalid_json"),
    "byte-order-mark": (b"\xef\xbb\xbf{}", 400, "invalid_json"),
    "not-utf-8": (b'{"agent_version":"\xff\xfe"}', 400, "invalid_json"),
    "overlong": (b'{"agent_version":"\xc0\xaf"}', 400, "invalid_json"),
    "nul": (b"\0", 400, "invalid_json"),
    "nul-after": (b"{}\0", 400, "invalid_json"),
    "two-documents": (b"{}{}", 400, "invalid_json"),
    "comment": (b"/* */{}", 400, "invalid_json"),
    "multipart": (b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--", 400, "invalid_json"),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.usefixtures("untouched")
def test_bodies(post: Post, name: str) -> None:
    body, status, code = BODIES[name]
    refused(post(body), status, code)


STRINGS = ["\\ud800", "\\udc00\\ud800", "\\u0000", "\\ud83d\\ude00", "a\\u0000b"]


@pytest.mark.parametrize("text", STRINGS)
@pytest.mark.usefixtures("untouched")
def test_escapes(post: Post, make: Any, text: str) -> None:
    """In a name they are refused; lone surrogates are in no text at all."""
    shape = make.shape()
    body = make.body(shape, make.sessions(shape, 1, 0)).decode()
    for field in ("workload", "session_hash"):
        assert post(put(field, f'"{text}"')(body).encode()).status_code in (400, 422)
    if text.startswith(("\\ud800", "\\udc00")):
        for field in ("agent_version", "architecture", "name"):
            refused(post(put(field, f'"{text}"')(body).encode()), 400, "invalid_json")


def test_duplicate_keys(store: Store, post: Post, make: Any) -> None:
    """Readers of JSON differ about which one counts, so that there must be one."""
    shape = make.shape()
    text = make.body(shape, make.sessions(shape, 1, 0)).decode()
    before = rows(store)
    for twice in (
        text.replace('"workload":"code"', '"workload":"chat","workload":"code"', 1),
        text.replace('"workload":"code"', '"workload":"code","workload":"code"', 1),
        text.replace('"workload":"code"', '"workload":"chat","workl\\u006fad":"code"', 1),
        text.replace("{", '{"sessions":[],', 1),
        text.replace('{"up":', '{"up":"f16","up":', 1),
    ):
        assert twice != text
        found = refused(post(twice.encode()), 400, "duplicate_key")
        assert found.found in ("workload", "sessions", "up")
    assert rows(store) == before


@pytest.mark.usefixtures("untouched")
def test_shapes(post: Post, make: Any) -> None:
    shape = make.shape()
    fields = json.loads(make.body(shape, make.sessions(shape, 1, 0)))
    session = fields["sessions"][0]
    decode, reuse = session["decode"], session["reuse"]

    def attempt(**changes: Any) -> None:
        body = json.dumps({**fields, "sessions": [{**session, **changes}]}).encode()
        found = refused(post(body), 422, "invalid_histogram")
        assert str(found.field).startswith("sessions[0]")

    layers = decode["layers"]
    attempt(decode={**decode, "layers": layers[:-1]})
    attempt(decode={**decode, "layers": layers[::-1]})
    attempt(decode={**decode, "layers": [*layers, layers[-1]]})
    attempt(decode={**decode, "layers": []})
    attempt(decode={**decode, "layers": [{**layers[0], "counts": layers[0]["counts"] + [0]}, *layers[1:]]})
    attempt(decode={**decode, "layers": [{**layers[0], "counts": layers[0]["counts"][:-1]}, *layers[1:]]})
    attempt(decode={**decode, "layers": [{**layers[0], "block": 99}, *layers[1:]]})
    attempt(decode=None)
    attempt(reuse=None)
    attempt(reuse=reuse[:-1])
    attempt(reuse=reuse[::-1])
    attempt(decode=None, reuse=None)
    attempt(split={"calibration": "held_out", "held_out": "calibration"}[session["split"]])
    attempt(received_day="1970-01-01")
    attempt(timestamp=0)


def test_a_clients_clock_does_not_matter(store: Store, post: Post, make: Any) -> None:
    shape = make.shape()
    days = []
    for number, date in enumerate(
        ("Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT", "yesterday", "-1", "0")
    ):
        body = make.body(shape, [make.session(shape, make.hash(number))])
        answer = post(body, f"key-{number}", Date=date, If_Modified_Since=date, X_Request_Start=date)
        assert answer.json() == {"accepted": 1, "duplicates": 0}
    with store._database.cursor() as cursor:
        days = cursor.execute("SELECT DISTINCT received_day = current_date FROM parts").fetchall()
    assert days == [(True,)]


def test_forged_and_replayed_keys(store: Store, post: Post, make: Any) -> None:
    shape = make.shape()
    body, other = (make.body(shape, make.sessions(shape, count, 0)) for count in (1, 2))
    assert post(body, "a").status_code == 202
    before = rows(store)
    for _ in range(3):
        assert post(body, "a").json() == {"accepted": 1, "duplicates": 0}
        refused(post(other, "a"), 422, "idempotency_key_reused")
    for key in ("", " ", "a b", "a\tb", "x" * 256, b"\xff", "ä".encode()):
        refused(post(body, key), 400, "idempotency_key_invalid")
    # Not the same key: names are compared byte by byte.
    assert post(body, "A").json() == {"accepted": 0, "duplicates": 1}
    assert post(body, "' OR '1'='1").status_code == 400
    assert post(body, "'--").json() == {"accepted": 0, "duplicates": 1}
    after = rows(store)
    assert {name: after[name] - before[name] for name in after if name in ("parts", "histograms", "uploads")} == {
        "parts": 0,
        "histograms": 0,
        "uploads": 2,
    }


def test_one_key_at_the_same_time_is_used_once(store: Store, make: Any) -> None:
    """Eight senders, one key, two bodies: one is stored, its senders get one receipt, the others are refused."""
    shape = make.shape()
    bodies = [make.body(shape, [make.session(shape, make.hash(index))]) for index in range(2)]
    with serving(store) as url, ThreadPoolExecutor(8) as pool:

        def send(index: int) -> httpx2.Response:
            headers = {"Idempotency-Key": "same", "Content-Type": "application/json"}
            return httpx2.post(f"{url}{UPLOADS}", content=bodies[index % 2], headers=headers, timeout=240)

        answers = list(pool.map(send, range(8)))
    won = {index % 2 for index, answer in enumerate(answers) if answer.status_code == 202}
    assert len(won) == 1
    for index, answer in enumerate(answers):
        if index % 2 in won:
            assert answer.json() == {"accepted": 1, "duplicates": 0}
        else:
            refused(answer, 422, "idempotency_key_reused")
    assert rows(store)["parts"] == rows(store)["uploads"] == 1


@pytest.mark.usefixtures("untouched")
def test_parameters(client: TestClient, make: Any) -> None:
    path = f"/api/v1/manifests/{make.fingerprint}/code"
    many = "&".join(f"p{number}=1" for number in range(5000))
    for query in (
        many,
        "vram_bytes=1&vram_bytes=2&n_ctx=1",
        "vram_bytes=1e999&n_ctx=1",
        f"vram_bytes={HUGE}&n_ctx=1",
        "vram_bytes=" + "9" * 5000 + "&n_ctx=1",
        "vram_bytes=9007199254740993&n_ctx=1",
        "vram_bytes=NaN&n_ctx=1",
        "vram_bytes=-1&n_ctx=1",
        "vram_bytes=%00&n_ctx=1",
        "vram_bytes[]=1&n_ctx=1",
        "vram_bytes=1&n_ctx=1&phase=decode%27--",
        "vram_bytes=1&n_ctx=1&sibling=../../x",
        "vram_bytes=%ff%fe&n_ctx=1",
        "%00=%00",
        "a" * 30_000,
    ):
        answer = client.get(f"{path}?{query}")
        refused(answer, 422, "invalid_parameter")


@contextmanager
def serving(store: Store) -> Iterator[str]:
    """The app behind the real HTTP parser, as it is served."""
    config = uvicorn.Config(
        create_app(store, open_access=True), host="127.0.0.1", port=0, log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(120)


def raw(url: str, request: bytes) -> bytes:
    """Send bytes as they are; read what comes until the service closes or falls silent."""
    host, port = url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=30) as connection, suppress(OSError):
        # The service may hang up before everything is sent; what it said by then counts.
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        while chunk := connection.recv(65536):
            received += chunk
    return received


HEAD = b"POST /api/v1/histograms HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
KEY = b"Idempotency-Key: k\r\n"
RAW: dict[str, bytes] = {
    "two lengths": HEAD + KEY + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
    "length and chunks": HEAD + KEY + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative length": HEAD + KEY + b"Content-Length: -1\r\n\r\n{}",
    "huge length": HEAD + KEY + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}",
    "length far beyond the limit": HEAD + KEY + b"Content-Length: 999999999999\r\n\r\n{}",
    "two keys": HEAD + KEY + b"Idempotency-Key: l\r\nContent-Length: 2\r\n\r\n{}",
    "chunks without an end": HEAD + KEY + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "a bad chunk": HEAD + KEY + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
    "a cut body": HEAD + KEY + b"Content-Length: 100\r\n\r\n{}",
    "a folded header": HEAD + b"Idempotency-Key: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "a bare line feed": HEAD + b"Idempotency-Key: a\nX: b\r\nContent-Length: 2\r\n\r\n{}",
    "a nul in a header": HEAD + b"Idempotency-Key: a\0b\r\nContent-Length: 2\r\n\r\n{}",
    "headers without an end": HEAD + b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(200)),
    "no request": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "an absolute path": b"GET http://other/api/v1/admin/backup HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "dots in a path": b"GET /healthz/../api/v1/../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
}


def test_raw_requests(store: Store, make: Any) -> None:
    """All over one service, which answers a good request after every one of them."""
    before = rows(store)
    shape = make.shape()
    with serving(store) as url:
        for name, request in RAW.items():
            answer = raw(url, request)
            status = answer.split(b" ", 2)[1:2]
            # Cut bodies end without an answer: there is nobody to hear it.
            assert status in ([], [b"400"], [b"404"], [b"405"], [b"413"], [b"422"]), (name, answer)
            assert httpx2.get(f"{url}/readyz", timeout=240).status_code == 200, name
        assert rows(store) == before
        headers = {"Idempotency-Key": "k", "Content-Type": "application/json"}
        body = make.body(shape, make.sessions(shape, 1, 0))
        assert httpx2.post(f"{url}{UPLOADS}", content=body, headers=headers, timeout=240).status_code == 202


def test_slow_bodies_hold_up_nobody(store: Store, make: Any) -> None:
    """While many connections have sent half an upload, others are served."""
    shape = make.shape()
    body = make.body(shape, make.sessions(shape, 1, 0))
    head = HEAD + b"Idempotency-Key: slow\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(store) as url:
        host, port = url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port)), timeout=240) for _ in range(100)]
        for connection in slow:
            connection.sendall(head + body[:50])
        headers = {"Idempotency-Key": "quick", "Content-Type": "application/json"}
        answer = httpx2.post(f"{url}{UPLOADS}", content=body, headers=headers, timeout=240)
        assert answer.json() == {"accepted": 1, "duplicates": 0}
        for connection in slow:
            connection.close()
    assert rows(store)["uploads"] == 1
