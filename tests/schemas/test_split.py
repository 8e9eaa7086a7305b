"""The split: pure, stable, a fifth held out."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_schemas.split import HELD_OUT_SHARE, split_of

HASHES = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(HASHES)
def test_it_is_the_documented_rule(session_hash: str) -> None:
    digest = hashlib.sha256(b"spark-split-v1" + bytes.fromhex(session_hash)).digest()
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    assert split_of(session_hash) == ("held_out" if fraction < HELD_OUT_SHARE else "calibration")


def test_known_hashes_never_move() -> None:
    # Moving a hash to the other side would leak calibration sessions into the evaluation of old profiles.
    sides = "".join(split_of(hashlib.sha256(str(n).encode()).hexdigest())[0] for n in range(40))
    assert sides == KNOWN


KNOWN = "ccchchchccccchchccccchhhchccccccccchchch"


def test_a_fifth_is_held_out() -> None:
    sides = [split_of(hashlib.sha256(str(n).encode()).hexdigest()) for n in range(5000)]
    assert 0.18 < sides.count("held_out") / len(sides) < 0.22


@pytest.mark.parametrize("bad", ["", "zz", "abc"])
def test_what_is_not_a_hash_raises_or_is_hashed(bad: str) -> None:
    if bad == "":
        assert split_of(bad) in {"calibration", "held_out"}
    else:
        with pytest.raises(ValueError, match="non-hexadecimal"):
            split_of(bad)
