"""OpenAI chat completion requests, as far as this server honours them.

What a client sends for other servers (unknown fields) is ignored, as the API's own servers do; what would change the
answer and is not supported is refused by name, never silently dropped. ``null`` is the same as leaving a field out,
because clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator

from spark_runtime.sampling import Sampling

__all__ = ["ChatMessage", "ChatRequest", "StreamOptions", "TextPart", "first_fault"]

Role = Literal["system", "developer", "user", "assistant", "tool"]
_STRING, _LIST = "<string>", "<list>"


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class TextPart(_Request):
    """A part of a message's content; only text."""

    type: Literal["text"]
    text: str


def _string_or_list(value: object) -> str:
    return _LIST if isinstance(value, list) else _STRING


def _refuse(value: object) -> object:
    if value:
        raise ValueError("not supported by this version")
    return value


class ChatMessage(_Request):
    """One message."""

    role: Role
    content: Annotated[
        Annotated[str, Tag(_STRING)] | Annotated[list[TextPart], Tag(_LIST)], Discriminator(_string_or_list)
    ]
    tool_calls: Any = None
    function_call: Any = None

    _refused = field_validator("tool_calls", "function_call")(_refuse)

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it: ``developer`` is the newer name of ``system``."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


class StreamOptions(_Request):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ChatRequest(_Request):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    seed: int | None = None
    stop: (
        Annotated[
            Annotated[str, Tag(_STRING)] | Annotated[list[str], Field(max_length=4), Tag(_LIST)],
            Discriminator(_string_or_list),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    # Refused by name: an answer without them would look right and be wrong.
    tools: Any = None
    functions: Any = None
    logprobs: Any = None
    logit_bias: Any = None
    response_format: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None

    _refused = field_validator("tools", "functions", "logprobs", "logit_bias", "frequency_penalty", "presence_penalty")(
        _refuse
    )

    @field_validator("response_format")
    @classmethod
    def _only_text(cls, value: object) -> object:
        return _refuse(None if value == {"type": "text"} else value)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; ``None`` leaves it to the context."""
        return self.max_completion_tokens or self.max_tokens

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

    def sampling(self) -> Sampling:
        """Sampling parameters; the API's default temperature is 1."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
        )


def first_fault(error: ValidationError) -> tuple[str | None, str]:
    """The field at fault, as ``messages[0].content`` (``None``: the whole body), and what is wrong with it."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            where += f"[{part}]"
        elif part not in {_STRING, _LIST}:
            where += f".{part}" if where else part
    return where or None, fault["msg"].removeprefix("Value error, ")
