"""Who is answered: without a token only programs of this machine, with one whoever bears it.

Also gives every request the id that its answer bears.
"""

from __future__ import annotations

import hmac
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_agent.server.api_error import ApiError
from spark_schemas.local_address import foreign_header

__all__ = ["Access"]

_OPEN = frozenset({"/", "/health"})
"""Probes have no token."""


class Access:
    """Refuses who may not ask.

    Without a token, a foreign web page could make a browser of this machine ask (:mod:`spark_schemas.local_address`).
    No page knows the token, so with one that does not matter.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may be asked."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(16)}"
        scope["spark.request_id"] = request_id
        # Anthropic's clients read the one, OpenAI's the other.
        own = [(name, request_id.encode()) for name in (b"request-id", b"x-request-id")]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        if refusal is not None:
            await refusal.response(scope)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._token is not None:
            given = _tokens(headers)
            if path in _OPEN or any(hmac.compare_digest(each, self._token) for each in given):
                return None
            message = "a token is needed: send it as `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`"
            if given:
                message = "the token is not the one that this agent was started with"
            # Claude Code asks ten times otherwise, for minutes, before it says what is wrong.
            refused = {"WWW-Authenticate": "Bearer", "x-should-retry": "false"}
            return ApiError(401, message, "invalid_api_key", headers=refused)
        found = foreign_header(headers)
        if found == "Host":
            message = "only requests to a loopback address are answered: use http://127.0.0.1 or http://localhost"
            return ApiError(403, message, "not_local")
        if found is not None:
            return ApiError(403, "only web pages of this machine are answered", "not_local")
        return None


def _tokens(headers: Headers) -> list[bytes]:
    """What may be the token; a tool that has two keys sends both."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    found = [bearer.strip()] if scheme.lower() == "bearer" else []
    return [text.encode("latin-1", "replace") for text in [*found, headers.get("x-api-key", "")] if text]
