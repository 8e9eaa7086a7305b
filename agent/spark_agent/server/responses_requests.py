"""``POST /v1/responses``: what it takes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from spark_agent.dialogue.json_text import load_json
from spark_agent.dialogue.messages import Message, ToolCall
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ask
from spark_agent.server.openai_requests import tool_choice_of
from spark_agent.server.reasoning import Reasoned
from spark_agent.server.requests import MAX_MESSAGES, kind_of, newest_question, not_shown
from spark_agent.server.responses_tools import ResponsesTools, arguments_of
from spark_runtime.sampling import Sampling

__all__ = ["ResponsesRequest", "messages_of"]

_BRINGING_TOOLS = frozenset({"additional_tools", "tool_search_output"})
_CALLS = frozenset({"function_call", "custom_tool_call", "tool_search_call"})
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output", "tool_search_output"})
_SERVERS_OWN = re.compile(r"(web_search|image_generation|file_search|code_interpreter|computer)_call|mcp_.*")
"""What OpenAI's own servers did in a conversation that began there: nothing that a model here could have said."""
_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"})


class ResponsesRequest(Reasoned):
    """The body."""

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    tool_stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    def items(self) -> list[Any]:
        """The input's items."""
        for name in ("background", "conversation", "prompt"):
            if getattr(self, name):
                raise _invalid(f"{name}: not supported by this version", name)
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        if isinstance(self.input, list) and self.input:
            if len(self.input) > MAX_MESSAGES:
                raise _invalid(f"input: found {len(self.input)} items, expected at most {MAX_MESSAGES}", "input")
            return self.input
        raise _invalid("input: expected a text or a list of items", "input")

    def declared(self) -> ResponsesTools:
        """Its tools, with those that came in the conversation; raise :class:`ApiError`."""
        came: list[tuple[str, Any]] = []
        for at, item in enumerate(self.items()):
            if isinstance(item, dict) and kind_of(item) in _BRINGING_TOOLS:
                where = f"input[{at}].tools"
                if not isinstance(tools := item.get("tools"), list):
                    raise _invalid(f"{where}: expected a list", where)
                came += [(f"{where}[{each}]", value) for each, value in enumerate(tools)]
        return ResponsesTools([(f"tools[{at}]", value) for at, value in enumerate(self.tools or ())], came)

    def ask(self, earlier: Sequence[Message], tools: ResponsesTools) -> Ask:
        """What is asked for with these tools, after an earlier conversation; raise :class:`ApiError`."""
        messages = [*earlier, *messages_of(self.items(), tools)]
        if self.instructions:
            messages.insert(0, Message("system", self.instructions))
        schema, strict = self._schema()
        return Ask(
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
            ),
            messages=tuple(messages),
            tools=tools.tools,
            choice=tool_choice_of(_of_function(self.tool_choice), tools.names(), parallel=self.parallel_tool_calls),
            max_tokens=self.max_output_tokens,
            schema=schema,
            schema_strict=strict,
            reasoning=self.thought(),
            streamed_calls=frozenset(tool.name for tool in tools.tools if self.tool_stream),
        )

    def _schema(self) -> tuple[object | None, bool]:
        form = (self.text or {}).get("format") or {"type": "text"}
        kind = kind_of(form) if isinstance(form, dict) else None
        if kind == "text":
            return None, False
        if kind == "json_object":
            return {"type": "object"}, False
        if kind == "json_schema" and form.get("schema") is not None:
            return form["schema"], form.get("strict") is True
        raise _invalid("text.format: expected the type text, json_object, or json_schema with a schema", "text")


def _invalid(message: str, where: str) -> ApiError:
    return ApiError(400, message, "invalid_request", param=where)


def _of_function(choice: Any) -> Any:
    """A choice of any one tool, as if it were of a function."""
    if isinstance(choice, dict) and choice.get("type") == "custom":
        return {**choice, "type": "function"}
    return choice


def messages_of(items: Sequence[Any], tools: ResponsesTools) -> list[Message]:
    """Items as messages: what an assistant thinks, says and calls in a row is one."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    newest = newest_question([item.get("role") if isinstance(item, dict) else None for item in items])
    for at, item in enumerate(items):
        where = f"input[{at}]"
        if not isinstance(item, dict):
            raise _invalid(f"{where}: expected an item, an object", where)
        message = _item(item, where, names, tools, refusing=at >= newest)
        if message is None:
            continue
        last = messages[-1] if messages else None
        if last is not None and last.role == message.role == "assistant":
            messages[-1] = replace(
                last,
                text=last.text + message.text,
                reasoning=last.reasoning + message.reasoning,
                calls=(*last.calls, *message.calls),
            )
        else:
            messages.append(message)
    return messages


def _item(
    item: dict[str, Any], where: str, names: dict[str, str], tools: ResponsesTools, *, refusing: bool
) -> Message | None:
    """One item as a message, if it says anything; ``names`` are the tools called so far, by the call's id.

    ``refusing`` says whether files in a message are refused, or only told of.
    """
    kind = kind_of(item, "message")
    if kind == "message":
        role: Any = "system" if item.get("role") == "developer" else item.get("role")
        if role not in ("system", "user", "assistant"):
            raise _invalid(f"{where}.role: found {role!r}, expected user, assistant, system or developer", where)
        content = item.get("content")
        text = _text(content, f"{where}.content", refusing=refusing)
        return Message(role, text, blocks=_blocks(content) if isinstance(content, list) else ())
    if kind == "reasoning":
        # Another server's reasoning may be sealed.
        thought = _text(item.get("content") or item.get("summary") or [], f"{where}.content")
        return Message("assistant", "", thought) if thought else None
    if kind == "additional_tools" or (isinstance(kind, str) and _SERVERS_OWN.fullmatch(kind)):
        return None
    identifier = item.get("call_id")
    if not isinstance(identifier, str) or kind not in _CALLS | _RESULTS:
        expected = "a message, reasoning, or a call or output of a function, a custom tool or a tool search"
        raise _invalid(f"{where}: found type {kind!r}, expected {expected} with its call_id", where)
    if kind in _CALLS:
        call = _call(item, kind, identifier, where, tools)
        names[identifier] = call.name
        return Message("assistant", "", calls=(call,))
    if kind == "tool_search_output":
        found = item.get("tools")
        text = json.dumps([each.get("name") for each in found if isinstance(each, dict)] if found else [])
    else:
        text = _text(item.get("output"), f"{where}.output", refusing=False)
    return Message("tool", text, call_id=identifier, name=names.get(identifier))


def _call(item: dict[str, Any], kind: str, identifier: str, where: str, tools: ResponsesTools) -> ToolCall:
    if kind == "tool_search_call":
        return ToolCall(identifier, "tool_search", json.dumps(item.get("arguments") or {}, ensure_ascii=False))
    name, namespace = item.get("name"), item.get("namespace")
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        raise _invalid(f"{where}: expected a name, and a namespace if there is one", where)
    told = tools.told(namespace, name)
    if kind == "custom_tool_call":
        if not isinstance(text := item.get("input"), str):
            raise _invalid(f"{where}.input: expected a text", where)
        return ToolCall(identifier, told, arguments_of(text))
    arguments = item.get("arguments") or "{}"
    if not isinstance(arguments, str) or not isinstance(load_json(arguments), dict):
        raise _invalid(f"{where}: expected a name, and arguments as JSON text of an object", where)
    return ToolCall(identifier, told, arguments)


def _blocks(content: list[dict[str, Any]]) -> tuple[str, ...]:
    """The texts of parts that :func:`_text` took; what stands for a file is none."""
    texts = (part.get("text", part.get("refusal")) for part in content if kind_of(part) in _PARTS)
    return tuple(text for text in texts if text)


def _text(content: Any, where: str, *, refusing: bool = True) -> str:
    """A text, or parts of text. Files are refused by name, or told of where they cannot be unsaid."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"{where}: expected a text or a list of parts", where)
    text = ""
    for at, part in enumerate(content):
        kind = kind_of(part) if isinstance(part, dict) else None
        if kind in ("input_image", "input_file", "input_audio"):
            if not refusing:
                text += not_shown(kind.removeprefix("input_"))
                continue
            raise _invalid(f"{where}[{at}]: {kind} is not supported: this server reads text only", where)
        found = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in _PARTS or not isinstance(found, str):
            raise _invalid(f"{where}[{at}]: found type {kind!r}, expected a part of text", where)
        text += found
    return text
