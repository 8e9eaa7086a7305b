from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spark_service.admin_client import AdminClient
from spark_service.errors import ServiceCallError
from spark_service.tokens import TokenList

TOKEN = "s3cret-token"
Peer = Callable[..., AbstractContextManager[tuple[str, list[str | None]]]]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Peer:
    """A server that answers every request the same, and notes the tokens that it was sent."""
    monkeypatch.setenv("SPARKMOE_SERVICE_TOKEN", TOKEN)

    @contextmanager
    def serve(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[str | None]]]:
        seen: list[str | None] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append(self.headers["Authorization"])
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}", seen
            finally:
                server.shutdown()
                thread.join()

    return serve


def test_an_answer(peer: Peer) -> None:
    with peer(200, b'{"tokens": []}') as (url, seen), AdminClient(f"{url}/") as client:
        assert client.get("/tokens", TokenList) == TokenList(tokens=[])
    assert seen == [f"Bearer {TOKEN}"]


@pytest.mark.parametrize(
    ("status", "body", "headers", "words"),
    [
        (200, b"<html>", {}, "status 200 without a valid TokenList"),
        (200, b"", {}, "status 200 without a valid TokenList"),
        (200, b'{"tokens": [{"id": "x"}]}', {}, "status 200 without a valid TokenList"),
        (500, b"<html>", {"Content_Type": "text/html"}, "status 500 without problem details"),
        (500, b"{", {"Content_Type": "application/problem+json"}, "unreadable problem details"),
        (
            418,
            b'{"title": "a", "status": 418, "code": "b", "detail": "%s"}' % (b"long " * 1000),
            {"Content_Type": "application/problem+json; charset=utf-8"},
            "answered 418: long long",
        ),
    ],
)
def test_answers_that_are_none(peer: Peer, status: int, body: bytes, headers: dict[str, str], words: str) -> None:
    with (
        peer(status, body, **headers) as (url, _),
        AdminClient(url) as client,
        pytest.raises(ServiceCallError) as caught,
    ):
        client.get("/tokens", TokenList)
    assert words in caught.value.message
    assert len(caught.value.message) < 1000
    assert TOKEN not in caught.value.message


def test_the_token_follows_no_redirect(peer: Peer) -> None:
    with (
        peer(200, b'{"tokens": []}') as (elsewhere, seen),
        peer(307, b"", Location=elsewhere) as (url, _),
        AdminClient(url) as client,
        pytest.raises(ServiceCallError, match="status 307"),
    ):
        client.get("/tokens", TokenList)
    assert seen == []


def test_an_endless_answer_is_left(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_service.admin_client.MAX_ANSWER_BYTES", 10_000)
    with (
        peer(200, b" " * 20_000) as (url, _),
        AdminClient(url) as client,
        pytest.raises(ServiceCallError, match="more than 10000 bytes"),
    ):
        client.get("/tokens", TokenList)


def test_nobody_there(peer: Peer) -> None:
    with peer(200, b"") as (url, _):
        pass
    with AdminClient(url) as client, pytest.raises(ServiceCallError, match="no answer from") as caught:
        client.get("/tokens", TokenList)
    assert "leave out --service" in (caught.value.hint or "")
