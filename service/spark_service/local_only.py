"""Only programs of this machine are answered by an open service, not the web pages that its browsers show."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spark_service.ingest import excerpt
from spark_service.problems import problem_response
from spark_service.settings import is_loopback

__all__ = ["LocalOnly"]

_EXPECTED = "an address of this machine"


class LocalOnly:
    """ASGI middleware: 403 for what a foreign web page can make a browser send.

    A page that rebinds its own name to 127.0.0.1 still sends that name as ``Host``; one that posts here across sites
    sends its ``Origin``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it."""
        fault = _fault(Headers(scope=scope)) if scope["type"] == "http" else None
        if fault is None:
            await self._app(scope, receive, send)
            return
        name, found = fault
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


def _fault(headers: Headers) -> tuple[str, str] | None:
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _is_local(f"//{host}"):
        return "Host", excerpt(host)
    if origin is not None and not _is_local(origin):
        return "Origin", excerpt(origin)
    return None


def _is_local(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return is_loopback(parts.hostname or "") and parts.username is None
    except ValueError:
        return False
