"""The real ``openai`` and ``anthropic`` clients against a real agent process with the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

TOKEN = "secret-of-the-tests"
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}
HELLO: list[Any] = [{"role": "user", "content": "How are you today?"}]
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": PARAMETERS}}
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
MESSAGES_TOOL: Any = {"name": "weather", "description": "w", "input_schema": PARAMETERS}


@dataclass
class Clients:
    url: str
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    state = tmp_path_factory.mktemp("agent")
    environment = {**os.environ, "SPARKMOE_API_KEY": TOKEN, "SPARKMOE_OFFLINE": "1"}
    environment |= {f"XDG_{kind}_HOME": str(state / kind.lower()) for kind in ("CONFIG", "STATE", "DATA")}
    command = [
        sys.executable,
        "-c",
        "from spark_agent.cli import main; main()",
        "run",
        "-p",
        "0",
        "--threads",
        "1",
        # Answers must not depend on how much of a prompt was computed before.
        "--ubatch",
        "1",
        "--json",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            url = json.loads(line)["base_url"]
            with (
                openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as one,
                anthropic.Anthropic(base_url=url, api_key=TOKEN, max_retries=0) as other,
            ):
                yield Clients(url, one, other)
        finally:
            process.terminate()
            process.communicate(timeout=120)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def model(clients: Clients) -> str:
    return clients.openai.models.list().data[0].id


def arguments_of(text: str) -> dict[str, Any]:
    value = json.loads(text)
    assert value["unit"] in {"celsius", "kelvin"}
    assert isinstance(value["exact"], bool)
    return value


def test_models(clients: Clients, model: str) -> None:
    assert clients.openai.models.retrieve(model).id == model
    assert [each.id for each in clients.anthropic.models.list()] == [model]
    assert clients.anthropic.models.retrieve(model).display_name == model


def test_chat(clients: Clients, model: str) -> None:
    answer = clients.openai.chat.completions.create(model=model, messages=HELLO, max_tokens=8, temperature=0)
    text = answer.choices[0].message.content
    assert text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")
    stream = clients.openai.chat.completions.create(
        model=model, messages=HELLO, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    more = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    turn = clients.openai.chat.completions.create(model=model, messages=more, max_tokens=2, temperature=0)
    assert turn.usage is not None
    assert turn.usage.prompt_tokens_details is not None
    assert (turn.usage.prompt_tokens_details.cached_tokens or 0) > 0, "the next turn goes on"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_chat_calls_a_tool_that_it_must(clients: Clients, model: str, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "messages": HELLO,
        "tools": [CHAT_TOOL],
        "tool_choice": choice,
        "temperature": 0,
        "parallel_tool_calls": False,
    }
    answer = clients.openai.chat.completions.create(**asked)
    choice_made = answer.choices[0]
    assert choice_made.finish_reason == "tool_calls"
    assert choice_made.message.content is None
    (call,) = choice_made.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    arguments = arguments_of(call.function.arguments)
    with clients.openai.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert not final.choices[0].message.content
    (streamed,) = final.choices[0].message.tool_calls or []
    assert json.loads(streamed.function.arguments) == arguments
    turns = [
        *HELLO,
        choice_made.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"},
    ]
    after = clients.openai.chat.completions.create(
        model=model, messages=turns, tools=[CHAT_TOOL], max_tokens=4, temperature=0
    )
    assert after.usage is not None
    assert answer.usage is not None
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens


TEXT_PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 60, "maxLength": 80}},
    "required": ["text"],
    "additionalProperties": False,
}


def test_arguments_stream_to_what_the_whole_answer_says(clients: Clients, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0, "tool_choice": "required"}
    chat: dict[str, Any] = {
        "messages": HELLO,
        "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": {"name": "note", "parameters": TEXT_PARAMETERS}}],
    }
    whole = clients.openai.chat.completions.create(**asked, **chat)
    arguments = whole.choices[0].message.tool_calls[0].function.arguments
    with clients.openai.chat.completions.stream(**asked, **chat) as stream:
        deltas = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == arguments == final.choices[0].message.tool_calls[0].function.arguments
    assert len(json.loads(arguments)["text"]) >= 60
    responses = {
        "input": "How are you today?",
        "parallel_tool_calls": False,
        "tools": [{"type": "function", "name": "note", "parameters": TEXT_PARAMETERS, "strict": True}],
    }
    with clients.openai.responses.stream(**asked, **responses) as answers:
        parts = [e.delta for e in answers if e.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == arguments
    messages = {
        "model": model,
        "messages": HELLO,
        "max_tokens": 200,
        "extra_body": {"temperature": 0},
        "tools": [{"name": "note", "input_schema": TEXT_PARAMETERS}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    with clients.anthropic.messages.stream(**messages) as events:
        text = "".join(e.delta.partial_json for e in events if e.type == "content_block_delta")
    assert text == arguments
    # Until it is whole, nothing says that it is a call; where it was asked for, arguments come as they are generated.
    eager = {**messages, "tools": [{**messages["tools"][0], "eager_input_streaming": True}]}
    for limit in (30, 40):
        cut = clients.openai.chat.completions.create(**asked, **chat, max_tokens=limit)
        assert (cut.choices[0].finish_reason, cut.choices[0].message.tool_calls) == ("length", None)
        half = list(clients.openai.chat.completions.create(**asked, **chat, max_tokens=limit, stream=True))
        assert half[-1].choices[0].finish_reason == "length"
        assert "".join(each.choices[0].delta.content or "" for each in half) == cut.choices[0].message.content
        assert all(each.choices[0].delta.tool_calls is None for each in half)
        with clients.anthropic.messages.stream(**{**messages, "max_tokens": limit}) as events:
            said = events.get_final_message().content
        whole_message = clients.anthropic.messages.create(**{**messages, "max_tokens": limit})
        assert [block.text for block in said] == [block.text for block in whole_message.content]
        with clients.anthropic.messages.stream(**{**eager, "max_tokens": limit}) as events:
            kinds = [event.type for event in events]
            assert events.get_final_message().stop_reason == "max_tokens"
        # The call's block is never closed, so nobody runs it.
        assert kinds.count("content_block_start") == 1
        assert "input_json" in kinds
        assert "content_block_stop" not in kinds


def test_chat_answers_in_json(clients: Clients, model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS, "strict": True}}
    answer = clients.openai.chat.completions.create(model=model, messages=HELLO, response_format=form, temperature=0)
    arguments_of(answer.choices[0].message.content or "")


def test_log_probabilities(clients: Clients, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 5, "temperature": 0}
    answer = clients.openai.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 5
    assert "".join(each.token for each in found.content) == answer.choices[0].message.content
    for each in found.content:
        assert each.logprob <= 0
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].token == each.token
        assert bytes(each.bytes or []).decode() == each.token
    streamed = clients.openai.chat.completions.create(**asked, logprobs=True, stream=True)
    choices = [chunk.choices[0] for chunk in streamed]
    tokens = [each for choice in choices if choice.logprobs for each in choice.logprobs.content or []]
    assert [each.logprob for each in tokens] == pytest.approx([each.logprob for each in found.content], abs=0.01)
    old = clients.openai.completions.create(model=model, prompt="The", max_tokens=3, temperature=0, logprobs=2)
    assert old.choices[0].logprobs is not None
    assert len(old.choices[0].logprobs.tokens or []) == 3
    assert (old.choices[0].logprobs.text_offset or [])[0] == 0


def test_completions(clients: Clients, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "The first", "max_tokens": 6, "temperature": 0}
    answer = clients.openai.completions.create(**asked, echo=True)
    assert answer.choices[0].text.startswith("The first")
    chunks = list(clients.openai.completions.create(**asked, stream=True))
    assert "The first" + "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    by_token = clients.openai.completions.create(**{**asked, "prompt": [5, 6, 7]}, echo=True)
    assert by_token.usage is not None
    assert by_token.usage.prompt_tokens == 3


def test_responses(clients: Clients, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "How are you today?", "max_output_tokens": 8, "temperature": 0}
    answer = clients.openai.responses.create(**asked, instructions="Be short.")
    assert answer.output_text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage is not None
    assert answer.usage.output_tokens == 8
    further = clients.openai.responses.create(
        **{**asked, "input": "Go on"}, previous_response_id=answer.id, instructions="Be short."
    )
    assert further.usage is not None
    assert further.usage.input_tokens_details.cached_tokens >= answer.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        clients.openai.responses.create(**asked, previous_response_id="resp_unknown")
    dropped = clients.openai.responses.create(**asked, store=False)
    with pytest.raises(openai.NotFoundError):
        clients.openai.responses.create(**asked, previous_response_id=dropped.id)


def test_responses_stream_in_order(clients: Clients, model: str) -> None:
    with clients.openai.responses.stream(model=model, input="Hi", max_output_tokens=6, temperature=0) as stream:
        events = list(stream)
    final = events[-1].response
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert final.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_what_codex_sends(clients: Clients, model: str) -> None:
    """Stateless items, reasoning among them, and tools of which some are its own servers'."""
    items: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List files"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "x",
        },
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "README.md"},
    ]
    shell: Any = {
        "type": "function",
        "name": "shell",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"enum": ["ls", "pwd"]}, "maxItems": 2}},
            "required": ["command"],
        },
    }
    with clients.openai.responses.stream(
        model=model,
        instructions="You are a coding agent.",
        input=items,
        tools=[shell, {"type": "web_search"}],
        tool_choice="required",
        parallel_tool_calls=False,
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        temperature=0,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    (call,) = final.output
    assert call.type == "function_call"
    assert call.name == "shell"
    assert isinstance(json.loads(call.arguments)["command"], list)
    assert final.status == "completed"


def test_messages(clients: Clients, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 8, "extra_body": {"temperature": 0}}
    answer = clients.anthropic.messages.create(**asked, system=[{"type": "text", "text": "Be short."}])
    (block,) = answer.content
    assert block.type == "text"
    assert block.text
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 8
    with clients.anthropic.messages.stream(**asked, system="Be short.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert final.usage.cache_read_input_tokens
    counted = clients.anthropic.messages.count_tokens(model=model, messages=HELLO, system="Be short.")
    assert counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens
    stop = clients.anthropic.messages.create(**asked, system="Be short.", stop_sequences=[text[3:6]])
    assert (stop.stop_reason, stop.stop_sequence) == ("stop_sequence", text[3:6])
    ahead = clients.anthropic.messages.create(
        **{**asked, "messages": [*HELLO, {"role": "assistant", "content": "I am"}]}, system="Be short."
    )
    assert ahead.content


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
)
def test_messages_use_a_tool(clients: Clients, model: str, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "messages": HELLO,
        "max_tokens": 200,
        "extra_body": {"temperature": 0},
        "tools": [MESSAGES_TOOL],
        "tool_choice": choice,
    }
    answer = clients.anthropic.messages.create(**asked)
    (block,) = answer.content
    assert block.type == "tool_use"
    assert answer.stop_reason == "tool_use"
    arguments_of(json.dumps(block.input))
    with clients.anthropic.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.content[0].type == "tool_use"
    assert final.content[0].input == block.input
    result = [{"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "20"}]}]
    turns = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": result}]
    after = clients.anthropic.messages.create(
        **{**asked, "messages": turns, "max_tokens": 4, "tool_choice": {"type": "auto"}}
    )
    assert after.usage.output_tokens == 4


def test_what_claude_code_sends(clients: Clients, model: str) -> None:
    kept = {"cache_control": {"type": "ephemeral"}}
    answer = clients.anthropic.beta.messages.create(
        model=model,
        betas=["interleaved-thinking-2025-05-14"],
        system=[{"type": "text", "text": "You are a coding agent.", **kept}],  # type: ignore[typeddict-item]
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi", **kept}]}],  # type: ignore[typeddict-item]
        tools=[{**MESSAGES_TOOL, **kept}],
        thinking={"type": "disabled"},
        metadata={"user_id": "u"},
        max_tokens=4,
        # Not its own: at that the model may end before.
        extra_body={"temperature": 0},
    )
    assert answer.usage.output_tokens == 4


def test_errors_are_the_clients_own(clients: Clients, model: str) -> None:
    create = clients.openai.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="this agent serves"):
        create(model="gpt-unknown", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="role"):
        create(model=model, messages=[{"role": "robot", "content": "x"}])  # type: ignore[list-item,misc]
    with pytest.raises(openai.BadRequestError) as caught:
        create(model=model, messages=[{"role": "user", "content": "word " * 3000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{clients.url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=clients.url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(anthropic.NotFoundError):
        clients.anthropic.messages.create(model="claude-x", max_tokens=1, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="tools\\[0\\] \\(find\\)"):
        clients.anthropic.messages.create(
            model=model,
            max_tokens=1,
            messages=HELLO,
            tools=[{"name": "find", "input_schema": {"type": "string"}}],  # type: ignore[typeddict-item]
        )
