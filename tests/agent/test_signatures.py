from __future__ import annotations

import base64
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from signing_keys import KEYS, info, rotation, sign

from spark_agent.signatures import SignedBy, keys_leading_to, parse_public_key, verifies
from spark_schemas.signature import Rotation, Signature, key_id_of


@given(st.binary(max_size=200), st.integers(0, 10**6), st.integers(0, 7))
def test_one_bit_is_enough(content: bytes, place: int, bit: int) -> None:
    signature = sign(0, content)
    assert verifies(KEYS[0], content, signature)
    assert not verifies(KEYS[1], content, signature)
    assert not verifies(KEYS[1], content, Signature(key_id_of(KEYS[1]), signature.value))
    flipped = bytearray(content + signature.value)
    flipped[place % len(flipped)] ^= 1 << bit
    changed, value = bytes(flipped[: len(content)]), bytes(flipped[len(content) :])
    assert not verifies(KEYS[0], changed, Signature(signature.key_id, value))


@given(st.permutations(range(6)), st.integers(1, 5), st.data())
def test_a_chain_leads_from_every_key_of_it_to_the_last(order: list[int], length: int, data: st.DataObject) -> None:
    chain = [rotation(old, new) for old, new in pairwise(order[: length + 1])]
    shown = info(order[length], *chain)
    for start in range(length):
        way = keys_leading_to(KEYS[order[start]], shown)
        assert way == tuple(KEYS[number] for number in order[start:length])
    assert keys_leading_to(KEYS[order[length]], shown) is None, "that is the key itself"
    for outside in order[length + 1 :]:
        assert keys_leading_to(KEYS[outside], shown) is None
    # Any broken link, and nothing before it leads there.
    broken = data.draw(st.integers(0, length - 1))
    forger = data.draw(st.sampled_from([number for number in range(6) if number != order[broken]]))
    chain[broken] = rotation(order[broken], order[broken + 1], by=forger)
    for start in range(broken + 1):
        assert keys_leading_to(KEYS[order[start]], info(order[length], *chain)) is None
    for start in range(broken + 1, length):
        assert keys_leading_to(KEYS[order[start]], info(order[length], *chain)) is not None


def test_a_statement_for_another_key_leads_nowhere() -> None:
    honest = rotation(0, 1)
    stolen = Rotation(old_key=honest.old_key, new_key=KEYS[2], signature=honest.signature)
    assert keys_leading_to(KEYS[0], info(2, stolen)) is None
    assert keys_leading_to(KEYS[0], info(2, rotation(1, 2))) is None
    assert keys_leading_to(KEYS[0], info(2)) is None
    # Something signed as a manifest is no statement.
    manifest = base64.b64encode(sign(0, b'{"new_key": 1}').value).decode()
    assert keys_leading_to(KEYS[0], info(1, Rotation(old_key=KEYS[0], new_key=KEYS[1], signature=manifest))) is None


def test_circles_end() -> None:
    around = [rotation(0, 1), rotation(1, 0), rotation(0, 1)]
    assert keys_leading_to(KEYS[0], info(1, *around)) == (KEYS[0], KEYS[1], KEYS[0])
    assert keys_leading_to(KEYS[0], info(2, *around)) is None


@pytest.mark.parametrize("text", ["", "x", KEYS[0][:-1], KEYS[0] + "=", KEYS[0] + "\n", "ä" * 44, "A" * 42 + "B="])
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(ValueError, match="Ed25519 public key"):
        parse_public_key(text)
    assert parse_public_key(KEYS[0]) == KEYS[0]


def test_kept_signatures_are_checked_when_read() -> None:
    kept = SignedBy(service_url="http://a", key=KEYS[0], signature=sign(0, b"x").header())
    assert SignedBy.model_validate_json(kept.model_dump_json()).covers(b"x")
    assert not kept.covers(b"y")
    with pytest.raises(ValidationError, match="keyid"):
        SignedBy(service_url="http://a", key=KEYS[0], signature="ed25519")
