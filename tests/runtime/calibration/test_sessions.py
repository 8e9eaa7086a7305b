from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from spark_runtime.calibration.sessions import Rows, SessionPart, merge_parts, merge_rows
from spark_schemas.ids import MAX_COUNT


def part(content_id: str, session_hash: str, counts: list[list[int]], tokens: int = 1, day: int = 0) -> SessionPart:
    layers = tuple(np.array(layer) for layer in counts)
    return SessionPart(content_id, "code", session_hash, tokens, layers, None, day)


def test_parts_add_up_in_any_order(make: Any) -> None:
    shape = make.shape()
    sessions = [make.session(shape, make.hash(n % 2), seed=n) for n in range(4)]
    parts = make.parts(shape, sessions)
    for order in itertools.permutations(parts):
        merged = merge_parts(order)
        assert merged is not None
        assert list(merged.hashes) == sorted([make.hash(0), make.hash(1)])
        for index, session_hash in enumerate(merged.hashes):
            mine = [p for p in parts if p.session_hash == session_hash]
            assert merged.tokens[index] == sum(p.tokens for p in mine)
            assert merged.identities[index] == sum(int(p.content_id, 16) for p in mine) % 2**256
            np.testing.assert_array_equal(merged.counts[index], sum(np.concatenate(p.counts) for p in mine))
            assert merged.reuse is not None
            np.testing.assert_array_equal(merged.reuse[index], sum(np.concatenate(p.reuse or ()) for p in mine))


def test_sums_beyond_64_bits_keep_their_shares() -> None:
    parts = [part(str(n), "a", [[MAX_COUNT, MAX_COUNT // 2, 0], [0, 1, 2]], tokens=MAX_COUNT) for n in range(3000)]
    merged = merge_parts([*parts, part("1", "b", [[4, 0, 0], [0, 2, 2]])])
    assert merged is not None
    large, small = merged.counts
    assert merged.tokens.tolist() == [MAX_COUNT, 1]
    assert 0 < large.sum() <= MAX_COUNT
    np.testing.assert_allclose(large[:3] / large[:3].sum(), [2 / 3, 1 / 3, 0], rtol=1e-9)
    assert small.tolist() == [4, 0, 0, 0, 2, 2]


def test_sessions_without_selections_are_left_out() -> None:
    merged = merge_parts([part("1", "a", [[0, 0]]), part("2", "b", [[0, 1]])])
    assert merged is not None
    assert merged.hashes == ("b",)
    assert merge_parts([]) is None


def test_the_split_comes_from_the_hash(make: Any) -> None:
    hashes = [make.hash(n, side) for n in range(3) for side in ("calibration", "held_out")]
    merged = merge_parts([part(session_hash, session_hash, [[1]]) for session_hash in hashes])
    assert merged is not None
    assert set(merged.where(merged.held_out).hashes) == {make.hash(n, "held_out") for n in range(3)}
    assert set(merged.where(~merged.held_out).hashes) == {make.hash(n) for n in range(3)}


def test_a_session_is_as_new_as_its_last_part() -> None:
    merged = merge_parts([part("1", "a", [[1]], day=7), part("2", "a", [[1]], day=9), part("3", "b", [[1]], day=8)])
    assert merged is not None
    assert merged.days.tolist() == [9, 8]


def test_a_session_with_a_part_without_distances_has_none(make: Any) -> None:
    shape = make.shape()
    [one, two] = make.parts(shape, [make.session(shape, make.hash(n)) for n in range(2)])
    without = SessionPart(two.content_id, two.workload, two.session_hash, two.tokens, two.counts, None)
    assert merge_rows(Rows.of([one, without])).reuse is None
    assert merge_rows(Rows.of([one, two])).reuse is not None
    rows = Rows.of([two, one])
    joined = Rows.joined([rows.take([1]), rows.take([0])])
    np.testing.assert_array_equal(joined.counts, rows.counts[::-1])
