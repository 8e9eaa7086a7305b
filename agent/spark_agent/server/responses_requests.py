"""``POST /v1/responses``: what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from spark_agent.dialogue.json_text import load_json
from spark_agent.dialogue.messages import Message, ToolCall
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ask
from spark_agent.server.openai_requests import tool_choice_of
from spark_agent.server.requests import ApiModel, tools_of
from spark_runtime.sampling import Sampling

__all__ = ["ResponsesRequest", "messages_of"]

_HOSTED = ("web_search", "image_generation", "file_search", "code_interpreter", "computer_use", "mcp", "tool_search")
"""Tools that OpenAI's servers run; coding tools list some always, and a model that does not know them asks for none."""
_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"})


class _Reasoning(ApiModel):
    effort: str | None = None


class ResponsesRequest(ApiModel):
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
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    reasoning: _Reasoning | None = None
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
            return self.input
        raise _invalid("input: expected a text or a list of items", "input")

    def ask(self, earlier: Sequence[Message]) -> Ask:
        """What is asked for, after an earlier conversation; raise :class:`ApiError`."""
        messages = [*earlier, *messages_of(self.items())]
        if self.instructions:
            messages.insert(0, Message("system", self.instructions))
        tools = tools_of([tool for at, value in enumerate(self.tools or ()) for tool in _tool(f"tools[{at}]", value)])
        schema, strict = self._schema()
        effort = self.reasoning.effort if self.reasoning else None
        return Ask(
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
            ),
            messages=tuple(messages),
            tools=tools,
            choice=tool_choice_of(self.tool_choice, {tool.name for tool in tools}, parallel=self.parallel_tool_calls),
            max_tokens=self.max_output_tokens,
            schema=schema,
            schema_strict=strict,
            template_options={} if effort is None else {"reasoning_effort": effort},
        )

    def _schema(self) -> tuple[object | None, bool]:
        form = (self.text or {}).get("format") or {"type": "text"}
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "text":
            return None, False
        if kind == "json_object":
            return {"type": "object"}, False
        if kind == "json_schema" and form.get("schema") is not None:
            return form["schema"], form.get("strict") is True
        raise _invalid("text.format: expected the type text, json_object, or json_schema with a schema", "text")


def _invalid(message: str, where: str) -> ApiError:
    return ApiError(400, message, "invalid_request", param=where)


def _tool(where: str, value: Any) -> list[tuple[str, Any]]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        return [(where, value)]
    if isinstance(kind, str) and kind.startswith(_HOSTED):
        return []
    message = f"{where}.type: found {kind!r}, expected 'function'"
    raise ApiError(400, message, "invalid_tool", param=where)


def messages_of(items: Sequence[Any]) -> list[Message]:
    """Items as messages: what an assistant thinks, says and calls in a row is one."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    for at, item in enumerate(items):
        where = f"input[{at}]"
        if not isinstance(item, dict):
            raise _invalid(f"{where}: expected an item, an object", where)
        message = _item(item, where, names)
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


def _item(item: dict[str, Any], where: str, names: dict[str, str]) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        role: Any = "system" if item.get("role") == "developer" else item.get("role")
        if role not in ("system", "user", "assistant"):
            raise _invalid(f"{where}.role: found {role!r}, expected user, assistant, system or developer", where)
        return Message(role, _text(item.get("content"), f"{where}.content"))
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        return Message("assistant", "", _text(parts, f"{where}.content"))
    identifier = item.get("call_id")
    if not isinstance(identifier, str) or kind not in ("function_call", "function_call_output"):
        expected = "a message, reasoning, function_call or function_call_output with its call_id"
        raise _invalid(f"{where}: found type {kind!r}, expected {expected}", where)
    if kind == "function_call_output":
        return Message(
            "tool", _text(item.get("output"), f"{where}.output"), call_id=identifier, name=names.get(identifier)
        )
    name, arguments = item.get("name"), item.get("arguments") or "{}"
    if not isinstance(name, str) or not isinstance(arguments, str) or not isinstance(load_json(arguments), dict):
        raise _invalid(f"{where}: expected a name, and arguments as JSON text of an object", where)
    names[identifier] = name
    return Message("assistant", "", calls=(ToolCall(identifier, name, arguments),))


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"{where}: expected a text or a list of parts", where)
    text = ""
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_image", "input_file", "input_audio"):
            raise _invalid(f"{where}[{at}]: {kind} is not supported: this server reads text only", where)
        found = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in _PARTS or not isinstance(found, str):
            raise _invalid(f"{where}[{at}]: found type {kind!r}, expected a part of text", where)
        text += found
    return text
