"""What every page is sent with, and errors as pages for people where programs get problem details."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_schemas.api import API_PREFIX, PROBLEM_MEDIA_TYPE
from spark_service.dashboard.paths import LOGIN, is_page, is_twin
from spark_service.dashboard.render import Renderer

__all__ = ["CONTENT_SECURITY_POLICY", "HEADERS", "PageAnswers"]

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "font-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""Nothing from elsewhere and nothing inline: a name that slipped through unescaped could still run nothing."""
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    # Not no-referrer: with that, browsers send "null" as the origin of our own forms.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageAnswers:
    """ASGI middleware around whatever answers: headers for all pages, and problems turned into pages.

    Who is not logged in is sent to the login, and comes back from there to the page that was asked for.
    """

    def __init__(self, app: ASGIApp, renderer: Renderer) -> None:
        self._app = app
        self._renderer = renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look at what comes back."""
        if scope["type"] != "http" or not (is_page(scope["path"]) or _is_lost_browser(scope)):
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send, self._renderer)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            # The server logs it with its traceback; whoever waits for the page gets one.
            await answer.send_bug()
            raise


class _Answer:
    """One answer on its way out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, renderer: Renderer) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._renderer = renderer
        self._started = False
        self._problem: Message | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Send a message on with our headers, or keep it until the problem is whole."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"] if isinstance(message["headers"], list) else [])
            if headers.get("content-type") == PROBLEM_MEDIA_TYPE and not is_twin(self._scope["path"]):
                self._problem = message
                return
            self._started = True
            headers.update({name: text for name, text in HEADERS.items() if name not in headers})
            headers.setdefault("Cache-Control", "private, no-cache")
            await self._send({**message, "headers": headers.raw})
        elif self._problem is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_problem(self._problem, json.loads(self._body))

    async def send_bug(self) -> None:
        """Say that the service failed, if nothing was said yet."""
        if not self._started and not is_twin(self._scope["path"]):
            problem = {
                "status": 500,
                "title": "Internal Server Error",
                "detail": "the service failed at this request",
                "hint": "the service's log has the traceback",
            }
            await self._send_problem({"headers": []}, problem)

    async def _send_problem(self, start: Message, problem: dict[str, Any]) -> None:
        self._problem = None
        request = Request(self._scope)
        response: Response
        if not is_page(request.url.path):
            # Whoever asks for no page is told the same, logged in or not: cookies count for pages alone.
            problem = {"status": 404, "title": "Not Found", "detail": "There is no page at this address."}
        if problem["status"] == 401 and request.method in ("GET", "HEAD"):
            wanted = quote(request.url.path) + (f"?{request.url.query}" if request.url.query else "")
            response = RedirectResponse(LOGIN if wanted == "/" else f"{LOGIN}?{urlencode({'next': wanted})}", 303)
        else:
            response = self._renderer.page(request, "problem.html", problem, status=problem["status"])
        kept = Headers(raw=start["headers"])
        for name in ("retry-after", "allow"):
            if name in kept:
                response.headers[name] = kept[name]
        await response(self._scope, self._receive, self.send)


def _is_lost_browser(scope: Scope) -> bool:
    """Whether somebody looks at an address that is neither a page nor of the API."""
    path: str = scope["path"]
    if scope["method"] != "GET" or path.startswith(f"{API_PREFIX.rsplit('/', 1)[0]}/"):
        return False
    return path not in ("/healthz", "/readyz", "/version") and "text/html" in Headers(scope=scope).get("accept", "")
