"""Only programs of this machine are answered by an open service, not the web pages that its browsers show."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spark_schemas.local_address import foreign_header
from spark_service.ingest import excerpt
from spark_service.problems import problem_response

__all__ = ["LocalOnly"]

_EXPECTED = "an address of this machine"


class LocalOnly:
    """ASGI middleware: 403 for what a foreign web page can make a browser send."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it."""
        headers = Headers(scope=scope) if scope["type"] == "http" else None
        name = None if headers is None else foreign_header(headers)
        if name is None or headers is None:
            await self._app(scope, receive, send)
            return
        found = excerpt(headers.get(name, ""))
        response = problem_response(
            403,
            "not_local",
            f"{name}: found {found}, expected {_EXPECTED}: this service is open to its own machine alone",
            field=f"header.{name}",
            found=found,
            expected=_EXPECTED,
            hint="ask it as 127.0.0.1 or localhost, or run it with tokens instead of --open",
        )
        await response(scope, receive, send)
