"""Logging in with a token, and out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from starlette.responses import RedirectResponse

from spark_service.auth import address_of, client_of
from spark_service.dashboard.context import Dashboard
from spark_service.dashboard.forms import FIELD, read_form, require_same_origin
from spark_service.dashboard.logins import cookie_of, drop_cookie, holder_of, set_cookie
from spark_service.dashboard.paths import LOGIN, LOGOUT, safe_next
from spark_service.errors import RequestError
from spark_service.rate_limit import Rate, RateLimiter, retry_after_seconds
from spark_service.tokens import holds

__all__ = ["LoginView", "login_router"]

_NO_STORE = {"Cache-Control": "no-store"}


class LoginView(BaseModel):
    """What the login shows."""

    next: str
    """The page that comes after it."""
    fault: str | None = None
    """Why the last attempt failed."""
    is_open: bool = False
    """Whether nobody needs to log in."""


def login_router(dashboard: Dashboard, failures: Rate) -> APIRouter:
    """Make the routes. ``failures`` limits attempts by address."""
    renderer, guard, logins = dashboard.renderer, dashboard.guard, dashboard.logins
    open_access = dashboard.open_access
    router = APIRouter(include_in_schema=False)
    limiter = RateLimiter(failures)

    @router.get(LOGIN)
    def show_login(request: Request, next: Annotated[str, Query(max_length=2000)] = "/") -> Response:  # noqa: A002
        view = LoginView(next=safe_next(next), is_open=open_access)
        return renderer.page(request, "login.html", view, headers=_NO_STORE)

    @router.post(LOGIN)
    async def log_in(request: Request) -> Response:
        require_same_origin(request.headers)
        form = await read_form(request)
        guard.require(form.get(FIELD, ""), holder_of(cookie_of(request)))
        goal = safe_next(form.get("next", "/"))
        text = form.get("token", "").strip()
        client = dashboard.credentials.authenticate(text)
        if client is None:
            wait_ns = limiter.take(address_of(request.scope))
            if wait_ns:
                raise _too_many(retry_after_seconds(wait_ns))
            fault = "This is no valid token of this service: it may be mistyped, expired or revoked."
            return _refused(request, goal, fault, 401)
        if not holds(client.grant, "read"):
            fault = (
                f"This token has scope {client.grant}: it sends what agents count. To look at pages takes scope read."
            )
            return _refused(request, goal, fault, 403)
        before = cookie_of(request)
        if before is not None:
            logins.close(before)
        response = RedirectResponse(goal, 303, _NO_STORE)
        set_cookie(request, response, logins.open(client, text))
        return response

    def _refused(request: Request, goal: str, fault: str, status: int) -> Response:
        view = LoginView(next=goal, fault=fault, is_open=open_access)
        return renderer.page(request, "login.html", view, status=status, headers=_NO_STORE)

    @router.post(LOGOUT)
    async def log_out(request: Request) -> Response:
        require_same_origin(request.headers)
        client_of(request)
        cookie = cookie_of(request)
        form = await read_form(request)
        guard.require(form.get(FIELD, ""), holder_of(cookie))
        if cookie is not None:
            logins.close(cookie)
        response = RedirectResponse(LOGIN, 303, _NO_STORE)
        drop_cookie(request, response)
        return response

    return router


def _too_many(seconds: int) -> RequestError:
    return RequestError(
        429,
        "too_many_requests",
        "login: found more wrong tokens from this address than this service takes at once",
        hint=f"try again in {seconds} s",
        headers={"Retry-After": str(seconds)},
    )
