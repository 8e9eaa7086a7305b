from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_schemas.ids import MAX_COUNT
from spark_service.errors import StorageError
from spark_service.packed import pack_counts, pack_upload, unpack_counts

STEADY = settings(deadline=None, derandomize=True)


@STEADY
@given(st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 300), min_size=1, max_size=50))
def test_counts_come_back(counts: list[int]) -> None:
    packed = pack_counts(np.array(counts, np.int64))
    assert unpack_counts(packed, len(counts)).tolist() == counts


@pytest.mark.parametrize(
    ("largest", "width"),
    [(0, 1), (255, 1), (256, 2), (65535, 2), (65536, 4), (2**32 - 1, 4), (2**32, 8), (MAX_COUNT, 8)],
)
def test_the_narrowest_width_is_taken(largest: int, width: int) -> None:
    assert pack_counts(np.array([0, largest, 1])) == b"".join(n.to_bytes(width, "little") for n in (0, largest, 1))


@pytest.mark.parametrize("size", [0, 1, 2, 4, 9, 15, 25])
def test_other_lengths_are_damage(size: int) -> None:
    with pytest.raises(StorageError, match=f"found {size} bytes, expected 3 numbers"):
        unpack_counts(b"\0" * size, 3)


def test_an_upload_keeps_its_order_and_its_ids(make: Any) -> None:
    shape = make.shape()
    sessions = make.sessions(shape, 2, 1, prefill=20)
    packed = pack_upload(make.upload(shape, sessions))
    assert packed.model is shape
    lengths = np.array([layer.n_experts for layer in shape.layers])
    for one, session in zip(packed.sessions, sessions, strict=True):
        assert one.content_id == session.content_id(shape.fingerprint)
        assert (one.session_hash, one.split, one.workload) == (session.session_hash, session.split, session.workload)
        assert [phase.phase for phase in one.phases] == ["prefill", "decode"]
        prefill, decode = one.phases
        assert prefill.reuse is None
        for phase, sent in ((prefill, session.prefill), (decode, session.decode)):
            assert phase.tokens == sent.tokens
            assert phase.layer_tokens == tuple(layer.tokens for layer in sent.layers)
            flat = [count for layer in sent.layers for count in layer.counts]
            assert unpack_counts(phase.counts, lengths.sum()).tolist() == flat
        assert decode.reuse is not None
        distances = [count for layer in session.reuse for count in layer.distances]
        assert unpack_counts(decode.reuse, (lengths + 1).sum()).tolist() == distances
