from __future__ import annotations

import json

import pytest

from spark_agent.server.api_error import ApiError
from spark_agent.server.body import parse_json, validated
from spark_agent.server.openai_requests import ChatRequest

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
    assert parse(user="u", metadata={"a": 1}, service_tier="auto") == parse()


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
        {"tool_choice": "none"},
    ],
)
def test_what_changes_nothing_is_taken(harmless):
    plain, asked = parse().ask(), parse(**harmless).ask()
    assert (asked.sampling, asked.tools, asked.schema, asked.top_logprobs) == (plain.sampling, (), None, None)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("members", "where"),
    [
        ({"model": 5}, "model"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
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
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": "x"}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "x", "arguments": "[]"}}]}
                ]
            },
            "messages[0].tool_calls[0]",
        ),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 5}}}]}, "tools[0].function"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
    ],
)
def test_the_field_at_fault_is_named(members, where):
    with pytest.raises(ApiError) as caught:
        validated(ChatRequest, {"messages": HELLO, **members}).ask()
    assert (caught.value.status, caught.value.param) == (400, where)
    assert "<" not in str(caught.value)


def test_unsupported_is_called_so():
    with pytest.raises(ApiError, match="functions: not supported by this version"):
        validated(ChatRequest, {"messages": HELLO, "functions": [{}]})


def test_a_broken_tool_is_named():
    broken = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"at": {"$ref": "#/no"}}}}}
    with pytest.raises(ApiError, match=r"tools\[1\].function \(find\): /properties/at/\$ref: nothing is at '#/no'"):
        parse(tools=[TOOL, broken]).ask()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"messages": [{"content": "\\ud800"}]}', "half of a surrogate pair"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is there twice"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_body_that_is_no_json(body, message):
    with pytest.raises(ApiError, match=message) as caught:
        parse_json(body)
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [[], None, 5, "x", {}])
def test_a_body_that_is_no_request(body):
    with pytest.raises(ApiError):
        validated(ChatRequest, body)


def test_newer_names_win():
    assert parse(max_tokens=5).token_limit == 5
    assert parse(max_tokens=5, max_completion_tokens=7).token_limit == 7
    assert parse(stop="x").stops == ("x",)
    assert parse(stop=["x", "y"]).stops == ("x", "y")


def test_messages_become_neutral():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse(
        messages=[
            {"role": "developer", "content": parts},
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ]
    )
    system, _, called, result = request.ask().messages
    assert (system.role, system.text) == ("system", "ab")
    assert (called.text, called.reasoning, called.calls[0].name) == ("", "hm", "look")
    assert (result.role, result.name, result.text) == ("tool", "look", "42")
