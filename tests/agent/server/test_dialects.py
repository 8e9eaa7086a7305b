"""What holds in every dialect: bad input, tokens, names, ids."""

from __future__ import annotations

import json

import pytest

from spark_runtime.errors import DecodeError

HI = "How are you today?"
MESSAGES = [{"role": "user", "content": HI}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": HI, "max_tokens": 3},
    "/v1/responses": {"input": HI, "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}
SCHEMA = {"type": "object", "properties": {"at": {"$ref": "#/nowhere"}}}
BROKEN_TOOLS = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    "/v1/responses": {"type": "function", "name": "find", "parameters": SCHEMA},
    "/v1/messages": {"name": "find", "input_schema": SCHEMA},
    "/v1/messages/count_tokens": {"name": "find", "input_schema": SCHEMA},
}
ROBOT = {"role": "robot", "content": "x"}
LONG = "word " * 3000
every_path = pytest.mark.parametrize("path", BODIES)


def error_of(reply, path: str) -> str:
    """The message, once the error has its dialect's shape and nothing else."""
    body = reply.json()
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    if path.startswith("/v1/messages"):
        assert list(body) == ["type", "error", "request_id"]
        assert body["type"] == "error"
        assert list(body["error"]) == ["type", "message"]
        assert body["request_id"] == reply.headers["request-id"]
    else:
        assert list(body) == ["error"]
        assert list(body["error"]) == ["message", "type", "param", "code"]
    return body["error"]["message"]


@every_path
def test_the_plain_body_is_answered(agent, path):
    assert agent.client.post(path, json=BODIES[path]).status_code == 200


@every_path
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a": ' * 100_000,
        b'{"model": "nano", "model": "nano"}',
        b'{"temperature": NaN}',
        b'{"x": "\\ud800"}',
        b'{"x": ' + b"9" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_request(agent, path, body):
    reply = agent.client.post(path, content=body)
    assert reply.status_code == 400
    assert error_of(reply, path)


@every_path
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"model": "gpt-unknown"}, 404),
        ({"model": 5}, 400),
        ({"messages": [ROBOT], "input": [ROBOT], "prompt": 5}, 400),
        ({"messages": [], "input": [], "prompt": []}, 400),
        ({"messages": None, "input": None, "prompt": None}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "prompt": [HI, HI],
          "input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(agent, path, stream, wrong, status):
    reply = agent.client.post(path, json={**BODIES[path], "stream": stream, **wrong})
    assert reply.status_code == status
    assert error_of(reply, path)


@pytest.mark.parametrize("path", BROKEN_TOOLS)
def test_tools_with_broken_schemas_are_named(agent, path):
    reply = agent.client.post(path, json={**BODIES[path], "tools": [BROKEN_TOOLS[path]]})
    assert reply.status_code == 400
    assert "(find)" in error_of(reply, path)
    assert "nothing is at '#/nowhere'" in error_of(reply, path)
    reply = agent.client.post(path, json={**BODIES[path], "tools": [5]})
    assert reply.status_code == 400


@every_path
def test_wrong_methods(agent, path):
    reply = agent.client.get(path)
    assert reply.status_code == 405
    assert path in error_of(reply, path)


@pytest.mark.parametrize("path", [path for path in BODIES if "count" not in path])
def test_a_failure_inside_a_stream_is_an_event(agent, path, monkeypatch):
    piece, seen = agent.engine.piece, []

    def fail_later(token: int) -> bytes:
        seen.append(token)
        if len(seen) > 12:
            raise DecodeError("llama.cpp failed")
        return piece(token)

    limits = {"max_tokens": 30, "max_output_tokens": 30}
    with monkeypatch.context() as patch:
        agent.never_ends(patch)
        patch.setattr(agent.engine, "piece", fail_later)
        reply = agent.client.post(path, json={**BODIES[path], "stream": True, "temperature": 0, **limits})
    assert reply.status_code == 200
    data = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert "llama.cpp failed" in json.dumps(data[-1])
    assert "[DONE]" not in reply.text
    assert agent.answer(max_tokens=1)


@pytest.mark.parametrize("path", [path for path in BODIES if "count" not in path])
def test_a_failure_before_anything_was_said_is_a_status(agent, path, monkeypatch):
    def fail(_token: int) -> bytes:
        raise DecodeError("llama.cpp failed")

    with monkeypatch.context() as patch:
        patch.setattr(agent.engine, "piece", fail)
        reply = agent.client.post(path, json={**BODIES[path], "stream": True, "temperature": 0})
    assert reply.status_code == 500
    assert "llama.cpp failed" in error_of(reply, path)
    assert agent.answer(max_tokens=1)


def test_a_token_is_needed_once_there_is_one(serve):
    with serve(token="a b-c", aliases=["claude-*"]) as agent:
        assert agent.client.get("/health").status_code == 200
        assert agent.client.get("/health", headers={"Host": "elsewhere.example"}).status_code == 200
        for path, body in BODIES.items():
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic a b-c"},
                {"x-api-key": "é"},
            ):
                raw = {name: value.encode() for name, value in headers.items()}
                reply = agent.client.post(path, json=body, headers=raw)
                assert reply.status_code == 401
                other = "is not the one" in error_of(reply, path)
                assert other == (headers not in ({}, {"Authorization": "Basic a b-c"})), "wrong, or missing"
                assert reply.headers["x-should-retry"] == "false", "clients ask again for minutes otherwise"
            for headers in (
                {"Authorization": "Bearer a b-c"},
                {"x-api-key": "a b-c"},
                {"x-api-key": "a b-c", "Host": "x"},
            ):
                reply = agent.client.post(f"{path}?beta=true", json={**body, "model": "claude-any"}, headers=headers)
                assert reply.status_code == 200
                assert "count" in path or reply.json()["model"] == "claude-any"
        for path in ("/spark/stats", "/v1/models", "/nowhere"):
            assert agent.client.get(path).status_code == 401


def test_aliases_are_names(serve):
    with serve(aliases=["gpt-5", "o?-mini"]) as agent:
        assert [each["id"] for each in agent.client.get("/v1/models").json()["data"]] == ["nano", "gpt-5"]
        for name, status in (("gpt-5", 200), ("o4-mini", 200), ("nano", 200), ("gpt-51", 404)):
            assert agent.chat(model=name, max_tokens=1).status_code == status


def test_every_answer_has_an_id(agent):
    replies = [agent.client.get("/health"), agent.client.get("/nowhere"), agent.chat(max_tokens=1)]
    ids = {reply.headers["request-id"] for reply in replies}
    assert len(ids) == 3
    assert all(each.startswith("req_") for each in ids)
    foreign = agent.client.get("/health", headers={"Host": "evil.example"})
    assert foreign.status_code == 403
    assert foreign.headers["request-id"]


def test_workloads_are_asked_for(serve):
    seen = []

    def workload_of(headers, messages, model):
        seen.append((headers.get("x-spark-workload"), [message.role for message in messages], model))
        return "code-heavy"

    with serve(workload_of=workload_of) as agent:
        for path, body in BODIES.items():
            agent.client.post(path, json=body, headers={"X-Spark-Workload": path})
    assert seen == [(path, ["user"], body.get("model")) for path, body in BODIES.items() if "count" not in path]
