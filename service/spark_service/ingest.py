"""From an upload's bytes to a checked histogram upload. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from spark_schemas.histogram import HistogramUpload
from spark_schemas.ids import MAX_COUNT
from spark_schemas.invariants import InvariantError, check_upload
from spark_schemas.model import ModelShape
from spark_service.errors import RequestError
from spark_service.single_keys import require_single_keys

__all__ = ["excerpt", "invalid_value", "parse_upload", "require_idempotency_key", "require_json"]

MAX_KEY_LENGTH = 255
MAX_FAULTS = 1000
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_LENGTH}}}")


def require_idempotency_key(values: Sequence[str]) -> str:
    """Return the one Idempotency-Key of a request. Raises :class:`RequestError` (400) otherwise."""
    expected = f"one key of 1 to {MAX_KEY_LENGTH} visible ASCII characters"
    if len(values) == 1 and _KEY.fullmatch(values[0]):
        return values[0]
    found = excerpt(values[0]) if len(values) == 1 else f"{len(values) or 'no'} keys"
    raise RequestError(
        400,
        "idempotency_key_invalid" if values else "idempotency_key_missing",
        f"Idempotency-Key: found {found}, expected {expected}",
        field="header.Idempotency-Key",
        found=found,
        expected=expected,
        hint="send a fresh UUID with every new upload, and the same one when repeating it",
    )


def require_json(content_type: str | None) -> None:
    """Raise :class:`RequestError` (415) unless the body is declared as JSON."""
    if (content_type or "").split(";")[0].strip().lower() != "application/json":
        found = "none" if content_type is None else excerpt(content_type)
        raise RequestError(
            415,
            "unsupported_media_type",
            f"Content-Type: found {found}, expected application/json",
            field="header.Content-Type",
            found=found,
            expected="application/json",
            hint="send JSON with Content-Type: application/json",
        )


def parse_upload(raw: bytes) -> HistogramUpload:
    """Parse and check an upload.

    Raises :class:`RequestError`: 400 for what is no JSON or has a key twice, 422 naming the field, the found and the
    expected otherwise.
    """
    try:
        upload = HistogramUpload.model_validate_json(raw)
    except ValidationError as error:
        raise _invalid(error) from error
    require_single_keys(raw, upload)
    try:
        _check_sizes(upload.model)
        check_upload(upload)
    except InvariantError as error:
        raise RequestError(
            422,
            "invalid_histogram",
            str(error),
            field=error.field,
            found=error.found,
            expected=error.expected,
            hint="these counts cannot be true: bring the agent to a current version and record again",
        ) from error
    return upload


def _check_sizes(model: ModelShape) -> None:
    total = model.core_bytes + model.expert_bytes_total
    if total > MAX_COUNT:
        raise InvariantError("model.layers", f"{total} bytes with core_bytes", f"at most {MAX_COUNT} bytes")


def _invalid(error: ValidationError) -> RequestError:
    if error.error_count() > MAX_FAULTS:
        # Listing them would cost more than the parse did.
        return RequestError(
            422,
            "invalid_histogram",
            f"body: found {error.error_count()} faults, expected a histogram upload",
            field="body",
            found=f"{error.error_count()} faults",
            expected="a histogram upload",
            hint="compare with the schema in /api/openapi.json",
        )
    first: Mapping[str, Any] = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return RequestError(
            400,
            "invalid_json",
            f"body: {first['msg']}, expected a JSON object",
            field="body",
            expected="a JSON object",
            hint="send the upload as one UTF-8 JSON object",
        )
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".") or "body"
    found, expected = excerpt(first["input"]), str(first["msg"])
    if first["type"] == "missing":
        found, expected = "nothing", "this field"
    more = error.error_count() - 1
    return RequestError(
        422,
        "invalid_histogram",
        f"{field}: found {found}, expected: {expected}" + (f" (and {more} more faults)" if more else ""),
        field=field,
        found=found,
        expected=expected,
        hint="compare with the schema in /api/openapi.json",
    )


def excerpt(value: object, limit: int = 80) -> str:
    """A value as a short text; containers by their kind and size, because their text could be the whole body."""
    if isinstance(value, (dict, list, tuple)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 4 * limit:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def invalid_value(error: Mapping[str, Any], field: str, kind: str, whole: str) -> RequestError:
    """What answers one of pydantic's errors (422): ``field`` is a ``kind`` (parameter, field) of a ``whole``."""
    found = "nothing" if error["type"] == "missing" else excerpt(error["input"])
    expected = {"missing": f"this {kind}", "extra_forbidden": f"no such {kind}"}.get(error["type"], error["msg"])
    return RequestError(
        422,
        "invalid_parameter",
        f"{field}: found {found}, expected: {expected}",
        field=field,
        found=found,
        expected=expected,
        hint=f"see /api/openapi.json for the {kind}s of this {whole}",
    )
