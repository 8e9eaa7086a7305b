"""Every error as problem details (RFC 9457), those of the framework and of the router too."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from spark_schemas.api import PROBLEM_MEDIA_TYPE, Problem
from spark_service.errors import RequestError, SigningKeyError, SparkServiceError, StorageFullError
from spark_service.ingest import excerpt, invalid_value

__all__ = ["install", "problem_response"]

log = logging.getLogger(__name__)

_CODES = {404: "not_found", 405: "method_not_allowed"}


def problem_response(
    status: int, code: str, detail: str, *, headers: Mapping[str, str] | None = None, **members: str | None
) -> Response:
    """An answer with problem details; ``members`` are the optional ones (field, found, expected, hint)."""
    problem = Problem.model_validate(
        {"title": HTTPStatus(status).phrase, "status": status, "detail": detail, "code": code, **members}
    )
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, status, headers=headers, media_type=PROBLEM_MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Make every error of an app a problem."""
    app.add_exception_handler(SparkServiceError, _on_service_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameter)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


def _on_service_error(_request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return problem_response(
            error.status,
            error.code,
            error.message,
            headers=error.headers,
            field=error.field,
            found=error.found,
            expected=error.expected,
            hint=error.hint,
        )
    # The message names files of this machine: for its log, not for clients.
    log.error("%s", error)
    if isinstance(error, StorageFullError):
        return problem_response(
            507, "storage_full", "no room left to store this; nothing was kept", hint="retry once there is room again"
        )
    if isinstance(error, SigningKeyError):
        return problem_response(
            503,
            "signing_key_unavailable",
            "the key that signs manifests cannot be used; none is sent unsigned",
            hint="the service's log says which file to restore",
        )
    return problem_response(
        503,
        "storage_unavailable",
        "the database cannot answer; nothing was changed",
        hint="retry; the service's log says why",
        headers={"Retry-After": "5"},
    )


def _on_invalid_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101  as registered
    first: Mapping[str, Any] = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return _on_service_error(request, invalid_value(first, field, "parameter", "path"))


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  as registered
    status = error.status_code
    detail, hint = str(error.detail), None
    if status == 404:
        detail, hint = f"path: found {excerpt(request.url.path)}, expected a path of this API", "see /api/openapi.json"
    elif status == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        detail, hint = f"method: found {request.method}, expected {allowed}", f"use {allowed}"
    return problem_response(status, _CODES.get(status, f"http_{status}"), detail, hint=hint, headers=error.headers)


def _on_bug(_request: Request, _error: Exception) -> Response:
    # Starlette raises the error again after this answer, so that the server logs it with its traceback, and closes the
    # connection: said beforehand, so that nobody sends another request over it meanwhile.
    hint = "the service's log has the traceback"
    answer = problem_response(500, "internal_error", "the service failed at this request", hint=hint)
    answer.headers["Connection"] = "close"
    return answer
