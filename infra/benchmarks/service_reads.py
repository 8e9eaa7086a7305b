"""How many reads a second the service answers: a real process, several connections kept alive, client on the machine.

Usage: service_reads.py [--sessions N] [--layers L] [--experts E] [--connections C] [--seconds S] [--repeats R]
[--out FILE]. Sessions are synthetic; the profile is built once, before anything is measured. Every answer is checked:
its status, and for bodies their bytes. ``first_read_s`` is the read that builds the profile, ``another_budget_s`` the
mean of reads that must place, sign and record a manifest anew. ``while_written`` has a commit every 50 ms beside it,
after each of which the service must look whether the profile is still the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import zstandard
from build_profile import TOKENS, TOP_K, shape_of
from report import parser_of, report

from spark_schemas.histogram import HistogramUpload, LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

WORKLOAD = "code-heavy"
UPLOADED_AT_ONCE = 10
NEW_BUDGETS = 10
WRITE_EVERY_SECONDS = 0.05
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


class Connection:
    """One keep-alive connection that sends the same bytes again and again."""

    def __init__(self, base_url: str) -> None:
        address = urlsplit(base_url)
        self.host = f"{address.hostname}:{address.port}"
        self._socket = socket.create_connection((address.hostname, address.port), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    def request(self, head: bytes, body: bytes = b"") -> tuple[int, bytes, bytes]:
        """Send a request and return the answer's status, head and body."""
        self._socket.sendall(head + body)
        received = self._socket.recv(262144)
        while b"\r\n\r\n" not in received:
            received += self._more()
        head, _, content = received.partition(b"\r\n\r\n")
        found = _LENGTH.search(head + b"\r\n")
        chunks, missing = [content], int(found[1]) - len(content) if found else 0
        while missing > 0:
            chunks.append(self._more())
            missing -= len(chunks[-1])
        return int(head[9:12]), head, b"".join(chunks)

    def _more(self) -> bytes:
        received = self._socket.recv(262144)
        if not received:
            raise SystemExit("error: the service closed the connection")
        return received

    def get(self, path: str, etag: str | None = None) -> bytes:
        """The bytes of a GET."""
        condition = "" if etag is None else f"If-None-Match: {etag}\r\n"
        return f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\n{condition}\r\n".encode()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A service process of its own; give its address."""
    command = [sys.executable, "-m", "spark_service.cli", "run", "--open", "-p", "0", "--json"]
    command += ["--data-dir", str(folder)]
    # One client asks for more than a token may by default.
    environment = os.environ | {"SPARKMOE_SERVICE_READ_RATE": "0"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        if process.stdout is None:
            raise AssertionError("stdout is a pipe")
        try:
            yield json.loads(process.stdout.readline())["base_url"]
        finally:
            process.terminate()


def synthetic_session(shape: ModelShape, index: int) -> SessionHistogram:
    """A session whose counts could have happened: no expert more often than there are tokens."""
    session_hash = hashlib.sha256(f"{WORKLOAD} {index}".encode()).hexdigest()
    taste, rng = np.random.default_rng(0), np.random.default_rng(index + 1)
    layers, reuse = [], []
    for layer in shape.layers:
        most = (TOKENS / np.sqrt(1 + taste.permutation(layer.n_experts))).astype(np.int64)
        counts = rng.multivariate_hypergeometric(most, TOKENS * TOP_K)
        first = int(np.count_nonzero(counts))
        again = rng.multinomial(TOKENS * TOP_K - first, np.full(layer.n_experts, 1 / layer.n_experts))
        layers.append(LayerCounts(block=layer.block, tokens=TOKENS, counts=tuple(counts.tolist())))
        reuse.append(LayerReuse(block=layer.block, distances=(*again.tolist(), first)))
    return SessionHistogram(
        session_hash=session_hash,
        split=split_of(session_hash),
        workload=WORKLOAD,
        decode=PhaseHistogram(tokens=TOKENS, layers=tuple(layers)),
        reuse=tuple(reuse),
    )


def fill(connection: Connection, shape: ModelShape, sessions: int) -> None:
    """Upload synthetic sessions."""
    pack = zstandard.ZstdCompressor().compress
    for start in range(0, sessions, UPLOADED_AT_ONCE):
        numbers = range(start, min(start + UPLOADED_AT_ONCE, sessions))
        made = [synthetic_session(shape, index) for index in numbers]
        upload = HistogramUpload(agent_version="0", model=shape, sessions=tuple(made))
        body = pack(upload.model_dump_json().encode())
        head = (
            f"POST /api/v1/histograms HTTP/1.1\r\nHost: {connection.host}\r\nContent-Type: application/json\r\n"
            f"Content-Encoding: zstd\r\nIdempotency-Key: {start}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        status, _, answer = connection.request(head.encode(), body)
        if status != 202:
            raise SystemExit(f"error: upload answered {status}: {answer[:500]!r}")


def measure(base_url: str, path: str, etag: str | None, expected: bytes, connections: int, seconds: float) -> float:
    """Answers a second over several connections at once."""
    status = 200 if etag is None else 304
    opened = [Connection(base_url) for _ in range(connections)]
    start = threading.Barrier(connections + 1)

    def ask(connection: Connection) -> int:
        request = connection.get(path, etag)
        answered = 0
        start.wait()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            found, _, body = connection.request(request)
            if found != status or body != expected:
                raise SystemExit(f"error: found {found} with {len(body)} bytes, expected {status}")
            answered += 1
        return answered

    with ThreadPoolExecutor(connections) as threads:
        asking = [threads.submit(ask, connection) for connection in opened]
        start.wait()
        began = time.perf_counter()
        answered = sum(one.result() for one in asking)
        took = time.perf_counter() - began
    for connection in opened:
        connection.close()
    return answered / took


@contextmanager
def writing(base_url: str) -> Iterator[None]:
    """Something is written every ``WRITE_EVERY_SECONDS``: a deletion of a session that is not there, committed."""
    stop = threading.Event()

    def write() -> int:
        connection = Connection(base_url)
        number = 0
        while not stop.wait(WRITE_EVERY_SECONDS):
            session_hash = hashlib.sha256(f"absent {number}".encode()).hexdigest()
            head = f"DELETE /api/v1/sessions/{session_hash} HTTP/1.1\r\nHost: {connection.host}\r\n\r\n"
            status, _, body = connection.request(head.encode())
            if status != 200:
                raise SystemExit(f"error: a deletion answered {status}: {body[:500]!r}")
            number += 1
        connection.close()
        return number

    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(write)
        try:
            yield
        finally:
            stop.set()
        if not written.result():
            raise SystemExit("error: nothing was written meanwhile")


def rates(base_url: str, path: str, etag: str, body: bytes, options: argparse.Namespace) -> dict[str, list[int]]:
    """Repeated measurements of one resource."""
    connections, seconds = options.connections, options.seconds
    kinds = (("unchanged_304", etag, b""), ("bodies_200", None, body))
    found: dict[str, list[int]] = {}
    for _ in range(options.repeats):
        for name, tag, content in kinds:
            rate = measure(base_url, path, tag, content, connections, seconds)
            found.setdefault(f"{name}_per_s", []).append(round(rate))
    with writing(base_url):
        for name, tag, content in kinds:
            rate = measure(base_url, path, tag, content, connections, seconds)
            found[f"{name}_per_s_while_written"] = [round(rate)]
    return found


def main() -> None:
    """Measure and print (or write) the rates."""
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    shape = shape_of(options.layers, options.experts)
    budget = int(0.6 * shape.expert_bytes_total)
    manifest = f"/api/v1/manifests/{shape.fingerprint}/{WORKLOAD}?n_ctx=4096&vram_bytes="
    profile = f"/api/v1/profiles/{shape.fingerprint}/{WORKLOAD}"
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as base_url:
        connection = Connection(base_url)
        fill(connection, shape, options.sessions)
        result: dict[str, object] = {
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load_1_min": os.getloadavg()[0]},
            "note": "the client ran on the same cores, which other work shared at times; every repeat is listed",
            "layers": options.layers,
            "experts": options.experts,
            "sessions": options.sessions,
            "connections": options.connections,
            "seconds_each": options.seconds,
            "write_every_s": WRITE_EVERY_SECONDS,
        }
        began = time.perf_counter()
        connection.request(connection.get(f"{manifest}{budget}"))
        result["first_read_s"] = round(time.perf_counter() - began, 3)
        began = time.perf_counter()
        for step in range(1, NEW_BUDGETS + 1):
            connection.request(connection.get(f"{manifest}{budget + step}"))
        result["another_budget_s"] = round((time.perf_counter() - began) / NEW_BUDGETS, 4)
        connection.close()
        for name, path in (("manifest", f"{manifest}{budget}"), ("profile", profile)):
            # The one from before may have been idle for longer than the service allows.
            once = Connection(base_url)
            status, _, body = once.request(once.get(path))
            once.close()
            if status != 200:
                raise SystemExit(f"error: {path} answered {status}: {body[:500]!r}")
            etag = f'"{hashlib.sha256(body).hexdigest()}"'
            result[name] = {"body_bytes": len(body), **rates(base_url, path, etag, body, options)}
    report(result, options.out)


if __name__ == "__main__":
    main()
