"""``POST /v1/responses``: what it answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from spark_agent.dialogue.events import Call, CallArguments, CallEnd, CallStart, Event, Part, Reasoning, Text, merged
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ended, Idle, Output
from spark_agent.server.generation import Finished, TokenLogprob
from spark_agent.server.openai_chat import new_id
from spark_agent.server.responses_requests import ResponsesRequest
from spark_agent.server.sse import KEEP_ALIVE, named_event

__all__ = ["ResponsesAnswer"]


def _usage(finished: Finished) -> dict[str, Any]:
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }


class ResponsesAnswer:
    """The shapes of one answer, whole or in events; afterwards ``output`` holds its items."""

    def __init__(self, model: str, body: ResponsesRequest) -> None:
        self.id = new_id("resp_")
        self.output: list[dict[str, Any]] = []
        self._base = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "text": body.text or {"format": {"type": "text"}},
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "metadata": body.metadata or {},
            "store": body.store is not False,
            "truncation": "disabled",
        }
        self._sequence = -1
        self._item: dict[str, Any] | None = None

    def _response(self, status: str, ended: Ended | None = None, error: ApiError | None = None) -> dict[str, Any]:
        incomplete = ended is not None and ended.reason == "length"
        return {
            **self._base,
            "status": "incomplete" if incomplete else status,
            "error": {"code": "server_error", "message": str(error)} if error else None,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "output": list(self.output),
            "usage": _usage(ended.finished) if ended else None,
        }

    def whole(self, events: Sequence[Event], _tokens: Sequence[TokenLogprob], ended: Ended) -> dict[str, Any]:
        """The object of a whole answer."""
        for each in merged(events):
            item = _new(each)
            self.output.append(_filled(item, "" if isinstance(each, Call) else each.text, status="completed"))
        return self._response("completed", ended)

    async def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """The events of a streamed answer."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        async for output in outputs:
            if isinstance(output, Idle):
                yield KEEP_ALIVE
            elif isinstance(output, Ended):
                for part in self._close():
                    yield part
                response = self._response("completed", output)
                yield self._event(f"response.{response['status']}", response=response)
            else:
                for each in output.events:
                    for part in self._said(each):
                        yield part

    def failed(self, error: ApiError, _request_id: str | None) -> bytes:
        """A failure after the status was sent: the stream's last events."""
        about = self._event("error", code=error.code, message=str(error), param=error.param)
        return about + self._event("response.failed", response=self._response("failed", error=error))

    def _event(self, kind: str, **members: Any) -> bytes:
        self._sequence += 1
        return named_event({"type": kind, "sequence_number": self._sequence, **members})

    def _said(self, each: Event) -> Iterator[bytes]:
        if isinstance(each, CallStart):
            yield from self._close()
            self._item, self._text = _new(Call(each.name, "")), ""
            yield self._added(self._item)
        elif isinstance(each, CallArguments):
            self._text += each.text
            yield self._event("response.function_call_arguments.delta", **self._at(), delta=each.text)
        elif isinstance(each, CallEnd) and self._item is not None:
            name = self._item["name"]
            yield self._event("response.function_call_arguments.done", **self._at(), name=name, arguments=self._text)
            item, self._item = self._item, None
            yield self._done({**item, "arguments": self._text, "status": "completed"})
        elif isinstance(each, Text | Reasoning):
            item, kind = _new(each), _KINDS[type(each)]
            if self._item is None or self._item["type"] != item["type"]:
                yield from self._close()
                self._item, self._text = item, ""
                yield self._added(item)
                yield self._event("response.content_part.added", **self._place(), part=_part(item, ""))
            self._text += each.text
            more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            yield self._event(f"response.{kind}.delta", **self._place(), delta=each.text, **more)

    def _close(self) -> Iterator[bytes]:
        item = self._item
        # A call that the token limit cut stays open: clients run a call when its item is done.
        if item is None or item["type"] == "function_call":
            return
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        yield self._event(f"response.{kind}.done", **self._place(), text=self._text, **more)
        yield self._event("response.content_part.done", **self._place(), part=_part(item, self._text))
        self._item = None
        yield self._done(_filled(item, self._text, status="completed"))

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._item["id"] if self._item else None, "output_index": len(self.output)}

    def _place(self) -> dict[str, Any]:
        return {**self._at(), "content_index": 0}

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self.output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self.output.append(item)
        return self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)


_KINDS = {Text: "output_text", Reasoning: "reasoning_text"}


def _new(each: Part) -> dict[str, Any]:
    """An empty item for what is said."""
    item: dict[str, Any]
    if isinstance(each, Call):
        item = {"type": "function_call", "id": new_id("fc_"), "call_id": new_id("call_"), "name": each.name}
        return {**item, "arguments": each.arguments, "status": "in_progress"}
    if isinstance(each, Reasoning):
        item = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}
    else:
        item = {"type": "message", "id": new_id("msg_"), "role": "assistant", "content": []}
    return {**item, "status": "in_progress"}


def _part(item: dict[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _filled(item: dict[str, Any], text: str, *, status: str) -> dict[str, Any]:
    if item["type"] == "function_call":
        return {**item, "status": status}
    return {**item, "content": [_part(item, text)], "status": status}
