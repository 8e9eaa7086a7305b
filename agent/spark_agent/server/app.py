"""The HTTP surface: OpenAI chat completions, models, health."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Lifespan

from spark_agent.server.api_error import ApiError
from spark_agent.server.conversations import ChatTurn, lineage_of
from spark_agent.server.generation import AbandonedError, BusyError, Finished, Generation, Piece
from spark_agent.server.local_only import LocalOnly
from spark_agent.server.requests import ChatRequest, first_fault
from spark_agent.server.worker import Worker
from spark_runtime.chat import ChatFormat
from spark_runtime.errors import ChatTemplateError, SparkRuntimeError

__all__ = ["create_app"]

MAX_BODY_BYTES = 32 * 1024 * 1024
_CLIENT_CLOSED_REQUEST = 499  # nginx's code for a client that left; nobody reads it
_EXPECTED = (SparkRuntimeError, AbandonedError)
_T = TypeVar("_T")


class _ChatApi:
    """Handlers that share the worker, the chat template and the model's name."""

    def __init__(
        self,
        worker: Worker,
        chat: ChatFormat,
        model: str,
        health: dict[str, Any],
        stats: Callable[[], dict[str, Any]],
        lineage_of: Callable[[Sequence[ChatTurn]], str],
        workload_of: Callable[[Mapping[str, str], Sequence[ChatTurn], str | None], str | None],
    ) -> None:
        self._lineage_of = lineage_of
        self._workload_of = workload_of
        self._worker = worker
        self._chat = chat
        self._model = model
        self._health = health
        self._stats = stats
        self._started = int(time.time())

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok", **self._health, "waiting": self._worker.waiting})

    async def stats(self, _request: Request) -> Response:
        # It reads a file.
        return JSONResponse(await run_in_threadpool(self._stats))

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model:
            raise ApiError(404, f"no model {name!r}: this agent serves {self._model}", "model_not_found")
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._started, "owned_by": "spark"}

    async def chat_completions(self, request: Request) -> Response:
        body = _parse(await _read_body(request))
        workload = self._workload_of(request.headers, body.messages, body.model)
        # A long conversation takes a while to tokenise, and others are being answered meanwhile.
        tokens = await run_in_threadpool(self._tokens, body)
        generation = Generation(
            lineage=await run_in_threadpool(self._lineage_of, body.messages),
            workload=workload,
            tokens=tokens,
            sampling=body.sampling(),
            max_tokens=body.token_limit,
            stops=body.stops,
        )
        try:
            self._worker.submit(generation)
        except BusyError as error:
            raise ApiError(
                503, "too many requests are waiting; try again in a moment", "busy", headers={"Retry-After": "1"}
            ) from error
        answer = _Answer(self._model, include_usage=body.include_usage)
        results = generation.results()
        try:
            if not body.stream:
                return JSONResponse(await _unless_gone(request, answer.whole(results)))
            # The first event decides between an error status and a stream.
            first = await _unless_gone(request, anext(results))
        except _EXPECTED as error:
            raise ApiError.of(error) from error
        except BaseException:
            # Whatever ends the waiting, most of all a client that left, ends the computing.
            generation.cancelled.set()
            raise
        return StreamingResponse(
            answer.chunks(first, results),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
            background=BackgroundTask(generation.cancelled.set),
        )

    def _tokens(self, body: ChatRequest) -> list[int]:
        try:
            return self._chat.tokenize(self._chat.prompt([message.for_template() for message in body.messages]))
        except ChatTemplateError as error:
            raise ApiError(400, str(ApiError.of(error)), "chat_template", param="messages") from error


class _Answer:
    """The shapes of one answer, whole or in chunks."""

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self._envelope = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    async def whole(self, results: AsyncIterator[Piece | Finished]) -> dict[str, Any]:
        text = ""
        async for event in results:
            if isinstance(event, Finished):
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "message": message, "finish_reason": event.reason, "logprobs": None}
                return {**self._envelope, "object": "chat.completion", "choices": [choice], "usage": _usage(event)}
            text += event.text
        raise RuntimeError("the generation ended without a result")

    async def chunks(self, first: Piece | Finished, results: AsyncIterator[Piece | Finished]) -> AsyncIterator[bytes]:
        event: Piece | Finished | None = first
        try:
            yield self._chunk({"role": "assistant", "content": ""})
            while event is not None:
                if isinstance(event, Finished):
                    yield self._chunk({}, event.reason)
                    if self._include_usage:
                        yield self._event(choices=[], usage=_usage(event))
                else:
                    yield self._chunk({"content": event.text})
                event = await anext(results, None)
            yield b"data: [DONE]\n\n"
        except Exception as error:
            # The status is sent; the error can only be the stream's last event.
            yield _sse(ApiError.of(error).body())
            if not isinstance(error, _EXPECTED):
                raise  # the log gets the traceback

    def _chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return self._event(choices=[choice], **({"usage": None} if self._include_usage else {}))

    def _event(self, **members: object) -> bytes:
        return _sse({**self._envelope, "object": "chat.completion.chunk", **members})


def create_app(
    worker: Worker,
    chat: ChatFormat,
    *,
    model: str,
    health: dict[str, Any],
    stats: Callable[[], dict[str, Any]],
    lifespan: Lifespan[Starlette] | None = None,
    lineage_of: Callable[[Sequence[ChatTurn]], str] = lineage_of,
    workload_of: Callable[[Mapping[str, str], Sequence[ChatTurn], str | None], str | None] = lambda *_: None,
    extra_routes: Sequence[Route] = (),
) -> Starlette:
    """The application; ``health`` is added to what ``/health`` answers, ``stats`` gives what ``/spark/stats`` does.

    ``lineage_of`` says which conversation messages belong to, ``workload_of`` what they are counted under: from
    headers by name in lower case, the messages, and the name of the model that was asked for.
    """
    api = _ChatApi(worker, chat, model, health, stats, lineage_of, workload_of)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/spark/stats", api.stats),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            *extra_routes,
        ],
        lifespan=lifespan,
        middleware=[Middleware(LocalOnly)],
        exception_handlers={
            ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_bug,
        },
    )


async def _answer_api_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return error.response()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return ApiError(error.status_code, message, code, headers=error.headers).response()


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _answer_bug(_request: Request, error: Exception) -> Response:
    # Starlette raises it again after this answer, so the log has the traceback.
    return ApiError.of(error).response()


async def _unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The work's result; when the client leaves first, the work is cancelled and :class:`ClientDisconnect` raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request) -> bytes:
    too_large = ApiError(413, f"the request is over {MAX_BODY_BYTES} bytes", "too_large")
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return bytes(body)


def _parse(body: bytes) -> ChatRequest:
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        where, reason = first_fault(error)
        raise ApiError(400, f"{where or 'body'}: {reason}", "invalid_request", param=where) from error


def _usage(finished: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.reused_tokens},
    }


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
