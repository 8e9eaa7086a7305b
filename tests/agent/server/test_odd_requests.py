"""Requests of coding tools with any one part replaced by something odd: understood or refused, never a failure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from spark_agent.server.anthropic_requests import MessagesRequest
from spark_agent.server.api_error import ApiError
from spark_agent.server.openai_requests import ChatRequest
from spark_agent.server.responses_requests import ResponsesRequest

ODD: list[Any] = [None, True, 0, -1, 1.5, "", "x", [], ["x"], [[]], {}, {"type": ["x"]}, {"a": {}}, [None]]
SCHEMA = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}]}}}
TEXT = {"type": "text", "text": "Hi"}
MESSAGES = {
    "model": "m",
    "max_tokens": 5,
    "system": [TEXT],
    "messages": [
        {"role": "user", "content": [TEXT, {"type": "image"}]},
        {"role": "system", "content": "There are agents."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x"},
                {"type": "tool_use", "id": "t1", "name": "Write", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT, {"type": "tool_reference"}]},
                TEXT,
            ],
        },
    ],
    "tools": [{"name": "Write", "description": "Writes.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "Write"},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["x"],
}
FUNCTION = {"name": "run", "description": "Runs.", "parameters": SCHEMA}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [TEXT, {"type": "image_url"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": [TEXT]},
        {"role": "user", "content": "On"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "run"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "stop": ["a"],
    "logit_bias": {"1": 2},
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": True},
}
RUN = {"type": "function", **FUNCTION}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
RESPONSES = {
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Skills."}]},
        {"role": "user", "content": [{"type": "input_image"}, {"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "function_call", "call_id": "c", "namespace": "agents", "name": "spawn", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
        {"type": "tool_search_call", "call_id": "d", "arguments": {}},
        {"type": "tool_search_output", "call_id": "d", "tools": [RUN]},
        {"type": "custom_tool_call", "call_id": "e", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "e", "output": "y"},
        {"role": "user", "content": "On"},
    ],
    "tools": [RUN, SEARCH, PATCH, {"type": "namespace", "name": "agents", "tools": [{**RUN, "name": "spawn"}]}],
    "tool_choice": {"type": "function", "name": "run"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
}


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways from a body's top to each of its parts."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*before, key)
        yield from places(value[key], (*before, key))


def understand(kind: type[Any], body: Any) -> None:
    request = kind.model_validate(body)
    if isinstance(request, ResponsesRequest):
        request.ask([], request.declared())
    else:
        request.ask()


@pytest.mark.parametrize(
    ("kind", "body"), [(MessagesRequest, MESSAGES), (ChatRequest, CHAT), (ResponsesRequest, RESPONSES)]
)
def test_one_odd_part_is_understood_or_refused(kind: type[Any], body: dict[str, Any]) -> None:
    understand(kind, body)
    for place in places(body):
        for odd in ODD:
            changed = copy.deepcopy(body)
            part: Any = changed
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = odd
            try:
                understand(kind, changed)
            except (ApiError, ValidationError):
                continue
            except Exception as error:
                pytest.fail(f"{place} = {odd!r}: {error!r}")
