from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_schemas.ids import MAX_COUNT
from spark_service.errors import RequestError
from spark_service.ingest import excerpt, parse_upload, require_idempotency_key, require_json

STEADY = settings(deadline=None, derandomize=True)


def fault(raw: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_upload(raw)
    return caught.value


def edited(make: Any, edit: Callable[[dict[str, Any]], object]) -> bytes:
    shape = make.shape()
    data = json.loads(make.body(shape, [make.session(shape, make.hash(0), prefill=20)]))
    edit(data)
    return json.dumps(data).encode()


def test_a_valid_upload_comes_back(make: Any) -> None:
    shape = make.shape()
    upload = make.upload(shape, make.sessions(shape))
    assert parse_upload(upload.model_dump_json().encode()) == upload


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"{'a': 1}", b"[" * 100_000, b'{"a": NaN}x'])
def test_what_is_no_json(raw: bytes) -> None:
    error = fault(raw)
    assert (error.status, error.code, error.field) == (400, "invalid_json", "body")


@pytest.mark.parametrize(
    ("edit", "field", "found"),
    [
        (lambda d: d.update(extra=1), "extra", "1"),
        (lambda d: d.pop("model"), "model", "nothing"),
        (lambda d: d.update(schema_version=3), "schema_version", "3"),
        (lambda d: d.update(sessions=[]), "sessions", "a list of 0"),
        (lambda d: d["sessions"][0]["decode"].update(tokens="300"), "sessions[0].decode.tokens", "'300'"),
        (lambda d: d["sessions"][0]["decode"].update(tokens=300.0), "sessions[0].decode.tokens", "300.0"),
        (
            lambda d: d["sessions"][0]["decode"]["layers"][1]["counts"].__setitem__(2, -1),
            "sessions[0].decode.layers[1].counts[2]",
            "-1",
        ),
        (lambda d: d["sessions"][0].update(session_hash="A" * 64), "sessions[0].session_hash", f"'{'A' * 64}'"),
        (lambda d: d["sessions"][0].update(workload="-x"), "sessions[0].workload", "'-x'"),
        # Invariants.
        (lambda d: d["sessions"][0].update(split="held_out"), "sessions[0].split", "held_out"),
        (lambda d: d["sessions"][0].update(reuse=None), "sessions[0].reuse", "absent"),
        (lambda d: d["sessions"][0]["decode"].update(tokens=0), "sessions[0].decode.tokens", "0"),
        (
            lambda d: d["sessions"][0]["decode"]["layers"][0]["counts"].append(0),
            "sessions[0].decode.layers[0].counts",
            "13 entries",
        ),
        (
            lambda d: d["model"]["layers"][0].update(expert_bytes=MAX_COUNT),
            "model.layers",
            f"{12 * MAX_COUNT + 1600 + 400 + 1000} bytes with core_bytes",
        ),
    ],
)
def test_faults_name_field_and_found(make: Any, edit: Any, field: str, found: str) -> None:
    error = fault(edited(make, edit))
    assert (error.status, error.code, error.field, error.found) == (422, "invalid_histogram", field, found)
    assert error.expected
    assert error.hint


def test_a_thousand_unknown_fields_are_counted_only() -> None:
    error = fault(json.dumps({f"x{number}": 1 for number in range(2000)}).encode())
    assert (error.code, error.found) == ("invalid_histogram", "2003 faults")


def test_a_json_value_that_is_no_object() -> None:
    assert (fault(b"3").field, fault(b"3").found) == ("body", "3")


@STEADY
@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_json_is_refused_in_words(value: object) -> None:
    error = fault(json.dumps(value).encode())
    assert error.status in (400, 422)
    assert len(error.message) < 500


def test_excerpts_are_short() -> None:
    for value in (10**5000, "x" * 10_000, ["a"] * 10_000, {"a": "b" * 10_000}, b"\xff" * 100, 1.5):
        assert len(excerpt(value)) <= 80


@pytest.mark.parametrize("key", ["a", "!~", "x" * 255, "0f3e7c1a-uuid"])
def test_good_keys(key: str) -> None:
    assert require_idempotency_key([key]) == key


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ([], "idempotency_key_missing"),
        ([""], "idempotency_key_invalid"),
        (["a b"], "idempotency_key_invalid"),
        (["ä"], "idempotency_key_invalid"),
        (["x" * 256], "idempotency_key_invalid"),
        (["a\n"], "idempotency_key_invalid"),
        (["a", "a"], "idempotency_key_invalid"),
    ],
)
def test_bad_keys(keys: list[str], code: str) -> None:
    with pytest.raises(RequestError) as caught:
        require_idempotency_key(keys)
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize("header", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_json(header: str) -> None:
    require_json(header)


@pytest.mark.parametrize("header", [None, "", "text/plain", "application/jsonp", "application/problem+json"])
def test_other_media_types(header: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        require_json(header)
    assert (caught.value.status, caught.value.code) == (415, "unsupported_media_type")
