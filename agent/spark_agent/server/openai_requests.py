"""``POST /v1/chat/completions``: what it takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from spark_agent.dialogue.json_text import load_json
from spark_agent.dialogue.messages import Message, ToolCall, ToolChoice
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ask
from spark_agent.server.generation import MAX_TOP_LOGPROBS
from spark_agent.server.reasoning import Reasoned
from spark_agent.server.requests import (
    LIST,
    MAX_MESSAGES,
    STRING,
    ApiModel,
    Sampled,
    newest_question,
    not_shown,
    refuse,
    string_or_list,
    tools_of,
)
from spark_runtime.sampling import Sampling

__all__ = ["ChatMessage", "ChatRequest", "ContentPart", "sampling_of", "tool_choice_of"]

Role = Literal["system", "developer", "user", "assistant", "tool"]


_FILES = {"image_url": "image", "input_audio": "audio", "file": "file"}


class ContentPart(ApiModel):
    """A part of a message's content: text, or a file that cannot be read."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str | None:
        """Its text; ``None`` of a file."""
        return None if self.type in _FILES else self.text or self.refusal or ""

    def shown(self, where: str, *, refusing: bool) -> str:
        """Its text; a file is refused, or told of."""
        if self.said is not None:
            return self.said
        if refusing:
            message = f"{where}.type: {self.type} is not supported: this server reads text only"
            raise ApiError(400, message, "invalid_request", param=f"{where}.type")
        return not_shown(_FILES[self.type])


class _CalledFunction(ApiModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: str = "{}"


class _Call(ApiModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction

    def neutral(self, where: str) -> ToolCall:
        arguments = self.function.arguments.strip() or "{}"
        if not isinstance(load_json(arguments), dict):
            raise ApiError(
                400, f"{where}.function.arguments: expected JSON text of an object", "invalid_request", param=where
            )
        return ToolCall(self.id, self.function.name, arguments)


class ChatMessage(ApiModel):
    """One message."""

    role: Role
    content: (
        Annotated[Annotated[str, Tag(STRING)] | Annotated[list[ContentPart], Tag(LIST)], Discriminator(string_or_list)]
        | None
    ) = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None

    _refused = field_validator("function_call")(refuse)

    def _text(self, where: str, *, refusing: bool) -> str:
        if isinstance(self.content, list):
            return "".join(part.shown(f"{where}[{at}]", refusing=refusing) for at, part in enumerate(self.content))
        return self.content or ""

    def neutral(self, where: str, names: dict[str, str], *, refusing: bool = True) -> Message:
        """The message in no dialect; ``names`` are the functions called so far, by the call's id.

        ``refusing`` says whether its files are refused, or only told of, as those are that a tool returned.
        """
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ApiError(400, f"{where}.content: expected text", "invalid_request", param=f"{where}.content")
        if self.tool_calls and self.role != "assistant":
            message = f"{where}.tool_calls: found in a message of {self.role}, expected only in one of assistant"
            raise ApiError(400, message, "invalid_request", param=f"{where}.tool_calls")
        calls = tuple(call.neutral(f"{where}.tool_calls[{at}]") for at, call in enumerate(self.tool_calls or ()))
        names |= {call.id: call.name for call in calls}
        role = "system" if self.role == "developer" else self.role
        reasoning = self.reasoning_content or self.reasoning or ""
        name = names.get(self.tool_call_id or "", self.name)
        text = self._text(f"{where}.content", refusing=refusing and role != "tool")
        parts = self.content if isinstance(self.content, list) else []
        blocks = tuple(said for part in parts if (said := part.said))
        return Message(role, text, reasoning, calls, self.tool_call_id, name, blocks)


class _JsonSchema(ApiModel):
    name: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool | None = None


class _ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class ChatRequest(Sampled, Reasoned):
    """The body."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: _ResponseFormat | None = None
    tool_stream: bool | None = None
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None
    # Refused by name: an answer without them would look right and be wrong.
    functions: Any = None
    function_call: Any = None
    audio: Any = None

    _refused = field_validator("functions", "function_call", "audio")(refuse)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; ``None`` leaves it to the context."""
        return self.max_completion_tokens or self.max_tokens

    def sampling(self) -> Sampling:
        """Sampling parameters; the API's default temperature is 1."""
        return sampling_of(self)

    def ask(self) -> Ask:
        """What is asked for; raise :class:`ApiError`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs", "invalid_request", param="top_logprobs")
        names: dict[str, str] = {}
        newest = newest_question([each.role for each in self.messages])
        messages = tuple(
            each.neutral(f"messages[{at}]", names, refusing=at >= newest) for at, each in enumerate(self.messages)
        )
        tools = tools_of([_function_in(f"tools[{at}]", value) for at, value in enumerate(self.tools or ())])
        schema, strict = self._schema()
        return Ask(
            sampling=self.sampling(),
            messages=messages,
            tools=tools,
            choice=tool_choice_of(self.tool_choice, {tool.name for tool in tools}, parallel=self.parallel_tool_calls),
            max_tokens=self.token_limit,
            stops=self.stops,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            schema=schema,
            schema_strict=strict,
            reasoning_in_text=self.reasoning_format == "none",
            reasoning=self.thought(),
            streamed_calls=frozenset(tool.name for tool in tools if self.tool_stream),
        )

    def _schema(self) -> tuple[object | None, bool]:
        form = self.response_format
        if form is None or form.type == "text":
            return None, False
        if form.type == "json_object":
            return {"type": "object"}, False
        if form.json_schema is None or form.json_schema.schema_ is None:
            message = "response_format.json_schema.schema: expected a JSON schema"
            raise ApiError(400, message, "invalid_request", param="response_format")
        return form.json_schema.schema_, bool(form.json_schema.strict)


def sampling_of(body: Sampled) -> Sampling:
    """Sampling parameters of a body; the API's default temperature is 1."""
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        top_k=body.top_k or 0,
        min_p=body.min_p or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=body.biases(),
    )


def _function_in(where: str, value: Any) -> tuple[str, Any]:
    kind = value.get("type", "function") if isinstance(value, dict) else None
    if kind != "function":
        raise ApiError(400, f"{where}.type: found {kind!r}, expected 'function'", "invalid_tool", param=where)
    return f"{where}.function", value.get("function")


def tool_choice_of(value: Any, tools: set[str], *, parallel: bool | None) -> ToolChoice:
    """A choice from ``auto``, ``none``, ``required`` or an object that names a function."""
    several = parallel is not False
    if value is None:
        return ToolChoice(parallel=several)
    if value in ("auto", "none", "required"):
        return ToolChoice(value, parallel=several)
    if isinstance(value, dict) and value.get("type") == "function":
        inner = value.get("function")
        name = inner.get("name") if isinstance(inner, dict) else value.get("name")
        if isinstance(name, str) and name in tools:
            return ToolChoice("required", name, parallel=False)
        message = f"tool_choice: found {name!r}, expected the name of one of the tools"
        raise ApiError(400, message, "invalid_request", param="tool_choice")
    raise ApiError(
        400,
        "tool_choice: expected auto, none, required, or an object that names a function",
        "invalid_request",
        param="tool_choice",
    )
