"""``POST /v1/messages``: what it answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from spark_agent.dialogue.events import Call, CallArguments, CallEnd, CallStart, Event, Part, Reasoning, Text, merged
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ended, Idle, Output
from spark_agent.server.generation import Finished, TokenLogprob
from spark_agent.server.openai_chat import new_id
from spark_agent.server.sse import named_event

__all__ = ["MessagesAnswer"]

_PING = named_event({"type": "ping"})


def _usage(finished: Finished) -> dict[str, int]:
    return {
        "input_tokens": finished.prompt_tokens - finished.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": finished.reused_tokens,
        "output_tokens": finished.completion_tokens,
    }


def _stop(ended: Ended, max_tokens: int) -> dict[str, str | None]:
    stop = ended.finished.stop
    if ended.reason == "length" and ended.finished.completion_tokens < max_tokens:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "stop_sequence" if stop else "end_turn"}
    return {"stop_reason": reasons[ended.reason], "stop_sequence": stop if ended.reason == "stop" else None}


def _tool_use(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": new_id("toolu_"), "name": name, "input": arguments}


class MessagesAnswer:
    """The shapes of one answer, whole or in events."""

    def __init__(self, model: str, prompt_tokens: int, max_tokens: int) -> None:
        self._message = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._open: str | None = None
        self._index = -1

    def whole(self, events: Sequence[Event], _tokens: Sequence[TokenLogprob], ended: Ended) -> dict[str, Any]:
        """The object of a whole answer."""
        content = [self._block(each) for each in merged(events)]
        return {**self._message, "content": content, **_stop(ended, self._max_tokens), "usage": _usage(ended.finished)}

    def _block(self, each: Part) -> dict[str, Any]:
        if isinstance(each, Call):
            return _tool_use(each.name, json.loads(each.arguments))
        if isinstance(each, Reasoning):
            return {"type": "thinking", "thinking": each.text, "signature": ""}
        return {"type": "text", "text": each.text}

    async def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """The events of a streamed answer."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        started: dict[str, Any] = {
            **self._message,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield named_event({"type": "message_start", "message": started})
        yield _PING
        async for output in outputs:
            if isinstance(output, Idle):
                yield _PING
            elif isinstance(output, Ended):
                # A call that the token limit cut stays open: clients run a call when its block is closed.
                if self._open != "tool_use":
                    for part in self._close():
                        yield part
                yield named_event(
                    {
                        "type": "message_delta",
                        "delta": _stop(output, self._max_tokens),
                        "usage": _usage(output.finished),
                    }
                )
                yield named_event({"type": "message_stop"})
            else:
                for each in output.events:
                    for part in self._said(each):
                        yield part

    def failed(self, error: ApiError, request_id: str | None) -> bytes:
        """A failure after the status was sent: the stream's last event."""
        return named_event(error.body("anthropic", request_id))

    def _said(self, each: Event) -> Iterator[bytes]:
        if isinstance(each, CallStart):
            yield from self._close()
            yield from self._begin(_tool_use(each.name, {}))
        elif isinstance(each, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": each.text})
        elif isinstance(each, CallEnd):
            yield from self._close()
        elif isinstance(each, Text | Reasoning):
            kind = "thinking" if isinstance(each, Reasoning) else "text"
            if self._open != kind:
                yield from self._close()
                yield from self._begin(self._block(type(each)("")))
            yield self._delta({"type": f"{kind}_delta", kind: each.text})

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        self._index += 1
        self._open = block["type"]
        yield named_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield named_event({"type": "content_block_stop", "index": self._index})
