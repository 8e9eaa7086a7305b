"""The privacy page, and what administrators do from it: delete sessions, look at the audit log, give out tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import ValidationError

from spark_schemas.ids import MAX_COUNT
from spark_service.auth import actor_of
from spark_service.credentials import OPEN_ACTOR
from spark_service.dashboard.context import Dashboard
from spark_service.dashboard.forms import FIELD, read_form, require_same_origin
from spark_service.dashboard.logins import cookie_of, holder_of
from spark_service.dashboard.pages import add_page
from spark_service.dashboard.paths import AUDIT, PRIVACY, TOKENS
from spark_service.dashboard.privacy_views import (
    AuditView,
    DeletionView,
    PrivacyView,
    ReceivedView,
    TokensView,
    received_of,
    rules_of,
)
from spark_service.dashboard.team import flush_agents
from spark_service.db.activity import received, session_parts
from spark_service.db.audit import entries_before
from spark_service.errors import FormError
from spark_service.tokens import (
    DEFAULT_EXPIRY_DAYS,
    MAX_EXPIRY_DAYS,
    TokenId,
    TokenInfo,
    TokenRequest,
    grant_of,
    join_token,
)

__all__ = ["add_privacy"]

_ENTRIES_A_PAGE = 50
_HASH = re.compile(r"[0-9a-f]{64}")
_NO_STORE = {"Cache-Control": "no-store"}


def add_privacy(router: APIRouter, dashboard: Dashboard) -> None:
    """Add the pages and their forms."""

    def view() -> PrivacyView:
        return _privacy(dashboard)

    add_page(router, dashboard.renderer, PRIVACY, "privacy.html", view)
    _add_audit(router, dashboard)
    _add_deletion(router, dashboard)
    _add_tokens(router, dashboard)


def _privacy(dashboard: Dashboard) -> PrivacyView:
    def count() -> ReceivedView:
        flush_agents(dashboard.store)
        with dashboard.store.snapshot() as cursor:
            return received_of(received(cursor))

    made = dashboard.refreshed.get("received", count)
    rules = dashboard.rules
    return PrivacyView(
        as_of=None if made is None else made.as_of,
        is_current=made is not None and made.is_current,
        received=None if made is None else made.value,
        rules=rules_of(
            min_sessions=rules.min_sessions,
            window_days=rules.window_days,
            half_life_days=rules.half_life_days,
            segment_after_days=rules.segment_after_days,
        ),
        retention_days=rules.retention_days,
    )


def _add_audit(router: APIRouter, dashboard: Dashboard) -> None:
    def view(before: Annotated[int | None, Query(ge=1, le=MAX_COUNT)] = None) -> AuditView:
        with dashboard.store.reading() as cursor:
            page = entries_before(cursor, before, _ENTRIES_A_PAGE)
        return AuditView(entries=page.entries, before=before, next_before=page.next_after)

    add_page(router, dashboard.renderer, AUDIT, "audit.html", view)


def _add_deletion(router: APIRouter, dashboard: Dashboard) -> None:
    renderer, store = dashboard.renderer, dashboard.store

    @router.post(f"{PRIVACY}/delete")
    async def delete_session(request: Request) -> Response:
        form = await _checked_form(request, dashboard)
        session_hash = form.get("session_hash", "").strip().lower()
        if not _HASH.fullmatch(session_hash):
            raise FormError(
                422,
                "invalid_hash",
                f"session hash: found {session_hash[:80]!r}, expected 64 hexadecimal digits",
                field="form.session_hash",
                hint="spark-agent upload show prints the hashes of what a machine sends",
            )
        parts, workloads = await run_sync(_parts, dashboard, session_hash)
        found = DeletionView(session_hash=session_hash, parts=parts, workloads=workloads)
        if form.get("confirmed") == "yes":
            removed = await run_sync(store.delete_session, session_hash, actor_of(request))
            dashboard.guard.spend(form[FIELD])
            found = found.model_copy(update={"removed": removed})
        return renderer.page(request, "deletion.html", found, headers=_NO_STORE)


def _add_tokens(router: APIRouter, dashboard: Dashboard) -> None:
    renderer, keyring = dashboard.renderer, dashboard.keyring

    def view(request: Request) -> TokensView:
        return _tokens(request, dashboard)

    add_page(router, renderer, TOKENS, "tokens.html", view)

    @router.post(TOKENS)
    async def create_token(request: Request) -> Response:
        form = await _checked_form(request, dashboard)
        shown = _tokens(request, dashboard)
        if not shown.may_create:
            raise FormError(
                403,
                "open_service",
                "token: found a service started with --open, expected one that knows who asks for a lasting secret",
                hint="stop the service and use spark-service token",
            )
        wanted, fault = _wanted(form)
        if wanted is None:
            told = shown.model_copy(update={"fault": fault})
            return renderer.page(request, "tokens.html", told, status=422, headers=_NO_STORE)
        token, secret = await run_sync(keyring.create, wanted, actor_of(request))
        dashboard.guard.spend(form[FIELD])
        told = _tokens(request, dashboard).model_copy(
            update={"created": join_token(token.token_id, secret), "created_id": token.token_id}
        )
        return renderer.page(request, "tokens.html", told, status=201, headers=_NO_STORE)

    @router.post(f"{TOKENS}/{{token_id}}/revoke")
    async def revoke_token(token_id: Annotated[TokenId, Path()], request: Request) -> Response:
        form = await _checked_form(request, dashboard)
        if form.get("confirmed") == "yes":
            await run_sync(keyring.revoke, token_id, actor_of(request))
            dashboard.guard.spend(form[FIELD])
            return renderer.page(request, "tokens.html", _tokens(request, dashboard), headers=_NO_STORE)
        token = next((one for one in _tokens(request, dashboard).tokens if one.id == token_id), None)
        if token is None:
            raise FormError(404, "unknown_token", f"token: found no {token_id}, expected one of this service")
        return renderer.page(request, "revoke.html", token, headers=_NO_STORE)


def _tokens(request: Request, dashboard: Dashboard) -> TokensView:
    return TokensView(
        tokens=[TokenInfo.of(token) for token in reversed(dashboard.keyring.tokens())],
        may_create=actor_of(request) != OPEN_ACTOR,
        default_expiry_days=DEFAULT_EXPIRY_DAYS,
        max_expiry_days=MAX_EXPIRY_DAYS,
    )


def _wanted(form: Mapping[str, str]) -> tuple[TokenRequest | None, str]:
    """The token that a form asks for, or what is wrong with it."""
    grant = grant_of(scope for scope in ("upload", "read", "admin") if scope in form)
    if grant is None:
        return None, "Choose what the token may do: upload, read, both, or admin alone, which holds both."
    days = form.get("expires_days", "").strip()
    if days and not (days.isascii() and days.isdigit() and len(days) <= 5 and 1 <= int(days) <= MAX_EXPIRY_DAYS):
        return (
            None,
            f"Days until it expires: found {days[:20]!r}, expected 1 to {MAX_EXPIRY_DAYS}, or nothing for never.",
        )
    try:
        name = form.get("name", "").strip()
        return TokenRequest(scope=grant, name=name, expires_days=int(days) if days else None), ""
    except ValidationError:
        return None, "The name may have at most 64 plain letters, digits and signs, without accents."


async def _checked_form(request: Request, dashboard: Dashboard) -> Mapping[str, str]:
    require_same_origin(request.headers)
    form = await read_form(request)
    dashboard.guard.require(form.get(FIELD, ""), holder_of(cookie_of(request)))
    return form


def _parts(dashboard: Dashboard, session_hash: str) -> tuple[int, list[str]]:
    with dashboard.store.reading() as cursor:
        return session_parts(cursor, session_hash)
