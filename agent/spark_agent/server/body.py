"""Request bodies: bounded, JSON that means one thing only, and what is expected of it.

A long one is parsed and validated on another thread: a million messages take seconds.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from spark_agent.server.api_error import ApiError
from spark_agent.server.aside import aside
from spark_agent.server.requests import first_fault

__all__ = ["parse_json", "read", "validated"]

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_VALUES = 2**21
"""Commas and, counted twice, opening brackets, wherever they stand: a million tokens have fewer as ids and in their
texts. Without a limit 32 MiB of ``{},`` would take a gigabyte."""
_Body = TypeVar("_Body", bound=BaseModel)


async def read(kind: type[_Body], request: Request) -> tuple[_Body, int]:
    """The body as a request, and how many bytes it had; raise :class:`ApiError` for what is too large or none."""
    body = await _read(request)
    return await aside(lambda: validated(kind, parse_json(body)), size=len(body)), len(body)


async def _read(request: Request) -> bytes:
    too_large = ApiError(413, f"the request is over {MAX_BODY_BYTES} bytes", "too_large")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return bytes(body)


def parse_json(body: bytes) -> Any:
    """The value; raise :class:`ApiError` for what is no JSON, or could be read in two ways."""
    if len(body) > MAX_VALUES // 2 and sum(map(body.count, b",[[{{")) > MAX_VALUES:
        message = f"the request has too many values: over {MAX_VALUES} commas and brackets, a bracket counted twice"
        raise ApiError(413, message, "too_large")
    try:
        value = _DECODER.decode(body.decode())
        if b"\\u" in body:
            # A lone surrogate can be spelled, but neither tokenised nor sent.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _invalid("the body spells half of a surrogate pair") from error
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise _invalid("the body is nested too deeply") from error
    except ValueError as error:
        raise _invalid(f"the body is not JSON: {error}") from error
    return value


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, "invalid_request")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for at, key in enumerate(keys) if keys.index(key) < at)
        raise ValueError(f"the key {twice!r} is there twice")
    return value


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


def validated(kind: type[_Body], value: Any) -> _Body:
    """The value as a request; raise :class:`ApiError` that names the field at fault."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        where, reason = first_fault(error)
        raise ApiError(400, f"{where or 'body'}: {reason}", "invalid_request", param=where) from error
    except RecursionError as error:
        raise _invalid("the body is nested too deeply") from error
