"""Who may do what: tokens, scopes and rate limits before every route."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from spark_schemas.api import API_PREFIX
from spark_service import tokens
from spark_service.keyring import Keyring
from spark_service.problems import problem_response
from spark_service.rate_limit import RateLimiter, Rates, retry_after_seconds

__all__ = ["ENVIRONMENT_ACTOR", "OPEN_ACTOR", "UPLOAD_PATHS", "Gate", "actor_of", "add_security", "needed_scope"]

ENVIRONMENT_ACTOR = "environment"
OPEN_ACTOR = "open"

UPLOAD_PATHS = frozenset({f"{API_PREFIX}/histograms"})
"""What agents post; any other change is an administrator's."""
_FREE = "/healthz"
"""What needs no token: whether the process lives."""
_ADMIN = f"{API_PREFIX}/admin"
_UNSCOPED = frozenset({"/readyz", "/version", "/api/openapi.json"})
"""What every holder of a token may get: it says nothing about anybody's sessions."""
_IPV6_PREFIX = 64
"""Bits that one network's hosts share: a single host has all addresses below."""


@dataclass(frozen=True, slots=True)
class _Client:
    """Who sent a request. ``key`` names its buckets, ``actor`` its entries in the audit log."""

    actor: str
    key: str
    grant: tokens.Grant


class Gate:
    """ASGI middleware: 401 without a valid token, 403 beyond its scope, 429 above its rate; ``/healthz`` stays free.

    Without tokens (``open_access``) everybody is an administrator, and rates go by address.
    """

    def __init__(
        self, app: ASGIApp, *, keyring: Keyring, token: str | None, open_access: bool, rates: Rates | None = None
    ) -> None:
        """``token`` is one with admin scope from outside the database."""
        rates = rates or Rates()
        self._app = app
        self._keyring = keyring
        self._token = None if token is None else token.encode()
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
        client = self._client(scope)
        if client is None:
            wait_ns = self._failures.take(_address(scope))
            return _slow_down(wait_ns, "requests without a valid token") if wait_ns else _unauthorized()
        reads = scope["method"] in ("GET", "HEAD")
        wait_ns = (self._reads if reads else self._uploads).take(client.key)
        if wait_ns:
            return _slow_down(wait_ns, "reads" if reads else "writes")
        needed = needed_scope(scope["method"], scope["path"])
        if needed is not None and not tokens.holds(client.grant, needed):
            return _forbidden(client.grant, needed)
        scope.setdefault("state", {})["actor"] = client.actor
        return None

    def _client(self, scope: Scope) -> _Client | None:
        if self._open_access:
            return _Client(OPEN_ACTOR, _address(scope), "admin")
        scheme, _, credentials = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        credentials = credentials.strip()
        token = self._keyring.authenticate(credentials)
        if token is not None:
            return _Client(token.token_id, token.token_id, token.scope)
        # Bytes: compare_digest refuses non-ASCII text. Its time does not tell how much of a guess was right.
        if self._token is not None and hmac.compare_digest(credentials.encode(), self._token):
            return _Client(ENVIRONMENT_ACTOR, ENVIRONMENT_ACTOR, "admin")
        return None


def actor_of(request: Request) -> str:
    """Whom the audit log names for a request that the gate let through."""
    actor: str = request.state.actor
    return actor


def needed_scope(method: str, path: str) -> tokens.Scope | None:
    """The scope that a request needs, None where any will do. What nobody thought of needs ``admin``."""
    if path in _UNSCOPED and method in ("GET", "HEAD"):
        return None
    if path == _ADMIN or path.startswith(f"{_ADMIN}/"):
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


def _address(scope: Scope) -> str:
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
