"""The HTTP surface: OpenAI chat completions, models, health."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Lifespan

from spark_agent.server.requests import ChatRequest
from spark_agent.server.sessions import lineage_of
from spark_agent.server.worker import BusyError, Finished, Generation, Piece, Worker
from spark_runtime.chat import ChatFormat
from spark_runtime.errors import ChatTemplateError, ContextFullError, SparkRuntimeError

__all__ = ["create_app"]

MAX_BODY_BYTES = 32 * 1024 * 1024
_CLIENT_CLOSED_REQUEST = 499  # nginx's code for a client that left; nobody reads it
_LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]


class _ApiError(Exception):
    """An answer in the OpenAI error shape."""

    def __init__(self, status: int, message: str, code: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _ChatApi:
    """Handlers that share the worker, the chat template and the model's name."""

    def __init__(self, worker: Worker, chat: ChatFormat, model: str, health: dict[str, Any]) -> None:
        self._worker = worker
        self._chat = chat
        self._model = model
        self._health = health
        self._started = int(time.time())

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok", **self._health, "waiting": self._worker.waiting})

    async def models(self, _request: Request) -> Response:
        entry = {"id": self._model, "object": "model", "created": self._started, "owned_by": "spark"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def chat_completions(self, request: Request) -> Response:
        body = _parse(await _read_body(request))
        generation = Generation(
            lineage=lineage_of(body.messages),
            tokens=self._tokens(body),
            sampling=body.sampling(),
            max_tokens=body.token_limit,
            stops=body.stops,
        )
        try:
            self._worker.submit(generation)
        except BusyError as error:
            raise _ApiError(503, "too many requests are waiting; try again in a moment", "busy") from error
        answer = f"chatcmpl-{uuid.uuid4().hex}"
        if body.stream:
            # The first event decides between an error status and a stream.
            results = generation.results()
            try:
                first = await anext(results)
            except SparkRuntimeError as error:
                raise _engine_error(error) from error
            chunks = self._chunks(answer, first, results, include_usage=body.stream_options.include_usage)
            return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(request, answer, generation)

    def _tokens(self, body: ChatRequest) -> list[int]:
        try:
            return self._chat.tokenize(self._chat.prompt([message.for_template() for message in body.messages]))
        except ChatTemplateError as error:
            raise _ApiError(400, _sentence(error), "chat_template", param="messages") from error

    async def _whole(self, request: Request, answer: str, generation: Generation) -> Response:
        text, finished = "", None
        try:
            async for event in generation.results():
                if isinstance(event, Finished):
                    finished = event
                else:
                    text += event.text
                    if await request.is_disconnected():
                        return Response(status_code=_CLIENT_CLOSED_REQUEST)
        except SparkRuntimeError as error:
            raise _engine_error(error) from error
        if finished is None:
            raise _ApiError(500, "the engine ended without a result", "engine")
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finished.reason, "logprobs": None}
        return JSONResponse(self._envelope(answer, "chat.completion", choices=[choice], usage=_usage(finished)))

    async def _chunks(
        self, answer: str, first: Piece | Finished, results: AsyncIterator[Piece | Finished], *, include_usage: bool
    ) -> AsyncIterator[bytes]:
        yield self._chunk(answer, {"role": "assistant", "content": ""}, None)
        event: Piece | Finished | None = first
        try:
            while event is not None:
                if isinstance(event, Finished):
                    yield self._chunk(answer, {}, event.reason)
                    if include_usage:
                        usage = self._envelope(answer, "chat.completion.chunk", choices=[], usage=_usage(event))
                        yield _sse(usage)
                else:
                    yield self._chunk(answer, {"content": event.text}, None)
                event = await anext(results, None)
            yield b"data: [DONE]\n\n"
        except SparkRuntimeError as error:
            # The status is sent; the error can only be the stream's last event.
            yield _sse(_engine_error(error).body())
        finally:
            await results.aclose()  # type: ignore[attr-defined]  # a generator, though typed as an iterator

    def _chunk(self, answer: str, delta: dict[str, str], finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return _sse(self._envelope(answer, "chat.completion.chunk", choices=[choice]))

    def _envelope(self, answer: str, kind: str, **members: object) -> dict[str, Any]:
        return {"id": answer, "object": kind, "created": int(time.time()), "model": self._model, **members}


def create_app(
    worker: Worker, chat: ChatFormat, *, model: str, health: dict[str, Any], lifespan: Lifespan[Starlette] | None = None
) -> Starlette:
    """The application; ``health`` is added to what ``/health`` answers."""
    api = _ChatApi(worker, chat, model, health)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/v1/models", api.models),
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        ],
        lifespan=lifespan,
        # A web page that rebinds its own name to 127.0.0.1 still sends that name here.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_LOOPBACK_NAMES)],
        exception_handlers={
            _ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            Exception: _answer_bug,
        },
    )


async def _answer_api_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, _ApiError):
        raise error
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return JSONResponse(_ApiError(error.status_code, message, code).body(), error.status_code, error.headers)


async def _answer_bug(_request: Request, _error: Exception) -> Response:
    # Starlette raises it again after this answer, so the log has the traceback.
    return JSONResponse(_ApiError(500, "an error inside the agent; see its log", "internal").body(), status_code=500)


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise _ApiError(413, f"the request is over {MAX_BODY_BYTES} bytes", "too_large")
    return bytes(body)


def _parse(body: bytes) -> ChatRequest:
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        reason = first["msg"].removeprefix("Value error, ")
        raise _ApiError(400, f"{where}: {reason}", "invalid_request", param=where) from error


def _engine_error(error: SparkRuntimeError) -> _ApiError:
    if isinstance(error, ContextFullError):
        return _ApiError(400, _sentence(error), "context_length_exceeded", param="messages")
    return _ApiError(500, _sentence(error), "engine")


def _sentence(error: SparkRuntimeError) -> str:
    return f"{error}: {error.hint}" if error.hint else str(error)


def _usage(finished: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.reused_tokens},
    }


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
