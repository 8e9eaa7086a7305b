"""What the server does with requests that are wrong, foreign, or given up."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spark_agent.dialogue.messages import Message
from spark_agent.server import body, worker
from spark_agent.server.body import MAX_BODY_BYTES, MAX_VALUES
from spark_agent.server.requests import MAX_MESSAGES
from spark_agent.server.serve import bind
from spark_agent.server.sessions import lineage_of
from spark_runtime.conversation import Conversation
from spark_runtime.errors import DecodeError
from spark_runtime.models import demo_model_path

FOREVER = "How are you today?"
CHAT = "/v1/chat/completions"


def error_of(reply) -> dict[str, str]:
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return error


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_tokens_are_sent_without_waiting_for_acknowledgements(host):
    delays: list[int] = []

    async def ask() -> None:
        def accepted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted_socket = writer.get_extra_info("socket")
            delays.append(accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind(host, 0) as listener:
            async with await asyncio.start_server(accepted, sock=listener):
                reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
                await reader.read()
                writer.close()
                await writer.wait_closed()

    asyncio.run(ask())
    assert [delay != 0 for delay in delays] == [True]


@pytest.mark.parametrize("unit", [b"{},", b"[],", b"0,", b'{"a":{}},', b'{"role":"user","content":"x"},'])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
def test_very_many_small_values_are_refused_before_they_are_read(agent, path, unit):
    """A gigabyte of objects comes of what is allowed in bytes."""
    number = MAX_VALUES // sum(map(unit.count, b",[[{{")) + 1
    content = b'{"messages":[' + unit * number + unit[:-1] + b"]}"
    reply = agent.client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 413, reply.text
    assert "commas and brackets" in reply.json()["error"]["message"]
    assert agent.answer()


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, "messages"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/responses", "input"),
    ],
)
def test_a_long_body_is_read_beside_the_loop_and_its_messages_are_bounded(agent, monkeypatch, path, field):
    here: list[bool] = []
    parse = body.parse_json

    def noting(raw: bytes) -> object:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            here.append(False)
        else:
            here.append(True)
        return parse(raw)

    monkeypatch.setattr(body, "parse_json", noting)
    message = {"role": "user", "content": "x"}
    for number, status in ((1, 200), (MAX_MESSAGES + 1, 400)):
        reply = agent.client.post(path, json={field: [message] * number, "max_tokens": 1, "model": None})
        assert reply.status_code == status, reply.text
    assert here == [True, False]
    assert f"at most {MAX_MESSAGES}" in reply.json()["error"]["message"]
    assert reply.json()["error"].get("param", field) == field


def test_health(agent):
    assert agent.client.get("/health").json() == {
        "status": "ok",
        "fingerprint": agent.engine.shape.fingerprint,
        "waiting": 0,
    }


def test_models(agent):
    body = agent.client.get("/v1/models").json()
    assert body["object"] == "list"
    (entry,) = body["data"]
    assert (entry["id"], entry["object"], entry["owned_by"]) == ("nano", "model", "spark")
    assert agent.client.get("/v1/models/nano").json() == entry


@pytest.mark.parametrize("name", ["gpt-4o", "org/model", "%2e%2e"])
def test_a_model_that_is_not_served(agent, name):
    reply = agent.client.get(f"/v1/models/{name}")
    assert reply.status_code == 404
    error = error_of(reply)
    assert error["code"] == "model_not_found"
    assert "nano" in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe\x00", b'"' + b"[" * 5000, b'{"messages": [{"role": "user"}]}']
)
def test_a_body_that_is_no_request(agent, body):
    reply = agent.client.post(CHAT, content=body)
    assert reply.status_code == 400
    assert error_of(reply)["code"] == "invalid_request"


def test_an_unsupported_parameter_is_named(agent):
    reply = agent.chat(functions=[{"name": "x"}])
    assert reply.status_code == 400
    error = error_of(reply)
    assert error["param"] == "functions"
    assert "not supported" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
    ],
)
def test_wrong_addresses(agent, method, path, status, code):
    reply = agent.client.request(method, path)
    assert reply.status_code == status
    error = error_of(reply)
    assert error["code"] == code
    assert path in error["message"]


def test_a_huge_body_is_refused_before_it_is_sent(agent):
    with contextlib.closing(http.client.HTTPConnection(*agent.address, timeout=120)) as connection:
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Length", str(MAX_BODY_BYTES + 1))
        connection.endheaders()
        reply = connection.getresponse()
        assert reply.status == 413
        assert json.loads(reply.read())["error"]["code"] == "too_large"


def test_a_body_of_unknown_length_is_bounded_too(agent, monkeypatch):
    monkeypatch.setattr("spark_agent.server.body.MAX_BODY_BYTES", 1000)
    assert agent.client.post(CHAT, content=iter([b"x" * 600, b"x" * 600])).status_code == 413
    assert agent.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1"}, 200),
        ({"Host": "LocalHost:11711"}, 200),
        ({"Host": "[::1]:11711"}, 200),
        ({"Host": "127.1.2.3"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "127.0.0.1@evil.example"}, 403),
        ({"Host": "192.168.0.7:11711"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_only_this_machine_is_answered(agent, headers, status):
    reply = agent.client.get("/health", headers=headers)
    assert reply.status_code == status
    if status == 403:
        assert error_of(reply)["code"] == "not_local"


@pytest.fixture
def slow(agent, monkeypatch):
    """The shared server, but its engine takes 30 ms more for each token: no answer is over before its test is."""
    return slowed(agent, monkeypatch)


def slowed(agent, monkeypatch):
    piece = agent.engine.piece

    def slowly(token: int) -> bytes:
        time.sleep(0.03)
        return piece(token)

    monkeypatch.setattr(agent.engine, "piece", slowly)
    agent.never_ends(monkeypatch)
    return agent


def decoded(agent, text: str) -> int:
    return agent.sessions.counts_of(lineage_of([Message("user", text)])).tokens["decode"]


def post(agent, text: str, **members: object) -> socket.socket:
    """Send a request and return the connection without reading."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **members}
    raw = json.dumps(body).encode()
    connection = socket.create_connection(agent.address, timeout=120)
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_generation(slow, until, stream):
    text = f"{FOREVER} "
    before = decoded(slow, text)
    with post(slow, text, stream=stream) as connection:
        if stream:
            assert connection.recv(15).startswith(b"HTTP/1.1 200")
        until(lambda: decoded(slow, text) > before)
    assert slow.answer("What is a hash table?", max_tokens=2)
    after = decoded(slow, text)
    assert after - before < 900, "it went on to the end of the context"
    assert slow.answer("What is a hash table?", max_tokens=2)
    assert decoded(slow, text) == after


def test_a_client_that_leaves_the_line_is_never_computed(slow, until):
    with post(slow, FOREVER, stream=True) as first:
        assert first.recv(15)
        with post(slow, "never wanted"):
            until(lambda: slow.worker.waiting == 1)
            assert slow.client.get("/health").json()["waiting"] == 1
        # Left again: the line is shorter by it, before its turn comes.
        until(lambda: slow.worker.waiting == 0)
        with post(slow, "wanted", max_tokens=1) as last:
            until(lambda: slow.worker.waiting == 1)
            first.close()
            assert last.recv(15).startswith(b"HTTP/1.1 200")
    assert slow.sessions.counts_of(lineage_of([Message("user", "never wanted")])).tokens_total == 0


def test_a_client_that_leaves_while_sending_is_no_error(agent, caplog):
    with socket.create_connection(agent.address) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
    assert agent.answer(max_tokens=1)
    assert caplog.text == ""


def test_a_full_line_asks_to_come_back(slow, until, monkeypatch):
    monkeypatch.setattr(worker, "MAX_WAITING", 1)
    with ThreadPoolExecutor(1) as pool, post(slow, FOREVER, stream=True) as first:
        assert first.recv(15)
        waiting = pool.submit(slow.answer, "What is a hash table?", max_tokens=1)
        until(lambda: slow.worker.waiting == 1)
        refused = slow.chat("one too many")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused)["type"] == "server_error"
        first.close()
        assert waiting.result(120)


def test_a_template_that_refuses(serve, tmp_path: Path):
    data = demo_model_path().read_bytes()
    start = data.index(b"{%- for message in messages")
    end = data.index(b"{%- endif -%}", start) + len(b"{%- endif -%}")
    template = b"{{ raise_exception('roles must alternate') }}"
    path = tmp_path / "model.gguf"
    path.write_bytes(data[:start] + template + b" " * (end - start - len(template)) + data[end:])
    with serve(model=path) as agent:
        reply = agent.chat()
        assert reply.status_code == 400
        error = error_of(reply)
        assert (error["code"], error["param"]) == ("chat_template", "messages")
        assert "roles must alternate" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "code"), [(DecodeError("llama.cpp failed"), "engine"), (ZeroDivisionError("secret"), "internal")]
)
def test_a_failing_engine_answers_500_and_the_next_request(agent, until, monkeypatch, caplog, fault, code, stream):
    def fail(*_: object, **__: object) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(Conversation, "feed", fail)
        reply = agent.chat(stream=stream)
    assert reply.status_code == 500
    error = error_of(reply)
    assert (error["type"], error["code"]) == ("server_error", code)
    assert "secret" not in error["message"]
    assert (reply.headers.get("connection") == "close") == (code == "internal"), "the server closes it after a bug"
    # The log is written after the answer is sent.
    until(lambda: ("ZeroDivisionError" in caplog.text) == (code == "internal"))
    assert agent.answer()
    assert ("ZeroDivisionError" in caplog.text) == (code == "internal")


@pytest.mark.parametrize(
    ("fault", "code"), [(DecodeError("llama.cpp failed"), "engine"), (ZeroDivisionError("secret"), "internal")]
)
def test_a_failure_in_a_stream_is_its_last_event(agent, monkeypatch, caplog, fault, code):
    piece, seen, began = agent.engine.piece, [], threading.Event()

    def fail_later(token: int) -> bytes:
        seen.append(token)
        if len(seen) > 3:
            # What fails before anything was sent is an error's status.
            assert began.wait(120)
            raise fault
        return piece(token)

    chunks = []
    # Greedy, because a drawn answer may end before it fails.
    body = {"messages": [{"role": "user", "content": FOREVER}], "stream": True, "temperature": 0}
    with monkeypatch.context() as patch:
        patch.setattr(agent.engine, "piece", fail_later)
        with agent.client.stream("POST", CHAT, json=body) as reply, contextlib.suppress(Exception):
            for chunk in reply.iter_raw():
                chunks.append(chunk)
                began.set()
    body = b"".join(chunks)
    assert b"[DONE]" not in body
    last = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))
    assert last["error"]["code"] == code
    assert agent.answer()


def test_a_full_spool_does_not_stop_the_server(serve, until):
    full = threading.Event()
    full.set()
    with serve(refuse=lambda: OSError("no space left") if full.is_set() else None) as agent:
        agent.sessions.max_open = 1
        for number in range(4):
            assert agent.answer(f"question {number}", max_tokens=2)
        until(lambda: bool(agent.complaints))
        assert agent.kept == []
        full.clear()
    assert len(agent.kept) == 4
    assert all(counts.tokens["decode"] for _, counts in agent.kept)


def test_an_ending_server_answers_what_it_gives_up(serve, until, monkeypatch):
    with (
        serve() as agent,
        ThreadPoolExecutor(1) as pool,
        post(slowed(agent, monkeypatch), FOREVER, stream=True) as running,
    ):
        received = running.recv(15)
        waiting = pool.submit(agent.chat, "in line")
        until(lambda: agent.worker.waiting == 1)
        agent.worker.give_up()
        refused = waiting.result(120)
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "shutting_down"
        while b"shutting_down" not in received:
            received += (more := running.recv(65536))
            assert more, received
    assert agent.kept
