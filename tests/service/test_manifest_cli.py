"""The command line against what answers as it should, and what does not; the whole way is in ``tests/e2e``."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from spark_service import cli

MODEL = "mf1-" + "0" * 31 + "1"
REVISION = "a" * 64


class Peer:
    """Answers every request alike and remembers them."""

    def __init__(self) -> None:
        self.status, self.body, self.media_type = 200, b"{}", "application/json"
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        peer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                headers = {name.lower(): value for name, value in self.headers.items()}
                peer.requests.append((self.command, self.path, headers, body))
                self.send_response(peer.status)
                self.send_header("Content-Length", str(len(peer.body)))
                self.send_header("Content-Type", peer.media_type)
                self.end_headers()
                self.wfile.write(peer.body)

            do_GET = do_POST = do_DELETE = _serve  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture
def manifest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peer: Peer) -> Any:
    """Run ``spark-service manifest``; give the exit code and both streams."""

    def run(*args: str, service: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["spark-service", "manifest", *args, "--service", service or peer.url])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        streams = capsys.readouterr()
        return int(str(caught.value.code)), streams.out, streams.err

    return run


def test_history(manifest: Any, peer: Peer) -> None:
    one = {"revision": REVISION, "sha256": "b" * 64, "body_bytes": 7, "first_served_day": "2026-01-02"}
    peer.body = json.dumps({"manifests": [one], "pinned": REVISION}).encode()
    budget = ["--vram-bytes", "4000", "--n-ctx", "100", "--reserve-bytes", "5"]
    code, out, err = manifest("history", MODEL, "code", *budget, "--json")
    assert (code, json.loads(out), err) == (0, json.loads(peer.body), "")
    (method, path, headers, _) = peer.requests[0]
    assert method == "GET"
    assert path == (f"/api/v1/manifests/{MODEL}/code/history?phase=decode&vram_bytes=4000&n_ctx=100&reserve_bytes=5")
    assert "authorization" not in headers
    assert manifest("history", MODEL, "code", *budget)[1] == f"2026-01-02  {REVISION}  7 bytes  pinned\n"


def test_pin_and_unpin(manifest: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKMOE_SERVICE_TOKEN", "s3cret")
    pin = {"fingerprint": MODEL, "workload": "code", "phase": "decode", "revision": REVISION}
    peer.body = json.dumps(pin).encode()
    assert manifest("pin", MODEL, "../x", REVISION, "--phase", "prefill")[0] == 0
    (method, path, headers, body) = peer.requests[0]
    assert (method, json.loads(body)) == ("POST", {"revision": REVISION})
    assert path == f"/api/v1/admin/manifests/{MODEL}/..%2Fx/pin?phase=prefill"
    assert (headers["authorization"], headers["content-type"]) == ("Bearer s3cret", "application/json")
    code, out, _ = manifest("unpin", MODEL, "code", "--json")
    assert (code, json.loads(out)) == (0, pin)
    assert peer.requests[1][:2] == ("DELETE", f"/api/v1/admin/manifests/{MODEL}/code/pin?phase=decode")


def test_a_problem_is_told_with_its_hint(manifest: Any, peer: Peer) -> None:
    peer.status, peer.media_type = 404, "application/problem+json"
    peer.body = b'{"title": "Not Found", "status": 404, "detail": "no such revision", "code": "x", "hint": "list them"}'
    code, out, err = manifest("unpin", MODEL, "code")
    assert (code, out) == (1, "")
    assert err == f"error: {peer.url} answered 404: no such revision\nhint: list them\n"


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (200, b"\xff"), (500, b"x"), (404, b"{}"), (401, b"")])
def test_what_is_no_service(manifest: Any, peer: Peer, status: int, body: bytes) -> None:
    peer.status, peer.body = status, body
    code, out, err = manifest("unpin", MODEL, "code")
    assert (code, out) == (1, "")
    assert f"found status {status} without" in err
    assert "hint: correct --service" in err


@pytest.mark.parametrize(
    ("service", "expected", "word"),
    [
        ("http://127.0.0.1:9", 1, "no answer"),
        ("team:8710", 2, "expected http://HOST"),
        ("ftp://team", 2, "expected http://HOST"),
        ("http://team:99999", 2, "--service"),
        ("http://", 2, "expected http://HOST"),
    ],
)
def test_addresses(manifest: Any, service: str, expected: int, word: str) -> None:
    code, out, err = manifest("unpin", MODEL, "code", service=service)
    assert (code, out) == (expected, "")
    assert word in err


def test_a_token_does_not_travel_openly(manifest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKMOE_SERVICE_TOKEN", "s3cret")
    code, _, err = manifest("unpin", MODEL, "code", service="http://team.example:8710")
    assert code == 3
    assert "unencrypted" in err
    assert "s3cret" not in err
