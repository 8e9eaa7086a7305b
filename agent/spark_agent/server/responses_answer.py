"""``POST /v1/responses``: what it answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from spark_agent.dialogue.events import Call, Event, Reasoning, Text, merged
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ended, Idle, Output
from spark_agent.server.generation import Finished, TokenLogprob
from spark_agent.server.openai_chat import new_id
from spark_agent.server.responses_requests import ResponsesRequest
from spark_agent.server.responses_tools import ResponsesTools
from spark_agent.server.sse import KEEP_ALIVE, named_event

__all__ = ["ResponsesAnswer"]


_BEGUN = ("created", "in_progress")
_SAID_OF = {
    "function_call": ("arguments", "function_call_arguments", True),
    "custom_tool_call": ("input", "custom_tool_call_input", False),
    "tool_search_call": ("arguments", None, False),
}
"""By kind of call: the member that the model wrote, the kind of its events, and whether the last names the tool."""


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

    def __init__(self, model: str, body: ResponsesRequest, tools: ResponsesTools) -> None:
        self._tools = tools
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
            "error": {"code": error.code if error.status < 500 else "server_error", "message": str(error)}
            if error
            else None,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "output": list(self.output),
            "usage": _usage(ended.finished) if ended else None,
        }

    def whole(self, events: Sequence[Event], _tokens: Sequence[TokenLogprob], ended: Ended) -> dict[str, Any]:
        """The object of a whole answer."""
        for each in merged(list(events)):
            item = self._called(each) if isinstance(each, Call) else _filled(self._new(each)[0], each.text)
            self.output.append(item)
        return self._response("completed", ended)

    async def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """The events of a streamed answer."""
        for kind in _BEGUN:
            yield self._event(f"response.{kind}", response=self._response("in_progress"))
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

    def refused(self, error: ApiError) -> list[bytes]:
        """The events of an answer that never began."""
        begun = [self._event(f"response.{kind}", response=self._response("in_progress")) for kind in _BEGUN]
        return [*begun, self.failed(error, None)]

    def failed(self, error: ApiError, _request_id: str | None) -> bytes:
        """A failure after the status was sent: the stream's last events."""
        about = self._event("error", code=error.code, message=str(error), param=error.param)
        return about + self._event("response.failed", response=self._response("failed", error=error))

    def _event(self, kind: str, **members: Any) -> bytes:
        self._sequence += 1
        return named_event({"type": kind, "sequence_number": self._sequence, **members})

    def _called(self, call: Call) -> dict[str, Any]:
        return self._tools.item(call, new_id(""), new_id("call_"))

    def _new(self, each: Text | Reasoning) -> tuple[dict[str, Any], str]:
        """An empty item for what is said, and the kind of its parts' events."""
        item: dict[str, Any]
        if isinstance(each, Reasoning):
            item = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}
            return {**item, "status": "in_progress"}, "reasoning_text"
        item = {"type": "message", "id": new_id("msg_"), "role": "assistant", "content": []}
        return {**item, "status": "in_progress"}, "output_text"

    def _calling(self, call: Call) -> Iterator[bytes]:
        item = self._called(call)
        said, kind, named = _SAID_OF[item["type"]]
        yield self._added({**item, said: type(item[said])(), "status": "in_progress"})
        if kind is not None:
            place = {"item_id": item["id"], "output_index": len(self.output)}
            name = {"name": item["name"]} if named else {}
            yield self._event(f"response.{kind}.delta", **place, delta=item[said])
            yield self._event(f"response.{kind}.done", **place, **name, **{said: item[said]})
        yield self._done(item)

    def _said(self, each: Event) -> Iterator[bytes]:
        if isinstance(each, Call):
            yield from self._close()
            yield from self._calling(each)
            return
        item, kind = self._new(each)
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
        if item is None:
            return
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        yield self._event(f"response.{kind}.done", **self._place(), text=self._text, **more)
        yield self._event("response.content_part.done", **self._place(), part=_part(item, self._text))
        self._item = None
        yield self._done(_filled(item, self._text))

    def _place(self) -> dict[str, Any]:
        identifier = self._item["id"] if self._item else None
        return {"item_id": identifier, "output_index": len(self.output), "content_index": 0}

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self.output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self.output.append(item)
        return self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)


def _part(item: dict[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _filled(item: dict[str, Any], text: str) -> dict[str, Any]:
    return {**item, "content": [_part(item, text)], "status": "completed"}
