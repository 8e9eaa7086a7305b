"""Routes of administrators: tokens, the audit log and retention."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from anyio.to_thread import run_sync
from fastapi import FastAPI, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from spark_schemas.api import API_PREFIX
from spark_schemas.ids import MAX_COUNT
from spark_service import env
from spark_service.auth import actor_of
from spark_service.credentials import OPEN_ACTOR
from spark_service.db.audit import AuditPage, entries_after
from spark_service.db.store import Store
from spark_service.errors import RequestError
from spark_service.inflate import read_body
from spark_service.ingest import invalid_value, require_json
from spark_service.keyring import Keyring
from spark_service.retention import RetentionReceipt, RetentionRequest, apply_retention, overdue
from spark_service.tokens import NewToken, TokenId, TokenInfo, TokenList, TokenRequest, TokenRotation

__all__ = ["MAX_AUDIT_ENTRIES", "REQUEST_BODIES", "add_admin"]

MAX_AUDIT_ENTRIES = 1000
MAX_BODY_BYTES = 4096
REQUEST_BODIES: tuple[type[BaseModel], ...] = (TokenRequest, TokenRotation, RetentionRequest)
"""Bodies whose schemas FastAPI does not add to the OpenAPI document, as it does not parse them."""

_B = TypeVar("_B", bound=BaseModel)
_PathToken = Annotated[TokenId, Path()]
_SECRET_HEADERS = {"Cache-Control": "no-store"}


class _AuditQuery(BaseModel):
    """Unknown parameters are errors."""

    model_config = ConfigDict(extra="forbid")

    after: int = Field(0, ge=0, le=MAX_COUNT, description="Give entries numbered above this one.")
    limit: int = Field(100, ge=1, le=MAX_AUDIT_ENTRIES, description="Most entries to give.")


def add_admin(app: FastAPI, store: Store, keyring: Keyring, *, retention_days: int) -> None:
    """Add the routes under ``/api/v1/admin``; the gate lets only administrators through to them.

    ``retention_days`` is what the service keeps by itself, 0 for everything.
    """
    tokens = f"{API_PREFIX}/admin/tokens"

    @app.get(tokens)
    def list_tokens() -> TokenList:
        """All tokens, those revoked or expired too, without their secrets."""
        return TokenList(tokens=[TokenInfo.of(token) for token in keyring.tokens()])

    @app.post(tokens, status_code=201, response_model=NewToken, openapi_extra=_body(TokenRequest))
    async def create_token(request: Request) -> Response:
        """Make a token; the only answer that ever holds its secret."""
        wanted = await _read(request, TokenRequest)
        actor = _require_lasting(request)
        made = await run_sync(keyring.create, wanted, actor)
        return Response(NewToken.with_secret(*made).model_dump_json(), 201, _SECRET_HEADERS, "application/json")

    @app.delete(f"{tokens}/{{token_id}}")
    def revoke_token(token_id: _PathToken, request: Request) -> TokenInfo:
        """End a token at once and for good."""
        return TokenInfo.of(keyring.revoke(token_id, actor_of(request)))

    @app.post(f"{tokens}/{{token_id}}/rotate", response_model=NewToken, openapi_extra=_body(TokenRotation))
    async def rotate_token(token_id: _PathToken, request: Request) -> Response:
        """Give a token a new secret; the old one ends after the grace."""
        wanted = await _read(request, TokenRotation)
        actor = _require_lasting(request)
        made = await run_sync(keyring.rotate, token_id, wanted, actor)
        return Response(NewToken.with_secret(*made).model_dump_json(), 200, _SECRET_HEADERS, "application/json")

    @app.get(f"{API_PREFIX}/admin/audit")
    def get_audit(query: Annotated[_AuditQuery, Query()]) -> AuditPage:
        """Who changed what, and when, oldest first."""
        with store.reading() as cursor:
            return entries_after(cursor, query.after, query.limit)

    @app.post(f"{API_PREFIX}/admin/retention", response_model=RetentionReceipt, openapi_extra=_body(RetentionRequest))
    async def run_retention(request: Request) -> Response:
        """Remove for good what was received too long ago, or say what that would be."""
        wanted = await _read(request, RetentionRequest)
        days = wanted.retention_days or retention_days
        if not days:
            raise RequestError(
                422,
                "no_retention",
                "body.retention_days: found nothing, expected a number of days: this service keeps everything",
                field="body.retention_days",
                found="nothing",
                expected="a number of days",
                hint=f"send it, or start the service with {env.RETENTION_DAYS.name}",
            )
        today = datetime.now(UTC).date()
        if wanted.dry_run:
            removed = await run_sync(overdue, store, days, today)
        else:
            removed = await run_sync(apply_retention, store, days, today, actor_of(request))
        receipt = RetentionReceipt.of(days, removed, dry_run=wanted.dry_run)
        return Response(receipt.model_dump_json(), media_type="application/json")


def _require_lasting(request: Request) -> str:
    """Return the actor, unless nobody had to prove who they are: a secret given away now would outlive the open run."""
    actor = actor_of(request)
    if actor == OPEN_ACTOR:
        raise RequestError(
            403,
            "open_service",
            "token: found a service started with --open, expected one that knows who asks for a lasting secret",
            hint="stop the service and use spark-service token",
        )
    return actor


async def _read(request: Request, model: type[_B]) -> _B:
    require_json(request.headers.get("content-type"))
    try:
        raw = await read_body(request.stream(), request.headers.get("content-length"), MAX_BODY_BYTES)
    except ClientDisconnect as error:
        raise RequestError(400, "body_incomplete", "body: the connection ended before the body did") from error
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise RequestError(400, "invalid_json", f"body: {first['msg']}", hint="send one JSON object") from None
        # Bodies are flat; what follows a field's name are branches of its type.
        field = ".".join(["body", *(str(part) for part in first["loc"][:1])])
        raise invalid_value(first, field, "field", "body") from None


def _body(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}
