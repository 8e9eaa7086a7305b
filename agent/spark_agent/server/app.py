"""The HTTP surface: OpenAI's and Anthropic's dialects over one exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Lifespan

from spark_agent.dialogue.messages import Message
from spark_agent.server.access import Access
from spark_agent.server.anthropic_messages import MessagesAnswer
from spark_agent.server.anthropic_requests import CountRequest, MessagesRequest
from spark_agent.server.api_error import EXPECTED, ApiError, ContextExceededError
from spark_agent.server.aside import aside
from spark_agent.server.body import read
from spark_agent.server.body_budget import BodyBudget
from spark_agent.server.conversations import lineage_of
from spark_agent.server.exchange import Answering, Ask, Exchange, LineageOf, Opened, WorkloadOf
from spark_agent.server.model_names import ModelNames
from spark_agent.server.openai_chat import ChatAnswer
from spark_agent.server.openai_completions import CompletionAnswer, CompletionRequest
from spark_agent.server.openai_requests import ChatRequest
from spark_agent.server.prompting import Prompting
from spark_agent.server.responses_answer import ResponsesAnswer
from spark_agent.server.responses_requests import ResponsesRequest, messages_of
from spark_agent.server.responses_store import ResponsesStore
from spark_agent.server.streaming import NOT_KEPT, Answer, Leaving, Stream
from spark_agent.server.worker import Worker
from spark_runtime.chat import ChatFormat

__all__ = ["create_app"]

_CLIENT_CLOSED_REQUEST = 499  # nginx's code for a client that left; nobody reads it


class _Api:
    """Handlers, one an endpoint."""

    def __init__(
        self,
        worker: Worker,
        chat: ChatFormat,
        names: ModelNames,
        exchange: Exchange,
        health: dict[str, Any],
        stats: Callable[[], dict[str, Any]],
    ) -> None:
        self._worker = worker
        self._chat = chat
        self._names = names
        self._exchange = exchange
        self._store = ResponsesStore()
        self._health = health
        self._stats = stats

    async def root(self, _request: Request) -> Response:
        # Tools look here whether anything answers at an address, before they ask it for anything.
        return JSONResponse({"name": "spark-agent", "openai": "/v1", "anthropic": "/", "health": "/health"})

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok", **self._health, "waiting": self._worker.waiting})

    async def stats(self, _request: Request) -> Response:
        # It reads a file.
        return JSONResponse(await run_in_threadpool(self._stats))

    async def models(self, _request: Request) -> Response:
        return JSONResponse(self._names.listed())

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._names.entry(self._names.checked(request.path_params["name"])))

    async def chat_completions(self, request: Request) -> Response:
        body, size = await read(ChatRequest, request)
        model = self._names.checked(body.model)
        ask = await aside(body.ask, size=size)

        def shape(_: Answering) -> ChatAnswer:
            return ChatAnswer(model, include_usage=body.include_usage, logprobs=bool(body.logprobs))

        return await self._answer(request, ask, shape, stream=body.stream, named=body.model)

    async def completions(self, request: Request) -> Response:
        body, size = await read(CompletionRequest, request)
        model = self._names.checked(body.model)
        ask = await aside(body.ask, size=size)

        def shape(answering: Answering) -> CompletionAnswer:
            return CompletionAnswer(
                model,
                include_usage=body.include_usage,
                logprobs=body.logprobs is not None,
                echoed=self._echoed(ask, answering) if body.echo else "",
            )

        return await self._answer(request, ask, shape, stream=body.stream, named=body.model)

    def _echoed(self, ask: Ask, answering: Answering) -> str:
        if isinstance(ask.raw, str):
            return ask.raw
        return b"".join(map(self._chat.piece, answering.prompt_tokens)).decode(errors="replace")

    async def responses(self, request: Request) -> Response:
        body, size = await read(ResponsesRequest, request)
        model = self._names.checked(body.model)
        earlier: tuple[Message, ...] = ()
        if body.previous_response_id is not None:
            found = self._store.get(body.previous_response_id)
            if found is None:
                message = (
                    f"previous_response_id: {body.previous_response_id[:100]!r} is not kept (any more): send the input"
                )
                raise ApiError(404, message, "previous_response_not_found", param="previous_response_id")
            earlier = found
        tools = body.declared()
        answer = ResponsesAnswer(model, body, tools)
        ask = await aside(body.ask, earlier, tools, size=size)

        def keep() -> None:
            if body.store is not False:
                self._store.put(
                    answer.id, [*earlier, *messages_of(body.items(), tools), *messages_of(answer.output, tools)]
                )

        try:
            return await self._answer(request, ask, lambda _: answer, stream=body.stream, named=body.model, done=keep)
        except ContextExceededError as error:
            if not body.stream:
                raise
            # As OpenAI's servers do: clients of streams look for this one in the events, and shorten what they send.
            return StreamingResponse(iter(answer.refused(error)), media_type="text/event-stream", headers=NOT_KEPT)

    async def messages(self, request: Request) -> Response:
        body, size = await read(MessagesRequest, request)
        model = self._names.checked(body.model)
        ask = await aside(body.ask, size=size)

        def shape(answering: Answering) -> MessagesAnswer:
            return MessagesAnswer(model, len(answering.prompt_tokens), body.max_tokens)

        return await self._answer(request, ask, shape, stream=body.stream, named=body.model)

    async def count_tokens(self, request: Request) -> Response:
        body, size = await read(CountRequest, request)
        self._names.checked(body.model)
        ask = await aside(body.ask, size=size)
        return JSONResponse({"input_tokens": await self._exchange.count(ask)})

    async def _answer(
        self,
        request: Request,
        ask: Ask,
        shape: Callable[[Answering], Answer],
        *,
        stream: bool | None,
        named: str | None,
        done: Callable[[], None] = lambda: None,
    ) -> Response:
        answering = await self._exchange.prepare(ask, partial(_headers, request), named)
        leaving = Leaving(request.receive, answering.leave)
        try:
            answer = shape(answering)
            if not stream:
                whole = answer.whole(*await answering.whole())
                leaving.close()
                done()
                return JSONResponse(whole)
            return Stream(answer, answering, leaving, done)
        except BaseException as error:
            # Whatever ends the waiting, most of all a client that left, ends the computing.
            leaving.close()
            answering.cancel()
            if isinstance(error, EXPECTED):
                raise ApiError.of(error) from error
            raise


def _headers(request: Request) -> dict[str, str]:
    """By name in lower case; of several the first."""
    raw: Sequence[tuple[bytes, bytes]] = request.scope["headers"]
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)}


def _no_workload(_headers: Mapping[str, str], _messages: Sequence[Message], _model: str | None) -> str | None:
    return None


def create_app(
    worker: Worker,
    chat: ChatFormat,
    *,
    model: str,
    health: dict[str, Any],
    stats: Callable[[], dict[str, Any]],
    lifespan: Lifespan[Starlette] | None = None,
    token: str | None = None,
    aliases: Sequence[str] = (),
    lineage_of: LineageOf = lambda messages: partial(lineage_of, messages),
    workload_of: WorkloadOf = _no_workload,
    opened: Opened = lambda _: None,
    extra_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The application; ``health`` is added to what ``/health`` answers, ``stats`` gives what ``/spark/stats`` does.

    Without a ``token`` only this machine is answered; with one, whoever bears it. ``aliases`` are further names of the
    model, or shell patterns of names. ``lineage_of`` finds which conversation messages belong to, ``workload_of`` what
    they are counted under: from headers by name in lower case, the messages, and the name of the model that was asked
    for; ``None`` is the agent's default. ``opened`` is told the lineage of each request that was submitted.
    """
    exchange = Exchange(worker, Prompting(chat), lineage_of, workload_of, opened)
    api = _Api(worker, chat, ModelNames(model, aliases, n_ctx=chat.n_ctx), exchange, health, stats)
    return Starlette(
        routes=[
            # In the order in which they are looked through: where a model answers first.
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/messages", api.messages, methods=["POST"]),
            Route("/v1/responses", api.responses, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/", api.root),
            Route("/health", api.health),
            Route("/spark/stats", api.stats),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
            *extra_routes,
        ],
        lifespan=lifespan,
        middleware=[Middleware(Access, token=token), Middleware(BodyBudget)],
        exception_handlers={
            ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_bug,
        },
    )


async def _answer_api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return error.response(request.scope)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return ApiError(error.status_code, message, code, headers=error.headers).response(request.scope)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _answer_bug(request: Request, error: Exception) -> Response:
    # Starlette raises it again after this answer, so the log has the traceback, and the connection is closed then: said
    # beforehand, so that nobody sends another request over it meanwhile.
    answer = ApiError.of(error).response(request.scope)
    answer.headers["Connection"] = "close"
    return answer
