"""Counts every request by route and status, whatever becomes of it, and serves ``/metrics``."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_agent.server.activity import Activity
from spark_agent.server.metrics import CONTENT_TYPE_LATEST, Metrics

__all__ = ["Observed", "metrics_route"]

_OTHER = "other"
_UNANSWERED = "unanswered"
"""The client left first, or the server ended."""


class Observed:
    """Wraps the application. Routes are told by their pattern: what a client asks for otherwise is ``other``."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], activity: Activity) -> None:
        self._app = app
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._activity = activity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and note the status that is sent, once."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, noted = _UNANSWERED, False

        def note() -> None:
            nonlocal noted
            if not noted:
                noted = True
                self._activity.request(self._route(scope), status)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            elif not message.get("more_body", False):
                note()  # Before its end is sent: whoever has an answer finds it in the numbers.
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            note()

    def _route(self, scope: Scope) -> str:
        return next((route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE), _OTHER)


def metrics_route(metrics: Metrics) -> Route:
    """``GET /metrics``."""

    async def answer(_request: Request) -> Response:
        return Response(await run_in_threadpool(metrics.text), media_type=CONTENT_TYPE_LATEST)

    return Route("/metrics", answer)
