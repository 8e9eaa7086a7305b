"""``POST /v1/chat/completions``: what it answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from spark_agent.dialogue.events import Call, CallArguments, CallStart, Event, Reasoning, Text, merged
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ended, Idle, Output
from spark_agent.server.generation import Finished, TokenLogprob
from spark_agent.server.sse import KEEP_ALIVE, event

__all__ = ["ChatAnswer", "new_id", "usage_of"]


def new_id(prefix: str) -> str:
    """A new identifier."""
    return f"{prefix}{secrets.token_hex(16)}"


def usage_of(finished: Finished) -> dict[str, Any]:
    """Usage, as chat and completions tell it."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.reused_tokens},
    }


class ChatAnswer:
    """The shapes of one answer, whole or in chunks."""

    def __init__(self, model: str, *, include_usage: bool, logprobs: bool) -> None:
        self._envelope = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._calls = 0

    def whole(self, events: Sequence[Event], tokens: Sequence[TokenLogprob], ended: Ended) -> dict[str, Any]:
        """The object of a whole answer."""
        parts = merged(events)
        text = "".join(each.text for each in parts if isinstance(each, Text))
        reasoning = "".join(each.text for each in parts if isinstance(each, Reasoning))
        calls = [_call(each.name, each.arguments) for each in parts if isinstance(each, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": ended.reason,
            "logprobs": _logprobs(tokens) if self._logprobs else None,
        }
        return {
            **self._envelope,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage_of(ended.finished),
        }

    async def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """The events of a streamed answer."""
        yield self._chunk({"role": "assistant", "content": ""})
        async for output in outputs:
            if isinstance(output, Idle):
                yield KEEP_ALIVE
            elif isinstance(output, Ended):
                yield self._chunk({}, output.reason)
                if self._include_usage:
                    yield self._event(choices=[], usage=usage_of(output.finished))
            else:
                deltas = [delta for each in output.events if (delta := self._delta(each))]
                if output.tokens and not deltas:
                    deltas = [{}]
                for at, delta in enumerate(deltas):
                    yield self._chunk(delta, tokens=output.tokens if at == 0 else ())
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError, _request_id: str | None) -> bytes:
        """A failure after the status was sent: the stream's last event."""
        return event(error.body())

    def _delta(self, each: Event) -> dict[str, Any]:
        if isinstance(each, Reasoning):
            return {"reasoning_content": each.text}
        if isinstance(each, Text):
            return {"content": each.text}
        if isinstance(each, CallStart):
            self._calls += 1
            return {"tool_calls": [{"index": self._calls - 1, **_call(each.name, "")}]}
        if isinstance(each, CallArguments):
            return {"tool_calls": [{"index": self._calls - 1, "function": {"arguments": each.text}}]}
        return {}

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, tokens: Sequence[TokenLogprob] = ()
    ) -> bytes:
        logprobs = _logprobs(tokens) if self._logprobs and tokens else None
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return self._event(choices=[choice], **({"usage": None} if self._include_usage else {}))

    def _event(self, **members: object) -> bytes:
        return event({**self._envelope, "object": "chat.completion.chunk", **members})


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        {
            **_spelled(each.piece, each.logprob),
            "top_logprobs": [_spelled(piece, logprob) for _, piece, logprob in each.top],
        }
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def _spelled(piece: bytes, logprob: float) -> dict[str, Any]:
    # JSON has no infinity; the API's own servers say -9999 for a token that cannot be.
    return {"token": piece.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(piece)}
