from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator

import pytest

from spark_agent.addresses import base_url_of
from spark_agent.errors import SparkError
from spark_agent.running_agent import AgentInfo, ask_agent

HEALTH = b'{"status": "ok", "fingerprint": "mf1-x"}'
MODELS = b'{"data": [{"id": "nano", "meta": {"n_ctx": 4096}}, {"id": "gpt"}, 5]}'


@pytest.fixture
def answering() -> Iterator[Callable[..., str]]:
    """Start a server that gives these answers by path; gives its address."""
    servers = []

    def start(answers: dict[str, tuple[int, bytes]], key: str | None = None) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, content = answers.get(self.path, (404, b"{}"))
                if key is not None and self.path != "/health" and self.headers["Authorization"] != f"Bearer {key}":
                    status, content = 401, b"{}"
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return base_url_of("127.0.0.1", server.server_address[1])

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_an_agent_says(answering):
    url = answering({"/health": (200, HEALTH), "/v1/models": (200, MODELS)})
    assert ask_agent(url, None) == AgentInfo(url, ("nano", "gpt"), "mf1-x", 4096)


def test_a_token(answering):
    url = answering({"/health": (200, HEALTH), "/v1/models": (200, MODELS)}, key="right")
    assert ask_agent(url, "right").models == ("nano", "gpt")
    for key, word in ((None, "wants its token"), ("wrong", "refuses")):
        with pytest.raises(SparkError, match=word) as refused:
            ask_agent(url, key)
        assert "SPARKMOE_API_KEY" in refused.value.hint


@pytest.mark.parametrize(
    ("health", "models", "word"),
    [
        ((404, b"{}"), (200, MODELS), "no spark-agent"),
        ((200, b"<html>"), (200, MODELS), "no spark-agent"),
        ((200, b"[" * 100_000), (200, MODELS), "no spark-agent"),
        ((200, b"[]"), (200, MODELS), "no spark-agent"),
        ((200, b'{"status": "ok"}'), (200, MODELS), "no spark-agent"),
        ((200, b" " * 2**21), (200, MODELS), "no spark-agent"),
        ((200, HEALTH), (500, b"{}"), "gave 500"),
        ((200, HEALTH), (200, b'{"data": 5}'), "serves no model"),
        ((200, HEALTH), (200, b'{"data": [{"id": 7}]}'), "serves no model"),
    ],
)
def test_something_else_answers(answering, health, models, word):
    with pytest.raises(SparkError, match=word):
        ask_agent(answering({"/health": health, "/v1/models": models}), None)


def test_nothing_answers():
    with pytest.raises(SparkError, match=r"no agent answers.*refused") as refused:
        ask_agent("http://127.0.0.1:9", None)
    assert "spark-agent run" in refused.value.hint


def test_an_address_of_the_sixth_version():
    assert base_url_of("::1", 5) == "http://[::1]:5"
