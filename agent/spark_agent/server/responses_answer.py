"""``POST /v1/responses``: what it answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from spark_agent.dialogue.events import Call, CallArguments, CallEnd, CallStart, Event, Reasoning, Text, merged
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ended, Idle, Output
from spark_agent.server.generation import Finished, TokenLogprob
from spark_agent.server.openai_chat import new_id
from spark_agent.server.responses_requests import ResponsesRequest
from spark_agent.server.responses_tools import ResponsesTools
from spark_agent.server.sse import named_event

__all__ = ["ResponsesAnswer"]


_BEGUN = ("created", "in_progress")
_KINDS = {Text: "output_text", Reasoning: "reasoning_text"}


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
        """What is being said and is told as it comes."""
        self._name: str | None = None
        """The tool that is being called."""

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
        for each in merged(events):
            item = self._called(each) if isinstance(each, Call) else _filled(_new(each), each.text)
            self.output.append(item)
        return self._response("completed", ended)

    async def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """The events of a streamed answer."""
        for kind in _BEGUN:
            yield self._event(f"response.{kind}", response=self._response("in_progress"))
        async for output in outputs:
            if isinstance(output, Idle):
                # An event: Codex ends a stream that has had none for five minutes.
                yield self._event("response.in_progress", response=self._response("in_progress"))
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

    def _call_begins(self, name: str) -> Iterator[bytes]:
        yield from self._close()
        self._name, self._text = name, ""
        if self._tools.streams(name):
            self._item = {**self._called(Call(name, "")), "status": "in_progress"}
            yield self._added(self._item)

    def _call_goes_on(self, text: str) -> Iterator[bytes]:
        self._text += text
        if self._item is not None:
            yield self._event("response.function_call_arguments.delta", **self._at(), delta=text)

    def _call_ends(self) -> Iterator[bytes]:
        item, self._name = self._item, None
        if item is not None:
            yield self._event(
                "response.function_call_arguments.done", **self._at(), name=item["name"], arguments=self._text
            )
            self._item = None
            yield self._done({**item, "arguments": self._text, "status": "completed"})

    def _call_at_once(self, call: Call) -> Iterator[bytes]:
        """A call of which the client wants another text than the model wrote."""
        item = self._called(call)
        if item["type"] == "custom_tool_call":
            yield self._added({**item, "input": "", "status": "in_progress"})
            place = {"item_id": item["id"], "output_index": len(self.output)}
            yield self._event("response.custom_tool_call_input.delta", **place, delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", **place, input=item["input"])
        else:
            yield self._added({**item, "arguments": {}, "status": "in_progress"})
        yield self._done(item)

    def _said(self, each: Event) -> Iterator[bytes]:
        if isinstance(each, CallStart):
            yield from self._call_begins(each.name)
        elif isinstance(each, CallArguments):
            yield from self._call_goes_on(each.text)
        elif isinstance(each, CallEnd) and self._name is not None:
            if self._item is None:
                yield from self._call_at_once(Call(self._name, self._text))
            yield from self._call_ends()
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
        yield self._done(_filled(item, self._text))

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._item["id"] if self._item else None, "output_index": len(self.output)}

    def _place(self) -> dict[str, Any]:
        return {**self._at(), "content_index": 0}

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self.output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self.output.append(item)
        return self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)


def _new(each: Text | Reasoning) -> dict[str, Any]:
    """An empty item for what is said."""
    item: dict[str, Any]
    if isinstance(each, Reasoning):
        item = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}
    else:
        item = {"type": "message", "id": new_id("msg_"), "role": "assistant", "content": []}
    return {**item, "status": "in_progress"}


def _part(item: dict[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _filled(item: dict[str, Any], text: str) -> dict[str, Any]:
    return {**item, "content": [_part(item, text)], "status": "completed"}
