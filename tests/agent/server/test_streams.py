"""Calls in streams of every dialect, heard through the real clients: whole ones, broken ones, and cut ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_calls import FORMATS, FRAGMENTS, parser_of

from spark_agent.dialogue.json_calls import HERMES, LLAMA
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.output_parser import TaggedParser
from spark_agent.dialogue.xml_calls import QWEN_CODER
from spark_agent.server.anthropic_messages import MessagesAnswer
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Answering
from spark_agent.server.generation import Finished, Generation, Piece
from spark_agent.server.openai_chat import ChatAnswer
from spark_agent.server.responses_answer import ResponsesAnswer
from spark_agent.server.responses_requests import ResponsesRequest
from spark_agent.server.responses_tools import ResponsesTools
from spark_runtime.sampling import Sampling

TOOLS = {
    "write": Tool("write", parameters={"type": "object", "properties": {"text": {"type": "string"}}}),
    "stop": Tool("stop"),
}
ARGUMENTS = {"text": 'two\n"lines" é🦀'}
WRITE = f'<tool_call>{{"name": "write", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>'
STOP = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
SHAPES: dict[str, Callable[[], Any]] = {
    "chat": lambda: ChatAnswer("m", include_usage=True, logprobs=False),
    "responses": lambda: ResponsesAnswer("m", ResponsesRequest(input="x"), ResponsesTools([])),
    "messages": lambda: MessagesAnswer("m", 3, 1),
}
every_dialect = pytest.mark.parametrize("dialect", SHAPES)


def pieces_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


async def answering_of(
    pieces: list[str], reason: Any, calls: Any, *, parallel: bool = True, eager: bool = False
) -> Answering:
    generation = Generation("x", [1, 2, 3], Sampling(), None, ())
    for piece in pieces:
        generation.events.tell(Piece(piece))
    generation.events.tell(Finished(reason, 3, 0, len(pieces)))
    parser = parser_of(calls) if isinstance(calls, str) else TaggedParser(calls, TOOLS)
    streamed = frozenset(TOOLS if eager else ())
    answering = Answering(generation, parser, lambda _: None, parallel=parallel, streamed_calls=streamed)
    if len(pieces) > 1:
        # As when each piece is sent before the next one comes.
        answering._with_what_is_ready = lambda piece: piece  # type: ignore[method-assign]
    return answering


def sent(dialect: str, pieces: list[str], reason: str = "stop", calls: Any = HERMES, **options: bool) -> bytes:
    """The bytes of a stream, as the server's own guard would send them."""

    async def run() -> bytes:
        answering = await answering_of(pieces, reason, calls, **options)
        answer, chunks = SHAPES[dialect](), []
        try:
            async for chunk in answer.chunks(answering.outputs()):
                chunks.append(chunk)  # noqa: PERF401 - those before an error count
        except ApiError as error:
            chunks.append(answer.failed(error, None))
        return b"".join(chunks)

    return asyncio.run(run())


def whole(dialect: str, text: str, reason: str = "stop", calls: Any = HERMES, **options: bool) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        answering = await answering_of([text], reason, calls, **options)
        answer: dict[str, Any] = SHAPES[dialect]().whole(*await answering.whole())
        return answer

    return asyncio.run(run())


def events(stream: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in stream.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@contextlib.contextmanager
def heard(dialect: str, stream: bytes) -> Iterator[Any]:
    """The stream of the dialect's own client, which gets these bytes."""
    headers = {"content-type": "text/event-stream"}
    messages: Any = [{"role": "user", "content": "x"}]
    if dialect == "messages":
        transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=stream))
        with (
            httpx2.Client(transport=transport) as http,
            anthropic.Anthropic(api_key="x", http_client=http, max_retries=0) as client,
            client.messages.stream(model="m", max_tokens=9, messages=messages) as found,
        ):
            yield found
        return
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, content=stream))
    with (
        httpx.Client(transport=transport) as http,
        openai.OpenAI(api_key="x", http_client=http, max_retries=0) as openai_client,
    ):
        if dialect == "chat":
            with openai_client.chat.completions.stream(model="m", messages=messages) as chat:
                yield chat
        else:
            with openai_client.responses.stream(model="m", input="x") as responses:
                yield responses


def calls_of(dialect: str, final: Any) -> list[tuple[str, Any]]:
    """Names and arguments of a client's final object, arguments as they were spelled where the dialect keeps that."""
    if dialect == "chat":
        return [(call.function.name, call.function.arguments) for call in final.choices[0].message.tool_calls or []]
    if dialect == "responses":
        return [(item.name, item.arguments) for item in final.output if item.type == "function_call"]
    return [(block.name, block.input) for block in final.content if block.type == "tool_use"]


def calls_in_whole(dialect: str, answer: dict[str, Any]) -> list[tuple[str, Any]]:
    if dialect == "chat":
        calls = answer["choices"][0]["message"].get("tool_calls", [])
        return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    if dialect == "responses":
        return [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    return [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]


def final_of(dialect: str, stream: Any) -> Any:
    for _ in stream:
        pass
    if dialect == "chat":
        return stream.get_final_completion()
    return stream.get_final_response() if dialect == "responses" else stream.get_final_message()


@every_dialect
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_adds_up_to_the_whole_answer(dialect: str, size: int, eager: bool) -> None:
    text = f"I will.\n{WRITE}\n{STOP}"
    expected = calls_in_whole(dialect, whole(dialect, text))
    assert [name for name, _ in expected] == ["write", "stop"]
    stream = sent(dialect, pieces_of(text, size), eager=eager)
    with heard(dialect, stream) as client:
        final = final_of(dialect, client)
    assert calls_of(dialect, final) == expected
    if dialect == "chat":
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.content == "I will."
    elif dialect == "responses":
        assert final.status == "completed"
    else:
        assert final.stop_reason == "tool_use"


@every_dialect
def test_arguments_come_in_parts_where_that_is_asked_for(dialect: str) -> None:
    parts = {
        "chat": lambda each: [
            call["function"]["arguments"]
            for choice in each["choices"]
            for call in choice["delta"].get("tool_calls", [])
        ],
        "responses": lambda each: [each["delta"]] if each["type"] == "response.function_call_arguments.delta" else [],
        "messages": lambda each: [each["delta"]["partial_json"]] if "partial_json" in each.get("delta", {}) else [],
    }[dialect]
    found = [part for each in events(sent(dialect, pieces_of(WRITE, 2), eager=True)) for part in parts(each)]
    assert len(found) > 10
    assert json.loads("".join(found)) == ARGUMENTS
    assert len([part for each in events(sent(dialect, pieces_of(WRITE, 2))) for part in parts(each) if part]) == 1


broken_calls = pytest.mark.parametrize(
    ("calls", "text"),
    [
        (HERMES, '<tool_call>{"name": "write", "arguments": {"text": oops}}</tool_call> and more'),
        (HERMES, '<tool_call>{"name": "write", "arguments": {"text": "x"'),
        (HERMES, '<tool_call>{"name": "write", "arguments": {"text": "x"}'),
        (LLAMA, '{"name": "write", "parameters": {"text": "x"}, "parameters": {}}'),
        (QWEN_CODER, "<tool_call><function=write><parameter=text>x</parameter></tool_call>"),
    ],
)


@every_dialect
@broken_calls
def test_a_broken_call_is_text(dialect: str, calls: Any, text: str) -> None:
    answer = whole(dialect, text, calls=calls)
    assert calls_in_whole(dialect, answer) == []
    assert json.dumps(text)[1:-1] in json.dumps(answer)
    with heard(dialect, sent(dialect, pieces_of(text, 3), calls=calls)) as client:
        final = final_of(dialect, client)
    assert calls_of(dialect, final) == []
    if dialect == "chat":
        assert (final.choices[0].message.content, final.choices[0].finish_reason) == (text, "stop")
    elif dialect == "responses":
        assert (final.output_text, final.status) == (text, "completed")
    else:
        assert (final.content[0].text, final.stop_reason) == (text, "end_turn")


@every_dialect
@broken_calls
def test_a_broken_call_whose_arguments_were_streamed_ends_its_stream_with_an_error(
    dialect: str, calls: Any, text: str
) -> None:
    stream = sent(dialect, pieces_of(text, 3), calls=calls, eager=True)
    last = json.dumps(events(stream)[-1])
    assert "began a tool call" in last
    assert b"[DONE]" not in stream
    assert b"message_stop" not in stream
    assert b"response.completed" not in stream
    assert b"output_item.done" not in stream
    assert b"content_block_stop" not in stream
    if dialect == "responses":
        return  # its client hands the failure on as an event, ``response.failed``
    with pytest.raises((openai.APIError, anthropic.APIError), match="tool call"), heard(dialect, stream) as client:
        final_of(dialect, client)


@every_dialect
def test_a_streamed_call_that_the_token_limit_cuts_is_never_one_to_run(dialect: str) -> None:
    for length in range(len("<tool_call>"), len(WRITE) - len("}</tool_call>")):
        stream = sent(dialect, pieces_of(f"Well. {WRITE[:length]}", 5), "length", eager=True)
        found = events(stream)
        if dialect == "chat":
            calls = [
                call for each in found for choice in each["choices"] for call in choice["delta"].get("tool_calls", [])
            ]
            arguments = "".join(call["function"]["arguments"] for call in calls)
            with pytest.raises(ValueError, match="line"):
                json.loads(arguments)
            assert found[-2]["choices"][0]["finish_reason"] == "length"
        elif dialect == "responses":
            assert found[-1]["type"] == "response.incomplete"
            assert all(item["type"] == "message" for item in found[-1]["response"]["output"])
            done = [each["item"]["type"] for each in found if each["type"] == "response.output_item.done"]
            assert set(done) == {"message"}
        else:
            assert found[-2]["delta"]["stop_reason"] == "max_tokens"
            opened = [each["index"] for each in found if each["type"] == "content_block_start"]
            closed = [each["index"] for each in found if each["type"] == "content_block_stop"]
            calls = [each for each in found if each.get("content_block", {}).get("type") == "tool_use"]
            assert opened[: len(opened) - len(calls)] == closed
        assert calls_in_whole(dialect, whole(dialect, f"Well. {WRITE[:length]}", "length")) == []


@every_dialect
def test_only_the_first_call_where_one_is_wanted(dialect: str) -> None:
    stream = sent(dialect, pieces_of(WRITE + STOP + "more", 4), parallel=False)
    with heard(dialect, stream) as client:
        assert [name for name, _ in calls_of(dialect, final_of(dialect, client))] == ["write"]


PARTS = [WRITE, STOP, WRITE[:40], STOP[:20], "text ", '{"a": 1}', "<tool_call>", "</tool_call>", '"', "}", "\n"]


@every_dialect
@given(parts=st.lists(st.sampled_from(PARTS), max_size=6), size=st.integers(1, 9))
def test_no_cut_changes_what_a_client_hears_of_streamed_calls(dialect: str, parts: list[str], size: int) -> None:
    text = "".join(parts)
    answer = whole(dialect, text)
    found = events(sent(dialect, pieces_of(text, size), eager=True))
    one = events(sent(dialect, [text], eager=True))
    broken = "malformed_tool_call" in json.dumps(one) or "began a tool call" in json.dumps(one)
    assert broken == ("malformed_tool_call" in json.dumps(found) or "began a tool call" in json.dumps(found))
    if not broken:
        assert heard_calls(dialect, found) == heard_calls(dialect, one) == calls_in_whole(dialect, answer)


def heard_calls(dialect: str, found: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Calls put together by hand from events: the client's own way takes too long to try often."""
    if dialect == "chat":
        calls: dict[int, list[str]] = {}
        for each in found:
            for choice in each["choices"]:
                for call in choice["delta"].get("tool_calls", []):
                    begun = calls.setdefault(call["index"], [call["function"].get("name", ""), ""])
                    begun[1] += call["function"]["arguments"]
        return [(name, arguments) for name, arguments in calls.values()]
    if dialect == "responses":
        done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
        return [(item["name"], item["arguments"]) for item in done if item["type"] == "function_call"]
    blocks: dict[int, list[str]] = {}
    for each in found:
        if each.get("content_block", {}).get("type") == "tool_use":
            blocks[each["index"]] = [each["content_block"]["name"], ""]
        elif "partial_json" in each.get("delta", {}):
            blocks[each["index"]][1] += each["delta"]["partial_json"]
    return [(name, json.loads(arguments)) for name, arguments in blocks.values()]


@every_dialect
def test_a_stream_is_not_silent_during_a_long_call(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("IDLE_S", "FIRST_WAIT_S"):
        monkeypatch.setattr(f"spark_agent.server.exchange.{limit}", 0.0)
    stream = sent(dialect, pieces_of(WRITE, 2))
    signs = {"chat": b": keep-alive", "responses": b"event: response.in_progress", "messages": b"event: ping"}
    before_it_is_told = stream[: stream.index(b'"write"')]
    assert before_it_is_told.count(signs[dialect]) > 10
    with heard(dialect, stream) as client:
        assert [name for name, _ in calls_of(dialect, final_of(dialect, client))] == ["write"]


LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


def without_ids(value: Any) -> Any:
    """The same without what differs between two answers and says nothing."""
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key not in {"id", "call_id"}}
    return [without_ids(each) for each in value] if isinstance(value, list | tuple) else value


def said(dialect: str, found: list[dict[str, Any]]) -> Any:
    """The message that a client puts together from a stream's events, in the words of a whole answer."""
    if dialect == "chat":
        return chat_said(found)
    if dialect == "responses":
        items = [each["item"] for each in found if each["type"] == "response.output_item.done"]
        assert items == found[-1]["response"]["output"]
        return items, found[-1]["response"]["status"]
    blocks: list[dict[str, Any]] = []
    for each in found:
        if each["type"] == "content_block_start":
            blocks.append({**each["content_block"], "open": True, "json": ""})
        elif each["type"] == "content_block_stop":
            del blocks[-1]["open"]
        elif each["type"] == "content_block_delta":
            delta = dict(each["delta"])
            delta.pop("type")
            ((key, text),) = delta.items()
            key = key.replace("partial_", "")
            blocks[-1][key] += text
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return blocks, found[-2]["delta"]["stop_reason"]


def chat_said(found: list[dict[str, Any]]) -> Any:
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    reason = None
    for each in found:
        for choice in each["choices"]:
            reason = choice["finish_reason"] or reason
            for key, value in choice["delta"].items():
                if key != "tool_calls":
                    message[key] = value if message.get(key) is None else message[key] + value
            for call in choice["delta"].get("tool_calls", []):
                if call["index"] == len(calls):
                    calls.append({key: value for key, value in call.items() if key != "index"})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message | ({"tool_calls": calls} if calls else {}), reason


def in_whole(dialect: str, answer: dict[str, Any]) -> Any:
    if dialect == "chat":
        message = answer["choices"][0]["message"]
        # Beside calls it is null, as at OpenAI; a stream begins before that is known.
        return {**message, "content": message["content"] or ""}, answer["choices"][0]["finish_reason"]
    if dialect == "responses":
        return answer["output"], answer["status"]
    return answer["content"], answer["stop_reason"]


@every_dialect
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(
    parts=st.lists(
        st.sampled_from(FRAGMENTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=8
    ),
    size=st.integers(1, 30),
    reason=st.sampled_from(["stop", "length"]),
    parallel=st.booleans(),
)
def test_whatever_a_model_writes_a_stream_says_what_the_whole_answer_does(
    dialect: str, name: str, parts: list[str], size: int, reason: str, parallel: bool
) -> None:
    text = "".join(parts)
    answer = whole(dialect, text, reason, name, parallel=parallel)
    found = events(sent(dialect, pieces_of(text, size) or [""], reason, name, parallel=parallel))
    assert without_ids(said(dialect, found)) == without_ids(in_whole(dialect, answer))
