"""One shared bearer token before every route under ``/api``."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spark_service.problems import problem_response

__all__ = ["BearerToken"]


class BearerToken:
    """ASGI middleware: 401 unless a request under ``/api`` carries the token. Probes stay open."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it."""
        if scope["type"] != "http" or not _protected(scope["path"]) or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        response = problem_response(
            401,
            "unauthorized",
            "Authorization: found no valid token, expected Bearer with this service's token",
            field="header.Authorization",
            hint="send Authorization: Bearer TOKEN, as set on the service by SPARKMOE_SERVICE_TOKEN",
            headers={"WWW-Authenticate": 'Bearer realm="spark-service"'},
        )
        await response(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        # Bytes: compare_digest refuses non-ASCII text. Its time does not tell how much of a guess was right.
        return scheme.lower() == "bearer" and hmac.compare_digest(credentials.strip().encode(), self._token)


def _protected(path: str) -> bool:
    return path == "/api" or path.startswith("/api/")
