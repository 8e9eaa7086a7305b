"""What requests may hold in memory: bodies, prompts in line, answers that nobody reads."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from generated import events_of

from spark_agent.server.generation import BusyError, FellBehindError, Generation, Piece
from spark_agent.server.sessions import LiveSessions
from spark_agent.server.worker import Worker
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.models import demo_model_path
from spark_runtime.sampling import Sampling

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def agent(serve: Any) -> Iterator[Any]:
    with serve(n_seq_max=2) as agent:
        yield agent


def begun(agent: Any, size: int) -> socket.socket:
    """A request of which only the first ``size`` bytes come."""
    connection = socket.create_connection(agent.address, timeout=DEADLINE_S)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size + 1}\r\n\r\n"
    connection.sendall(head.encode() + b" " * size)
    return connection


def test_bodies_that_never_end_hold_no_more_than_their_bound(agent: Any, until: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("spark_agent.server.body_budget.MAX_BODIES_BYTES", 200_000)
    with begun(agent, 90_000), begun(agent, 90_000):
        with begun(agent, 60_000) as third:
            answer = b""
            while b"}" not in answer:
                answer += third.recv(65536)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in answer.lower()
            assert b'"code":"busy"' in answer
        assert agent.answer(), "small ones are answered meanwhile"
    large = "x " * 75_000
    until(lambda: agent.client.post("/v1/completions", json={"prompt": large}).status_code == 400)  # too long, not busy


def generation(tokens: list[int], **members: Any) -> Generation:
    return Generation("a", tokens, Sampling(), 4, (), **members)


def test_prompts_in_line_are_bounded_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_agent.server.worker.MAX_WAITING_TOKENS", 100)
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1, n_outputs_max=1)) as engine:
        worker = Worker(engine, LiveSessions(engine.shape, lambda *_: None, lambda: 0.0), pytest.fail)

        async def ask() -> None:
            alone = generation([5] * 120)
            worker.submit(alone)  # longer than the bound, but nobody waits before it
            with pytest.raises(BusyError):
                worker.submit(generation([5]))
            worker.start()
            assert [event async for event in events_of(alone)]
            for _ in range(3):  # what has left the line does not count, however it left
                several = [generation([5] * 30) for _ in range(3)]
                several[1].cancelled.set()
                for one in several:
                    worker.submit(one)
                assert [event async for event in events_of(several[0])]
                assert [event async for event in events_of(several[2])]

        try:
            asyncio.run(ask())
        finally:
            worker.stop()
        assert worker._tokens_waiting == 0


@pytest.mark.parametrize(("top_logprobs", "events"), [(None, 83_886), (0, 37_282), (20, 3_078)])
def test_what_waits_for_a_client_is_bounded_in_bytes(top_logprobs: int | None, events: int) -> None:
    async def fill() -> None:
        waiting = generation([5], top_logprobs=top_logprobs)
        for _ in range(events):
            waiting.events.tell(Piece("x"))
        waiting.check_read()
        waiting.events.tell(Piece("x"))
        with pytest.raises(FellBehindError):
            waiting.check_read()

    asyncio.run(fill())


def test_an_answer_that_nobody_reads_ends(agent: Any, until: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("spark_agent.server.generation.MAX_UNREAD_BYTES", -1)
    agent.reports.clear()
    body = json.dumps({"prompt": "x", "max_tokens": 400, "stream": True}).encode()
    with socket.create_connection(agent.address, timeout=DEADLINE_S) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        until(lambda: agent.reports)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"not_read" in answer
    assert agent.reports[0].outcome == "cancelled"
    monkeypatch.undo()
    assert agent.answer()
