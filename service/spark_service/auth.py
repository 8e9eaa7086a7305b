"""Who may do what: tokens, scopes and rate limits before every route."""

from __future__ import annotations

import ipaddress
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from spark_schemas.api import API_PREFIX
from spark_service import tokens
from spark_service.credentials import OPEN_ACTOR, Client, Credentials
from spark_service.dashboard.logins import Logins, cookie_of
from spark_service.dashboard.paths import LOGOUT, is_admin_page, is_free, is_page
from spark_service.problems import problem_response
from spark_service.rate_limit import RateLimiter, Rates, retry_after_seconds

__all__ = ["UPLOAD_PATHS", "Gate", "actor_of", "add_security", "address_of", "client_of", "needed_scope"]

UPLOAD_PATHS = frozenset({f"{API_PREFIX}/histograms"})
"""What agents post; any other change is an administrator's."""
_FREE = "/healthz"
"""What needs no token: whether the process lives."""
_ADMIN = f"{API_PREFIX}/admin"
_UNSCOPED = frozenset({"/readyz", "/version", "/api/openapi.json"})
"""What every holder of a token may get: it says nothing about anybody's sessions."""
_IPV6_PREFIX = 64
"""Bits that one network's hosts share: a single host has all addresses below."""


class Gate:
    """ASGI middleware: 401 without a valid token, 403 beyond its scope, 429 above its rate; ``/healthz`` stays free.

    The dashboard's pages take the cookie of a login in place of a token; what a browser needs to log in is free, too.
    Without tokens (``open_access``) everybody is an administrator, and rates go by address.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        credentials: Credentials,
        logins: Logins,
        open_access: bool,
        rates: Rates | None = None,
    ) -> None:
        rates = rates or Rates()
        self._app = app
        self._credentials = credentials
        self._logins = logins
        self._open_access = open_access
        self._reads = RateLimiter(rates.reads)
        self._uploads = RateLimiter(rates.uploads)
        self._failures = RateLimiter(rates.failures)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it."""
        if scope["type"] == "http" and scope["path"] != _FREE:
            response = self._answer(scope)
            if response is not None:
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _answer(self, scope: Scope) -> Response | None:
        if is_free(scope["path"]):
            wait_ns = self._reads.take(address_of(scope))
            return _slow_down(wait_ns, "reads") if wait_ns else None
        client = self._client(scope)
        if client is None:
            # A browser that was not logged in yet has guessed nothing: it is sent to the login.
            guessed = not is_page(scope["path"]) or "authorization" in Headers(scope=scope)
            wait_ns = (self._failures if guessed else self._reads).take(address_of(scope))
            return _slow_down(wait_ns, "requests without a valid token") if wait_ns else _unauthorized()
        reads = scope["method"] in ("GET", "HEAD")
        wait_ns = (self._reads if reads else self._uploads).take(client.key)
        if wait_ns:
            return _slow_down(wait_ns, "reads" if reads else "writes")
        needed = needed_scope(scope["method"], scope["path"])
        if needed is not None and not tokens.holds(client.grant, needed):
            return _forbidden(client.grant, needed)
        scope.setdefault("state", {})["client"] = client
        return None

    def _client(self, scope: Scope) -> Client | None:
        if self._open_access:
            return Client(OPEN_ACTOR, address_of(scope), "admin")
        authorization = Headers(scope=scope).get("authorization")
        if authorization is None and is_page(scope["path"]):
            cookie = cookie_of(Request(scope))
            return None if cookie is None else self._logins.find(cookie)
        scheme, _, text = (authorization or "").partition(" ")
        return self._credentials.authenticate(text.strip()) if scheme.lower() == "bearer" else None


def actor_of(request: Request) -> str:
    """Whom the audit log names for a request that the gate let through."""
    return client_of(request).actor


def client_of(request: Request) -> Client:
    """Who sent a request that the gate let through."""
    client: Client = request.state.client
    return client


def needed_scope(method: str, path: str) -> tokens.Scope | None:
    """The scope that a request needs, None where any will do. What nobody thought of needs ``admin``."""
    if path in _UNSCOPED and method in ("GET", "HEAD"):
        return None
    if path == LOGOUT:
        return None
    if path == _ADMIN or path.startswith(f"{_ADMIN}/") or is_admin_page(path):
        return "admin"
    if method in ("GET", "HEAD"):
        return "read"
    return "upload" if method == "POST" and path in UPLOAD_PATHS else "admin"


def add_security(schema: dict[str, Any]) -> None:
    """Say in an OpenAPI document which operations need a token, and of which scope."""
    schema["components"]["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "bearerFormat": "spark_<id>_<secret>",
            "description": "Scopes: upload, read, and admin, which holds all. A service run with --open asks for none.",
        }
    }
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            needed = needed_scope(method.upper(), path)
            operation["security"] = [] if path == _FREE else [{"token": [] if needed is None else [needed]}]


def address_of(scope: Scope) -> str:
    """Name of a client's bucket; IPv6 hosts share that of their network."""
    host = scope["client"][0] if scope.get("client") else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"address {host}"
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        return f"address {ipaddress.ip_network((int(address), _IPV6_PREFIX), strict=False)}"
    return f"address {address}"


def _unauthorized() -> Response:
    return problem_response(
        401,
        "unauthorized",
        # The same for a token that is missing, unknown, expired or revoked.
        "Authorization: found no valid token, expected Bearer with a token of this service",
        field="header.Authorization",
        hint="send Authorization: Bearer TOKEN; who runs the service makes one with spark-service token create",
        headers={"WWW-Authenticate": 'Bearer realm="spark-service"'},
    )


def _forbidden(found: tokens.Grant, needed: tokens.Scope) -> Response:
    return problem_response(
        403,
        "wrong_scope",
        f"Authorization: found a token with scope {found}, expected {needed}",
        field="header.Authorization",
        found=found,
        expected=needed,
        hint=f"use a token made with --scope {needed}",
        headers={"WWW-Authenticate": f'Bearer realm="spark-service", error="insufficient_scope", scope="{needed}"'},
    )


def _slow_down(wait_ns: int, what: str) -> Response:
    seconds = retry_after_seconds(wait_ns)
    return problem_response(
        429,
        "too_many_requests",
        f"rate: found more {what} than this service takes at once",
        hint=f"repeat the request in {seconds} s",
        headers={"Retry-After": str(seconds)},
    )
