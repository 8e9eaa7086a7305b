"""OpenAI chat completion requests, as far as this server honours them.

What a client sends for other servers (unknown fields) is ignored, as the API's own servers do; what would change the
answer and is not supported is refused by name, never silently dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spark_runtime.sampling import Sampling

__all__ = ["ChatMessage", "ChatRequest", "TextPart"]

Role = Literal["system", "developer", "user", "assistant", "tool"]


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class TextPart(_Request):
    """A part of a message's content; only text."""

    type: Literal["text"]
    text: str


class ChatMessage(_Request):
    """One message."""

    role: Role
    content: str | list[TextPart]

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it: ``developer`` is the newer name of ``system``."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Request):
    """Options of a streamed answer."""

    include_usage: bool = False


class ChatRequest(_Request):
    """Body of ``POST /v1/chat/completions``."""

    model: str = ""
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    n: Literal[1] = 1
    # Refused by name below: an answer without them would look right and be wrong.
    tools: Any = None
    functions: Any = None
    logprobs: bool | None = None
    logit_bias: Any = None
    response_format: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        wanted = {name for name in ("tools", "functions", "logprobs", "logit_bias") if getattr(self, name)}
        wanted |= {name for name in ("frequency_penalty", "presence_penalty") if getattr(self, name)}
        if self.response_format is not None and self.response_format.get("type") != "text":
            wanted.add("response_format")
        if wanted:
            raise ValueError(f"not supported by this version: {', '.join(sorted(wanted))}")
        return self

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

    def sampling(self) -> Sampling:
        """Sampling parameters; the API's default temperature is 1."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
        )
