"""The OpenAPI document: all that a program needs to speak to this service, written by someone who has only it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from spark_schemas.api import API_PREFIX, PROBLEM_MEDIA_TYPE, Problem
from spark_schemas.histogram import MAX_SESSIONS_PER_UPLOAD, HistogramUpload
from spark_schemas.ids import MAX_COUNT
from spark_schemas.mix import MIX_EXPECTED
from spark_schemas.split import split_of
from spark_service.admin import REQUEST_BODIES
from spark_service.auth import add_security
from spark_service.inflate import ENCODINGS, BodyLimits
from spark_service.ingest import MAX_KEY_LENGTH
from spark_service.windows import WINDOW_STEPS_DAYS

__all__ = ["PROBLEM_CODES", "UPLOAD_EXTRA", "example_upload", "install_document"]

PROBLEM_CODES: dict[str, tuple[int, str]] = {
    "idempotency_key_missing": (400, "the request has no Idempotency-Key, or several"),
    "idempotency_key_invalid": (400, "the Idempotency-Key is empty, too long, or not visible ASCII"),
    "body_incomplete": (400, "the connection ended before the body did"),
    "bad_encoding": (400, "the body is not one whole stream of what Content-Encoding says"),
    "invalid_json": (400, "the body is no JSON document in UTF-8"),
    "duplicate_key": (400, "an object of the body has a key twice"),
    "unauthorized": (401, "the request carries no valid token"),
    "wrong_scope": (403, "the token's scope does not reach this operation"),
    "not_local": (403, "the service is open to its own machine alone, and the request names or comes from another"),
    "open_service": (403, "a service run with --open gives no lasting secrets"),
    "not_found": (404, "there is no such path"),
    "unknown_model": (404, "nothing was uploaded for this fingerprint"),
    "unknown_workload": (404, "nothing was uploaded for this workload of the model"),
    "no_calibration_sessions": (404, "the workload has no session on the calibration side in this phase"),
    "too_few_sessions": (404, "the workload has fewer calibration sessions than a profile needs to be given away"),
    "no_profiles": (404, "the model has no workload with a profile in this phase"),
    "no_history": (404, "no manifest was served for this question yet"),
    "unknown_revision": (404, "the profile revision was never served"),
    "unknown_token": (404, "there is no token of this id"),
    "unknown_backup": (404, "there is no backup of this name"),
    "method_not_allowed": (405, "the path has no such method; Allow lists those it has"),
    "model_mismatch": (409, "the fingerprint is known with another shape"),
    "token_ended": (409, "the token was revoked or has expired"),
    "backup_running": (409, "a backup is being made already; Retry-After says when to ask again"),
    "body_too_large": (413, "the body is longer than the service takes, as sent or inflated"),
    "unsupported_media_type": (415, "Content-Type is not application/json"),
    "unsupported_encoding": (415, "Content-Encoding is none of those taken; Accept-Encoding lists them"),
    "invalid_histogram": (422, "the upload does not fit its schema, or its counts cannot be true"),
    "idempotency_key_reused": (422, "the key was used with other content"),
    "invalid_parameter": (422, "a parameter is missing, unknown, there twice, or has a value it cannot have"),
    "context_too_long": (422, "n_ctx is above the model's context length"),
    "budget_too_small": (422, "the model does not fit the memory budget"),
    "counts_unusable": (422, "the session's counts cannot be compared with this model's profiles"),
    "one_session_expected": (422, "the upload has another number of sessions than one"),
    "no_retention": (422, "the service keeps everything, and no number of days was sent"),
    "invalid_pin": (422, "the body is no pin"),
    "too_many_requests": (429, "more requests than the service takes from one client; Retry-After says when to go on"),
    "too_many_builds": (429, "more new mixes and windows than the service builds; Retry-After says when to go on"),
    "internal_error": (500, "a fault of the service"),
    "storage_unavailable": (503, "the database cannot answer; nothing was changed; Retry-After says when to try again"),
    "signing_key_unavailable": (503, "the key that signs manifests cannot be used; none is sent unsigned"),
    "storage_full": (507, "no room left; nothing was kept; the same request can be sent again later"),
}
"""Every ``code`` of a problem: its HTTP status and what it means."""

_EXAMPLE_HASH = "3f" * 32
_VECTORS = ("00" * 32, "ff" * 32, _EXAMPLE_HASH, "04" * 32)


def example_upload() -> dict[str, Any]:
    """A small upload that is taken."""
    tokens = 3
    return {
        "schema_version": 1,
        "agent_version": "example 1.0",
        "model": {
            "schema_version": 1,
            "fingerprint": "mf1-" + "1" * 32,
            "sibling": "ms1-" + "2" * 32,
            "architecture": "example",
            "name": "Example MoE",
            "n_blocks": 2,
            "context_length": 4096,
            "core_bytes": 1000000,
            "kv_bytes_per_token": 512,
            "state_bytes": 0,
            "layers": [
                {
                    "block": 1,
                    "n_experts": 4,
                    "top_k": 2,
                    "n_shared": 0,
                    "fused_gate_up": False,
                    "expert_bytes": 4096,
                    "tensor_types": {"up": "q4_K", "gate": "q4_K", "down": "q6_K"},
                }
            ],
        },
        "sessions": [
            {
                "session_hash": _EXAMPLE_HASH,
                "split": split_of(_EXAMPLE_HASH),
                "workload": "code-heavy",
                "prefill": {"tokens": 5, "layers": [{"block": 1, "tokens": 1, "counts": [1, 0, 1, 0]}]},
                "decode": {"tokens": tokens, "layers": [{"block": 1, "tokens": tokens, "counts": [3, 2, 1, 0]}]},
                "reuse": [{"block": 1, "distances": [1, 2, 0, 0, 3]}],
            }
        ],
    }


def _description() -> str:
    limits = BodyLimits()
    vectors = "\n".join(f"| `{session_hash}` | `{split_of(session_hash)}` |" for session_hash in _VECTORS)
    steps = ", ".join(map(str, WINDOW_STEPS_DAYS))
    codes = "\n".join(f"| {status} | `{code}` | {meaning} |" for code, (status, meaning) in PROBLEM_CODES.items())
    return f"""Collects routing histograms of mixture-of-experts models, builds profiles, serves placement manifests.

## Requests
Paths under `{API_PREFIX}` need `Authorization: Bearer TOKEN` unless the service runs without tokens. Unknown and
repeated query parameters are errors. Unknown fields of a body are errors, and so are a key that is there twice, `1.0`
or `"1"` where an integer is due, and numbers that are not finite. Integers are at most 2^53 = {MAX_COUNT} unless a
smaller bound is given.

## Uploads
One JSON object in UTF-8 without a byte order mark, as it is or as one {ENCODINGS[0]} frame or one {ENCODINGS[1]} member
(`Content-Encoding`): at most {limits.body_bytes} bytes as sent and {limits.inflated_bytes} inflated unless the service
is configured otherwise, and at most {MAX_SESSIONS_PER_UPLOAD} sessions. zstd frames may ask for a window of at most
32 MiB. Nothing is taken before the whole upload was checked; `202` is sent after it was committed.

`Idempotency-Key` names the content: repeat a request that had no answer with the same key and the same JSON bytes (they
may be compressed otherwise), and the answer is the first one. Another content under a used key is refused. Equal
sessions are stored once under whatever keys they come; all but the first are counted as `duplicates`, as are sessions
that were deleted.

`session_hash` is 64 lower-case hex digits: HMAC-SHA256, under a key that the team keeps, of what identifies the
session's lineage, so that a fork or a resumed copy has its parent's. `split` follows from it and is refused where it
does not:

    digest = SHA-256("spark-split-v1" in ASCII, then the 32 bytes that session_hash spells)
    split  = "held_out" if (first 8 bytes of digest as a big-endian integer) x 5 < 2^64, else "calibration"

| session_hash | split |
|---|---|
{vectors}

For every session, with the model's `layers` in order (blocks without experts are absent, not zero):
- at least one of `prefill` and `decode` is there; `reuse` is there exactly when `decode` is;
- each lists the same blocks as the model, in the same order; `tokens` of a phase is at least 1;
- a block's `tokens` equals the phase's; in `prefill` the block `n_blocks - 1` may have fewer;
- `counts` has `n_experts` entries, their sum is `tokens x top_k` of the block, none is above the block's `tokens`;
- `distances` has `n_experts + 1` entries with the sum of the block's decode `counts`; entry d counts selections of the
  d-th most recently used expert of the block (0: the last one used); the last entry counts first selections in the
  session and is at least the number of experts with a count;
- `live` only in `schema_version` 2 and beside `decode`: its `selections` are the sum of all decode `counts`, its
  `cold_hits` at most those, its `resident_bytes` at most all experts' bytes; it is no part of what makes two sessions
  equal, and of equal ones the first one's is kept;
- `core_bytes` plus all experts' bytes is at most 2^53.
The first upload of a fingerprint says what the model is; a later one that differs in anything but `name` is refused.

## Mixes and windows
Where `workload` stands in a path, a mix may stand, such as `code-heavy:7+chat:3`: {MIX_EXPECTED}. `+` and `:` may be
percent-encoded. Answers carry the canonical spelling, which is the same for all that mean the same: names sorted,
weights divided by their greatest common divisor and always written, and a mix of one workload is that workload. Its
frequencies, and its rates on held-out sessions, are the weighted means of its workloads' own. An upload's `workload` is
never a mix.

`window_days` and `half_life_days` are one of {steps}, or what the service is set to, which holds where they are left
out. What was served before, and what is pinned, is of the service's own window alone. Mixes and other windows are built
for a share of the time; then `429 too_many_builds`.

## Answers
Answers that list an `ETag` header have a strong one; sent back in `If-None-Match`, it is answered `304` without a body
while nothing has changed. Every error is `{PROBLEM_MEDIA_TYPE}` (RFC 9457) with a stable `code`; where one field is at
fault, `field`, `found` and `expected` name it. `429`, `503`, `507`, `409 backup_running` and lost connections can be
tried again as they are; other errors need another request.

| status | code | meaning |
|---|---|---|
{codes}
"""


def install_document(app: FastAPI) -> None:
    """Let the app answer with the whole document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version="v1", description=_description(), routes=app.routes)
            _, definitions = models_json_schema(
                [
                    (HistogramUpload, "validation"),
                    (Problem, "serialization"),
                    *((model, "validation") for model in REQUEST_BODIES),
                ],
                ref_template="#/components/schemas/{model}",
            )
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions["$defs"])
            add_security(schema)
            for path, operations in schema["paths"].items():
                for method, operation in operations.items():
                    _complete(path, method, operation)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    codes = {"internal_error"}
    if path != "/healthz":
        codes.add("storage_unavailable")
    if path.startswith(API_PREFIX):
        codes |= {"unauthorized", "wrong_scope", "not_local", "too_many_requests"}
    if operation.get("parameters"):
        codes.add("invalid_parameter")
    codes |= _OWN_CODES.get((method, path.removeprefix(API_PREFIX)), set())
    for status in sorted({PROBLEM_CODES[code][0] for code in codes}):
        listed = [code for code in PROBLEM_CODES if code in codes and PROBLEM_CODES[code][0] == status]
        responses[str(status)] = _problem(status, listed)
    if any(parameter["name"].lower() == "if-none-match" for parameter in operation.get("parameters", ())):
        tag = {"ETag": {"required": True, "schema": {"type": "string"}, "description": "Names this answer's bytes."}}
        responses["200"]["headers"] = tag
        responses["304"] = {"description": "The client has the current answer; no body.", "headers": tag}


def _problem(status: int, codes: list[str]) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": "; ".join(f"`{code}`: {PROBLEM_CODES[code][1]}" for code in codes),
        "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    if status == 401:
        response["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    if status in (429, 503):
        response["headers"] = {
            "Retry-After": {"schema": {"type": "string"}, "description": "Seconds to wait before trying again."}
        }
    return response


_READ_CODES = {"unknown_model", "unknown_workload", "no_calibration_sessions", "too_few_sessions"}
_MANIFEST_CODES = _READ_CODES | {"budget_too_small", "context_too_long", "signing_key_unavailable", "unknown_revision"}
_PIN_CODES = {"unknown_revision", "invalid_pin", "body_incomplete", "body_too_large", "no_history", "storage_full"}
_BODY_CODES = {
    "body_incomplete",
    "bad_encoding",
    "invalid_json",
    "duplicate_key",
    "body_too_large",
    "unsupported_media_type",
    "unsupported_encoding",
    "invalid_histogram",
}
_OWN_CODES: dict[tuple[str, str], set[str]] = {
    ("post", "/histograms"): {
        "idempotency_key_missing",
        "idempotency_key_invalid",
        "body_incomplete",
        "bad_encoding",
        "invalid_json",
        "duplicate_key",
        "model_mismatch",
        "body_too_large",
        "unsupported_media_type",
        "unsupported_encoding",
        "invalid_histogram",
        "idempotency_key_reused",
        "storage_full",
    },
    ("delete", "/sessions/{session_hash}"): {"storage_full"},
    ("get", "/profiles/{fingerprint}/{workload}"): _READ_CODES | {"too_many_builds"},
    ("get", "/manifests/{fingerprint}/{workload}"): _MANIFEST_CODES | {"too_many_builds"},
    ("get", "/signing-key"): {"signing_key_unavailable"},
    ("post", "/admin/retention"): {
        "invalid_json",
        "body_incomplete",
        "invalid_parameter",
        "body_too_large",
        "no_retention",
        "storage_full",
    },
    ("get", "/manifests/{fingerprint}/{workload}/history"): _MANIFEST_CODES | {"no_history"},
    ("get", "/manifests/{fingerprint}/{workload}/diff"): _MANIFEST_CODES | {"no_history"},
    ("post", "/admin/manifests/{fingerprint}/{workload}/pin"): _READ_CODES | _PIN_CODES,
    ("delete", "/admin/manifests/{fingerprint}/{workload}/pin"): _READ_CODES | _PIN_CODES,
    ("post", "/workloads/nearest"): _READ_CODES
    | _BODY_CODES
    | {"no_profiles", "counts_unusable", "one_session_expected", "model_mismatch"},
    ("post", "/admin/backup"): {"backup_running", "storage_full"},
    ("post", "/admin/tokens"): {
        "invalid_json",
        "body_incomplete",
        "invalid_parameter",
        "open_service",
        "body_too_large",
    },
    ("delete", "/admin/tokens/{token_id}"): {"unknown_token"},
    ("post", "/admin/tokens/{token_id}/rotate"): {
        "invalid_json",
        "body_incomplete",
        "body_too_large",
        "open_service",
        "unknown_token",
        "token_ended",
    },
    ("get", "/admin/backups/{name}"): {"unknown_backup"},
    ("delete", "/admin/backups/{name}"): {"unknown_backup"},
    ("delete", "/admin/drift/{fingerprint}/{workload}"): {"storage_full"},
}
"""Codes that an operation has beside those of its kind."""

UPLOAD_EXTRA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/HistogramUpload"},
                "example": example_upload(),
            }
        },
    },
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": True,
            "description": "Names the content, for example a fresh UUID; the same one whenever it is sent again.",
            "schema": {"type": "string", "pattern": f"^[!-~]{{1,{MAX_KEY_LENGTH}}}$"},
            "example": "5f0c6f4e-6f1c-4d0e-9b57-0f6c8d9f3a11",
        },
        {
            "name": "Content-Encoding",
            "in": "header",
            "required": False,
            "description": "How the body is compressed.",
            "schema": {"type": "string", "enum": list(ENCODINGS), "default": "identity"},
        },
    ],
}
"""What FastAPI does not know of an upload, whose body it does not parse."""
