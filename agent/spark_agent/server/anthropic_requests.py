"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: what they take."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from spark_agent.dialogue.messages import Message, ToolCall, ToolChoice
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ask
from spark_agent.server.reasoning import Reasoned
from spark_agent.server.requests import MAX_MESSAGES, ApiModel, kind_of, newest_question, not_shown, tools_of
from spark_runtime.sampling import Sampling

__all__ = ["CountRequest", "MessagesRequest"]

_FILES = frozenset({"image", "document"})
_HEADER = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
_SERVERS_OWN = re.compile(r"redacted_thinking|server_tool_use|.+_tool_result")
"""What Anthropic's own servers put into a conversation that began there: nothing that a model here could have said."""


class _Message(ApiModel):
    role: Literal["user", "assistant", "system"]
    content: Any


class _Format(ApiModel):
    type: Literal["json_schema"]
    schema_: Annotated[Any, Field(alias="schema")] = None


class _OutputConfig(ApiModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class CountRequest(Reasoned):
    """The body of a count: all that decides the prompt."""

    model: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None

    def ask(self) -> Ask:
        """What is asked for; raise :class:`ApiError`."""
        names: dict[str, str] = {}
        messages: list[Message] = []
        if self.system:
            messages.append(Message("system", _text(_without_headers(self.system), "system")))
        newest = newest_question([message.role for message in self.messages])
        for at, message in enumerate(self.messages):
            messages += _neutral(message, f"messages[{at}]", names, refusing=at >= newest)
        tools = tools_of([_tool(f"tools[{at}]", value) for at, value in enumerate(self.tools or ())])
        prefill = None
        if messages[-1].role == "assistant" and not messages[-1].calls:
            prefill = messages.pop().text
        if not messages:
            raise _invalid("messages: expected a message of user", "messages")
        thought = self.thought()
        if self.output_config is not None and self.output_config.effort is not None:
            # It is one of the whole answer, and does not say that there is to be reasoning.
            thought = replace(thought, effort=self.output_config.effort)
        return Ask(
            sampling=self.sampling(),
            messages=tuple(messages),
            tools=tools,
            choice=_choice(self.tool_choice, {tool.name for tool in tools}),
            schema=self._schema(),
            schema_strict=True,
            reasoning=thought,
            prefill=prefill,
            streamed_calls=frozenset(
                str(tool["name"]) for tool in self.tools or () if tool.get("eager_input_streaming") is True
            ),
        )

    def _schema(self) -> Any:
        form = (self.output_config.format if self.output_config else None) or self.output_format
        if form is None:
            return None
        if form.schema_ is None:
            raise _invalid("output_config.format.schema: expected a JSON schema", "output_config")
        return form.schema_

    def sampling(self) -> Sampling:
        """Sampling parameters; none decide a count."""
        return Sampling()


class MessagesRequest(CountRequest):
    """The body of a request for an answer."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: dict[str, Any] | None = None

    def ask(self) -> Ask:
        """What is asked for; raise :class:`ApiError`."""
        return replace(super().ask(), max_tokens=self.max_tokens, stops=tuple(self.stop_sequences or ()))

    def sampling(self) -> Sampling:
        """Sampling parameters; the API's default temperature is 1."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
        )


def _invalid(message: str, where: str) -> ApiError:
    return ApiError(400, message, "invalid_request", param=where)


def _without_headers(system: Any) -> Any:
    """Without what Claude Code says to Anthropic's accounting there.

    It differs between conversations, so that none could begin with what another computed, and no model needs it.
    """
    if not isinstance(system, list):
        return system
    texts = [block.get("text") if isinstance(block, dict) else None for block in system]
    return [
        block
        for block, text in zip(system, texts, strict=True)
        if not (isinstance(text, str) and _HEADER.fullmatch(text))
    ]


def _text(content: Any, where: str) -> str:
    """A text, or blocks of text; those of files are refused by name."""
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, f"{where}[{at}]") for at, block in enumerate(_blocks(content, where)))


def _returned(content: Any, where: str) -> str:
    """What a tool returned."""
    if isinstance(content, str):
        return content
    text = ""
    for at, block in enumerate(_blocks(content, where)):
        kind = kind_of(block)
        if kind in _FILES:
            text += not_shown(kind)
        elif kind == "tool_reference":
            text += f"[tool: {block.get('tool_name')}]"
        else:
            text += _block_text(block, f"{where}[{at}]")
    return text


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _invalid(f"{where}: expected a text or a list of blocks", where)
    return content


def _block_text(block: dict[str, Any], where: str) -> str:
    kind = kind_of(block)
    if kind in _FILES:
        # The place as Anthropic's servers write it: Claude Code knows by it what to leave out from then on.
        place = re.sub(r"\[(\d+)\]", r".\1", f"{where}.{kind}")
        raise _invalid(f"{place}: {kind} is not supported: this server reads text only", where)
    if kind != "text" or not isinstance(block.get("text"), str):
        raise _invalid(f"{where}: found type {kind!r}, expected a block of text", where)
    return str(block["text"])


def _neutral(message: _Message, where: str, names: dict[str, str], *, refusing: bool) -> list[Message]:
    """One message as several: what tools returned are messages of their own, before the text beside them.

    ``refusing`` says whether its files are refused, or only told of.
    """
    where += ".content"
    if isinstance(message.content, str):
        return [Message(message.role, message.content)]
    text, thought, calls, results, said = "", "", [], [], []
    for at, block in enumerate(_blocks(message.content, where)):
        here = f"{where}[{at}]"
        kind = kind_of(block)
        if kind == "tool_use" and message.role == "assistant":
            calls.append(_call(block, here, names))
        elif kind == "tool_result" and message.role == "user":
            results.append(_result(block, here, names))
        elif kind == "thinking" and message.role == "assistant":
            thought += str(block.get("thinking") or "")
        elif kind == "compaction" and message.role == "assistant":
            text += str(block.get("content") or "")
        elif kind in _FILES and not refusing:
            text += not_shown(kind)
        elif not (message.role == "assistant" and isinstance(kind, str) and _SERVERS_OWN.fullmatch(kind)):
            said.append(_block_text(block, here))
            text += said[-1]
    if results and not text:
        return results
    return [*results, Message(message.role, text, thought, tuple(calls), blocks=tuple(said))]


def _call(block: dict[str, Any], where: str, names: dict[str, str]) -> ToolCall:
    identifier, name, value = block.get("id"), block.get("name"), block.get("input", {})
    if not isinstance(identifier, str) or not isinstance(name, str) or not isinstance(value, dict):
        raise _invalid(f"{where}: expected id, name and an object as input", where)
    names[identifier] = name
    return ToolCall(identifier, name, json.dumps(value, ensure_ascii=False))


def _result(block: dict[str, Any], where: str, names: dict[str, str]) -> Message:
    identifier = block.get("tool_use_id")
    if not isinstance(identifier, str):
        raise _invalid(f"{where}.tool_use_id: expected the id of a tool_use block", where)
    text = _returned(block.get("content") or "", f"{where}.content")
    if block.get("is_error") is True:
        text = f"Error: {text}"
    return Message("tool", text, call_id=identifier, name=names.get(identifier))


def _tool(where: str, value: Any) -> tuple[str, Any]:
    if not isinstance(value, dict):
        return where, value
    kind = kind_of(value, "custom")
    if kind not in (None, "custom"):
        name = value.get("name")
        message = f"{where} ({name}): found type {kind!r}, which only Anthropic's servers run; expected 'custom'"
        raise ApiError(400, message, "invalid_tool", param=where)
    function = {"name": value.get("name"), "parameters": value.get("input_schema")}
    return where, {**function, "description": value.get("description")}


def _choice(value: Any, tools: set[str]) -> ToolChoice:
    if value is None:
        return ToolChoice()
    kind: Any = kind_of(value) if isinstance(value, dict) else None
    several = not (isinstance(value, dict) and value.get("disable_parallel_tool_use") is True)
    if kind in ("auto", "none"):
        return ToolChoice(kind, parallel=several)
    if kind == "any":
        return ToolChoice("required", parallel=several)
    name = value.get("name") if kind == "tool" else None
    if isinstance(name, str) and name in tools:
        return ToolChoice("required", name, parallel=False)
    message = "tool_choice: expected the type auto, any, none, or tool with the name of one of the tools"
    raise _invalid(message, "tool_choice")
