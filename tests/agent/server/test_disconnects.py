"""Clients that leave at every stage, in every dialect: the turn becomes free, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spark_runtime.conversation import Conversation

LONG = "count " * 300
DIALECTS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text, n: {"messages": [{"role": "user", "content": text}], "max_tokens": n},
    "/v1/completions": lambda text, n: {"prompt": text, "max_tokens": n},
    "/v1/responses": lambda text, n: {"input": text, "max_output_tokens": n},
    "/v1/messages": lambda text, n: {"messages": [{"role": "user", "content": text}], "max_tokens": n},
}
every_dialect = pytest.mark.parametrize("path", DIALECTS)
both_ways = pytest.mark.parametrize("stream", [False, True])
WITNESS: dict[str, Any] = {"prompt": [5], "temperature": 1.0, "seed": 7, "max_tokens": 24}
"""One token, so that nothing of it can be reused: how much is changes the sizes of batches, and with them the bits."""


@pytest.fixture(scope="module")
def pair(serve: Any) -> Iterator[Any]:
    """A server with two sequences and short batches, and what a witness is answered when it is alone."""
    with serve(n_seq_max=2) as agent:
        agent.alone = witness(agent)
        yield agent


def witness(agent: Any) -> str:
    reply = agent.client.post("/v1/completions", json=WITNESS)
    assert reply.status_code == 200
    text: str = reply.json()["choices"][0]["text"]
    return text


def request_of(path: str, text: str, n: int, *, stream: bool) -> bytes:
    body = json.dumps({**DIALECTS[path](text, n), "stream": stream, "temperature": 0}).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def connected(agent: Any, data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(agent.address, timeout=120) as connection:
        connection.sendall(data)
        yield connection


def leave(connection: socket.socket, *, reset: bool) -> None:
    """Close it, politely or as a machine that is switched off does."""
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Gate:
    """Holds the computing thread inside a step until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def hold(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(120)


@pytest.fixture
def quiet(pair: Any, until: Any, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Afterwards nothing runs, waits, or was logged, and no task is left."""
    until(lambda: pair.worker.load.running == pair.worker.waiting == 0)
    pair.worker.call(lambda: None).result(120)
    before = pair.tasks()
    pair.reports.clear()
    yield pair
    until(lambda: pair.worker.load.running == pair.worker.waiting == 0)
    until(lambda: pair.tasks() <= before)
    assert pair.client.get("/health").json()["waiting"] == 0
    assert pair.complaints == []
    assert caplog.text == ""


@contextlib.contextmanager
def witnessed(agent: Any) -> Iterator[None]:
    """Another request meanwhile, which is answered as if it were alone."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(witness, agent)
        yield
        assert answer.result(120) == agent.alone
        deadline = time.monotonic() + 120
        while agent.worker.load.running or agent.worker.waiting:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # Reports follow answers, on the thread that computes.
        agent.worker.call(lambda: None).result(120)


def left_in_step(agent: Any, until: Any, gate: Gate, data: bytes, *, reset: bool) -> None:
    """Send a request, leave while the computing thread is held in one of its steps, and let that go on."""
    before = {id(job) for job in agent.worker._scheduler.running}
    try:
        with connected(agent, data) as connection:
            assert gate.reached.wait(120)
            ours = [job for job in agent.worker._scheduler.running if id(job) not in before]
            leave(connection, reset=reset)
            until(lambda: any(job.generation.cancelled.is_set() for job in ours))
    finally:
        gate.opened.set()


@every_dialect
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("reset", [False, True])
def test_before_the_body_is_complete(quiet: Any, path: str, part: float, reset: bool) -> None:
    data = request_of(path, "How are you today?", 8, stream=True)
    head, body = data.split(b"\r\n\r\n")
    with witnessed(quiet), connected(quiet, head + b"\r\n\r\n" + body[: int(part * len(body))]) as connection:
        leave(connection, reset=reset)
    assert [report.prompt_tokens for report in quiet.reports] == [1], "the witness alone"


@every_dialect
@both_ways
def test_in_line(quiet: Any, until: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool) -> None:
    gate, feed = Gate(), Conversation.feed

    def held(*arguments: Any, **options: Any) -> None:
        gate.hold()
        feed(*arguments, **options)

    monkeypatch.setattr(Conversation, "feed", held)
    ahead = [request_of(path, f"ahead {at}", 4, stream=False) for at in range(2)]
    with contextlib.ExitStack() as stack:
        stack.callback(gate.opened.set)
        for data in ahead:
            stack.enter_context(connected(quiet, data))
        assert gate.reached.wait(120)
        until(lambda: quiet.worker.waiting + len(quiet.worker._scheduler.running) == 2)
        with connected(quiet, request_of(path, "never wanted", 4, stream=stream)) as connection:
            until(lambda: quiet.worker.waiting + len(quiet.worker._scheduler.running) == 3)
            leave(connection, reset=False)
            until(lambda: any(job.generation.cancelled.is_set() for job in quiet.worker._inbox))
        gate.opened.set()
        until(lambda: len(quiet.reports) == 3)
    cancelled = [report for report in quiet.reports if report.outcome == "cancelled"]
    assert [(report.prompt_s, report.completion_tokens) for report in cancelled] == [(0.0, 0)]


@every_dialect
@both_ways
@pytest.mark.parametrize("reset", [False, True])
def test_during_its_prompt(
    quiet: Any, until: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool, reset: bool
) -> None:
    gate, feed = Gate(), Conversation.feed
    monkeypatch.setattr(quiet.engine, "n_batch", 64)

    def held(conversation: Conversation, tokens: Any, phase: Any, **options: Any) -> None:
        if len(tokens) == 64:
            gate.hold()
        feed(conversation, tokens, phase, **options)

    monkeypatch.setattr(Conversation, "feed", held)
    with witnessed(quiet):
        left_in_step(
            quiet, until, gate, request_of(path, f"{path} {stream} {reset} {LONG}", 9, stream=stream), reset=reset
        )
    (gone,) = [report for report in quiet.reports if report.outcome == "cancelled"]
    assert gone.completion_tokens == 0
    assert gone.first_token_s is None


@every_dialect
@both_ways
@pytest.mark.parametrize("at", ["between tokens", "the last token"])
def test_while_it_is_answered(
    quiet: Any, until: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool, at: str
) -> None:
    gate, piece, seen = Gate(), quiet.engine.piece, []
    limit = 6

    def held(token: int) -> bytes:
        seen.append(token)
        if len(seen) == (3 if at == "between tokens" else limit):
            gate.hold()
        return piece(token)

    monkeypatch.setattr(quiet.engine, "piece", held)
    left_in_step(quiet, until, gate, request_of(path, "How are you today?", limit, stream=stream), reset=False)
    until(lambda: len(quiet.reports) == 1)
    assert quiet.reports[0].completion_tokens <= (3 if at == "between tokens" else limit)
    assert quiet.reports[0].outcome in {"cancelled", *(() if at == "between tokens" else ("length",))}
    monkeypatch.undo()
    assert witness(quiet) == quiet.alone


@both_ways
@every_dialect
def test_a_client_that_does_not_read_and_leaves(quiet: Any, until: Any, path: str, stream: bool) -> None:
    """The answer is ready, and lies in the socket."""
    with witnessed(quiet), connected(quiet, request_of(path, "How are you today?", 5, stream=stream)) as connection:
        until(lambda: len(quiet.reports) >= 1)
        leave(connection, reset=True)


@both_ways
def test_a_client_that_leaves_while_a_tool_call_streams(
    quiet: Any, until: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """With its grammar's process, which serves the next."""
    gate, piece, seen = Gate(), quiet.engine.piece, []

    def held(token: int) -> bytes:
        seen.append(token)
        if len(seen) == 20:
            gate.hold()
        return piece(token)

    monkeypatch.setattr(quiet.engine, "piece", held)
    parameters = {"type": "object", "properties": {"text": {"type": "string", "minLength": 90}}, "required": ["text"]}
    tool = {"type": "function", "function": {"name": "note", "parameters": parameters}}
    body = {**DIALECTS["/v1/chat/completions"]("Note it.", 90), "tools": [tool], "tool_choice": "required"}
    raw = json.dumps({**body, "stream": stream, "temperature": 0}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    left_in_step(quiet, until, gate, head.encode() + raw, reset=False)
    until(lambda: len(quiet.reports) == 1)
    assert quiet.reports[0].outcome == "cancelled"
    assert not quiet.engine._grammars._lent
