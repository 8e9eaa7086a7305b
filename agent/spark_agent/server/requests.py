"""What requests of all dialects share.

What a client sends for other servers (unknown fields) is ignored, as the API's own servers do; what would change the
answer and is not supported is refused by name, never silently dropped. ``null`` is the same as leaving a field out,
because clients send it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from spark_agent.dialogue.call_grammar import check_tool
from spark_agent.dialogue.json_grammar import SchemaError
from spark_agent.dialogue.messages import Tool
from spark_agent.server.api_error import ApiError

__all__ = [
    "MAX_MESSAGES",
    "ApiModel",
    "Sampled",
    "StreamOptions",
    "first_fault",
    "kind_of",
    "newest_question",
    "not_shown",
    "refuse",
    "string_or_list",
    "tools_of",
]

STRING, LIST = "<string>", "<list>"
MAX_TOOLS = 512
MAX_MESSAGES = 100_000
"""Each takes a kilobyte here, and several tokens of a context; 32 MiB can hold a million."""
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_HIDDEN = re.compile(r"<.*>|function-.*|is-instance.*")
"""Names of union members, which are ours and no part of the request."""


class ApiModel(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


def string_or_list(value: object) -> str:
    """Which of the two a value is meant to be."""
    return LIST if isinstance(value, list) else STRING


def refuse(value: object) -> object:
    """Refuse what is not empty; as a validator."""
    if value:
        raise ValueError("not supported by this version")
    return value


def kind_of(part: Mapping[str, Any], default: str | None = None) -> str | None:
    """What a part of a request says it is; what is no text is told as one, which is no kind's name."""
    kind = part.get("type", default)
    return kind if kind is None or isinstance(kind, str) else repr(kind)[:100]


def newest_question(roles: Sequence[str | None]) -> int:
    """Which of the messages by these roles is the user's latest, where a file is refused; -1: none of them."""
    return max((at for at, role in enumerate(roles) if role == "user"), default=-1)


def not_shown(kind: str) -> str:
    """What stands for a file of this kind that a tool returned, or that came with an earlier question.

    Every later request repeats it, so to refuse it would end the conversation for good; the model is told instead. Only
    the person who sends a file now is refused.
    """
    return f"[{kind}: not shown, as this server reads text only]"


class StreamOptions(ApiModel):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class Sampled(ApiModel):
    """What OpenAI's chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    seed: int | None = None
    stop: (
        Annotated[
            Annotated[str, Tag(STRING)] | Annotated[list[str], Field(max_length=16), Tag(LIST)],
            Discriminator(string_or_list),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` by token id; raise :class:`ApiError` for keys that are none."""
        found = []
        for key, bias in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ApiError(
                    400, f"logit_bias: found {key[:40]!r}, expected token ids", "invalid_request", param="logit_bias"
                )
            found.append((int(key), bias))
        return tuple(found)


class _Function(ApiModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def tools_of(functions: list[tuple[str, Any]]) -> tuple[Tool, ...]:
    """Tools from ``(where, {name, description, parameters, strict})``; raise :class:`ApiError` that names the tool."""
    if len(functions) > MAX_TOOLS:
        raise ApiError(400, f"tools: found {len(functions)}, expected at most {MAX_TOOLS}", "invalid_request")
    tools: dict[str, Tool] = {}
    for where, value in functions:
        name = value.get("name") if isinstance(value, dict) else None
        shown = f"{where} ({name[:130]})" if isinstance(name, str) else where
        try:
            function = _Function.model_validate(value)
            if not _TOOL_NAME.fullmatch(function.name):
                raise SchemaError("name: expected letters, digits, '_', '-', '.' or ':', at most 128")
            if function.name in tools:
                raise SchemaError("name: another tool has it")
            tool = Tool(function.name, function.description or "", function.parameters or {}, bool(function.strict))
            check_tool(tool)
        except ValidationError as error:
            field, reason = first_fault(error)
            raise _broken(shown, f"{field or 'tool'}: {reason}", where) from error
        except SchemaError as error:
            raise _broken(shown, str(error).replace("schema", "parameters", 1), where) from error
        tools[tool.name] = tool
    return tuple(tools.values())


def _broken(shown: str, reason: str, where: str) -> ApiError:
    return ApiError(400, f"{shown}: {reason}", "invalid_tool", param=where)


def first_fault(error: ValidationError) -> tuple[str | None, str]:
    """The field at fault, as ``messages[0].content`` (``None``: the whole body), and what is wrong with it."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            where += f"[{part}]"
        elif not _HIDDEN.fullmatch(part):
            where += f".{part}" if where else part
    return where or None, fault["msg"].removeprefix("Value error, ")
