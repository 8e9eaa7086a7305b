"""What all requests together may hold in memory: their bodies, from arriving until they are answered."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_agent.server.api_error import ApiError
from spark_agent.server.generation import BusyError

__all__ = ["BodyBudget"]

MAX_BODIES_BYTES = 256 * 2**20


class BodyBudget:
    """Counts what has arrived of the bodies of requests that are not answered yet; all on one event loop.

    Where they would be too much, reading on raises :class:`ApiError` (503) in that request; the others go on.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and count what is received."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        mine = 0

        async def counted() -> Message:
            nonlocal mine
            message = await receive()
            size = len(message.get("body", b""))
            if self._held_bytes + size > MAX_BODIES_BYTES:
                raise ApiError.of(BusyError())
            mine += size
            self._held_bytes += size
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= mine
