"""Only programs of this machine are answered, not the web pages that its browsers show."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spark_agent.server.api_error import ApiError
from spark_agent.service_url import is_loopback

__all__ = ["LocalOnly"]


class LocalOnly:
    """Refuses what a foreign web page can make a browser send.

    A page that rebinds its own name to 127.0.0.1 still sends that name as ``Host``; one that posts here across sites
    sends its ``Origin``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what comes from this machine."""
        if scope["type"] == "http" and (refusal := _refusal(Headers(scope=scope))) is not None:
            await ApiError(403, refusal, "not_local").response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(headers: Headers) -> str | None:
    if not _is_local(f"//{headers.get('host', '')}"):
        return "only requests to a loopback address are answered: use http://127.0.0.1 or http://localhost"
    origin = headers.get("origin")
    if origin is not None and not _is_local(origin):
        return "only web pages of this machine are answered"
    return None


def _is_local(url: str) -> bool:
    try:
        return is_loopback(url) and urlsplit(url).username is None
    except ValueError:
        return False
