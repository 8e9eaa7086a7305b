from __future__ import annotations

import datetime as dt
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spark_schemas.signature import (
    PinSignature,
    Rotation,
    Signature,
    SigningKeyInfo,
    key_id_of,
    key_text,
    pin_message,
    rotation_message,
)

KEY = st.binary(min_size=32, max_size=32)
VALUE = st.binary(min_size=64, max_size=64)


@given(KEY, VALUE)
def test_headers_are_read_back(public: bytes, value: bytes) -> None:
    key = key_text(public)
    signature = Signature(key_id_of(key), value)
    assert Signature.parse(signature.header()) == signature
    assert key_id_of(key) == hashlib.sha256(public).hexdigest()[:32]
    assert SigningKeyInfo(key=key, key_id=key_id_of(key)).key == key


@given(st.text() | st.from_regex(r"ed25519;keyid=[0-9a-f]{0,40};sig=[A-Za-z0-9+/=]{0,100}\s?"))
def test_nothing_else_is_a_header(text: str) -> None:
    try:
        found = Signature.parse(text)
    except ValueError:
        return
    assert found.header() == text


@given(KEY, KEY, KEY, KEY)
def test_statements_differ_where_keys_do(a: bytes, b: bytes, c: bytes, d: bytes) -> None:
    one, other = (rotation_message(key_text(x), key_text(y)) for x, y in ((a, b), (c, d)))
    assert (one == other) == ((a, b) == (c, d))
    assert not one.startswith(b"{"), "no manifest is a statement"


@pytest.mark.parametrize("key", ["", "A" * 43, "A" * 42 + "B=", "A" * 44, "A" * 43 + "=\n", "-" * 43 + "="])
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(ValidationError):
        SigningKeyInfo(key=key, key_id="0" * 32)
    with pytest.raises(ValidationError):
        Rotation(old_key=key, new_key="A" * 43 + "=", signature="A" * 86 + "==")


@given(KEY, VALUE, st.dates())
def test_signatures_of_pins_are_read_back(public: bytes, value: bytes, day: dt.date) -> None:
    found = PinSignature(key_id_of(key_text(public)), day, value)
    assert PinSignature.parse(found.header()) == found


@given(
    st.text()
    | st.from_regex(r"ed25519;keyid=[0-9a-f]{32};day=[0-9]{4}-[0-9]{2}-[0-9]{2};sig=[A-Za-z0-9+/]{85}[AQgw]==\s?")
)
def test_nothing_else_is_a_signature_of_a_pin(text: str) -> None:
    try:
        found = PinSignature.parse(text)
    except ValueError:
        return
    assert found.header() == text


def test_a_pin_is_of_everything_that_it_names() -> None:
    names, day = ("mf1-a", "code", "decode", "c" * 64), dt.date(2026, 11, 30)
    said = {pin_message(*names, day), pin_message(*names, dt.date(2026, 12, 1))}
    said |= {pin_message(*names[:index], "other", *names[index + 1 :], day) for index in range(4)}
    assert len(said) == 6
    assert not any(one.startswith((b"{", b"spark-key")) for one in said), "nothing else that is signed is a pin"
