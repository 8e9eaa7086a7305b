"""``POST /v1/completions``: a prompt as it is, without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator

from spark_agent.dialogue.events import Event, Text
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ask, Ended, Idle, Output
from spark_agent.server.generation import TokenLogprob
from spark_agent.server.openai_chat import new_id, usage_of
from spark_agent.server.openai_requests import sampling_of
from spark_agent.server.requests import Sampled, refuse
from spark_agent.server.sse import KEEP_ALIVE, event

__all__ = ["CompletionAnswer", "CompletionRequest"]

MAX_LOGPROBS = 5
_DEFAULT_MAX_TOKENS = 16


class CompletionRequest(Sampled):
    """The body."""

    prompt: Any = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    # Refused by name: an answer without it would look right and be wrong.
    suffix: Any = None

    _refused = field_validator("suffix")(refuse)

    def ask(self) -> Ask:
        """What is asked for; raise :class:`ApiError`."""
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "echo: not supported together with logprobs", "invalid_request", param="echo")
        return Ask(
            sampling=sampling_of(self),
            raw=self.raw(),
            max_tokens=self.max_tokens or _DEFAULT_MAX_TOKENS,
            stops=self.stops,
            top_logprobs=self.logprobs,
        )

    def raw(self) -> str | tuple[int, ...]:
        """The one prompt: text, token ids, or a list of one of these."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return tuple(prompt)
        several = isinstance(prompt, list) and len(prompt) > 1
        found = f"found {len(prompt)} prompts, " if several else ""
        message = f"prompt: {found}expected one text, or one list of token ids"
        raise ApiError(400, message, "invalid_request", param="prompt")


class CompletionAnswer:
    """The shapes of one answer, whole or in chunks; ``echoed`` comes before the text."""

    def __init__(self, model: str, *, include_usage: bool, logprobs: bool, echoed: str) -> None:
        self._envelope = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._echoed = echoed
        self._offset = 0

    def whole(self, events: Sequence[Event], tokens: Sequence[TokenLogprob], ended: Ended) -> dict[str, Any]:
        """The object of a whole answer."""
        text = self._echoed + "".join(each.text for each in events if isinstance(each, Text))
        choice = self._choice(text, tokens, ended.reason)
        return {**self._envelope, "choices": [choice], "usage": usage_of(ended.finished)}

    async def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """The events of a streamed answer."""
        if self._echoed:
            yield self._event(self._choice(self._echoed, (), None))
        async for output in outputs:
            if isinstance(output, Idle):
                yield KEEP_ALIVE
            elif isinstance(output, Ended):
                yield self._event(self._choice("", (), output.reason))
                if self._include_usage:
                    yield event({**self._envelope, "choices": [], "usage": usage_of(output.finished)})
            else:
                text = "".join(each.text for each in output.events if isinstance(each, Text))
                yield self._event(self._choice(text, output.tokens, None))
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError, _request_id: str | None) -> bytes:
        """A failure after the status was sent: the stream's last event."""
        return event(error.body())

    def _event(self, choice: dict[str, Any]) -> bytes:
        return event({**self._envelope, "choices": [choice], **({"usage": None} if self._include_usage else {})})

    def _choice(self, text: str, tokens: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        logprobs = self._old_logprobs(tokens) if self._logprobs and (tokens or reason) else None
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _old_logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        pieces = [each.piece.decode(errors="replace") for each in tokens]
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(piece)
        return {
            "tokens": pieces,
            "token_logprobs": [max(each.logprob, -9999.0) for each in tokens],
            "top_logprobs": [
                {piece.decode(errors="replace"): max(logprob, -9999.0) for _, piece, logprob in each.top}
                for each in tokens
            ],
            "text_offset": offsets,
        }
