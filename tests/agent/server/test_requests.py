from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from spark_agent.server.requests import ChatRequest, first_fault

HELLO = [{"role": "user", "content": "hi"}]


def parse(**members: object) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps({"messages": HELLO, **members}))


def test_defaults_are_those_of_the_api():
    request = parse()
    assert (request.sampling().temperature, request.sampling().top_p, request.sampling().seed) == (1.0, 1.0, None)
    assert (request.token_limit, request.stops, request.include_usage, bool(request.stream)) == (None, (), False, False)


def test_null_is_the_same_as_absent():
    names = [name for name in ChatRequest.model_fields if name != "messages"]
    assert parse(**dict.fromkeys(names)) == parse()


def test_unknown_fields_are_ignored():
    assert parse(user="u", metadata={"a": 1}, top_k=40, reasoning_effort="low", tool_choice="none") == parse()


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"logprobs": False},
        {"logit_bias": {}},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"response_format": {"type": "text"}},
        {"n": 1},
    ],
)
def test_what_changes_nothing_is_taken(harmless):
    parse(**harmless)


@pytest.mark.parametrize(
    ("members", "where"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"n": 2}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": "x"}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_the_field_at_fault_is_named(members, where):
    with pytest.raises(ValidationError) as caught:
        parse(**members)
    found, reason = first_fault(caught.value)
    assert found == where
    assert reason
    assert "<" not in f"{found}: {reason}"


def test_unsupported_is_called_so():
    with pytest.raises(ValidationError) as caught:
        parse(tools=[{}])
    assert first_fault(caught.value) == ("tools", "not supported by this version")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": [{"content": "\\ud800"}]}'])
def test_a_body_that_is_no_request(body):
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(body)
    assert first_fault(caught.value)[0] is None


def test_deep_nesting_is_an_error_and_no_crash():
    body = b'{"messages": [{"role": "user", "content": "hi"}], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(ValidationError):
        ChatRequest.model_validate_json(body)


def test_newer_names_win():
    assert parse(max_tokens=5).token_limit == 5
    assert parse(max_tokens=5, max_completion_tokens=7).token_limit == 7
    assert parse(stop="x").stops == ("x",)
    assert parse(stop=["x", "y"]).stops == ("x", "y")


def test_parts_become_one_text_and_developer_becomes_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse(messages=[{"role": "developer", "content": parts}, *HELLO])
    assert request.messages[0].for_template() == {"role": "system", "content": "ab"}
