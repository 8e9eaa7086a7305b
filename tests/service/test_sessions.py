from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from spark_schemas.ids import MAX_COUNT
from spark_service.sessions import SessionPart, merge_parts, split_sessions


def part(content_id: str, session_hash: str, counts: list[list[int]], tokens: int = 1) -> SessionPart:
    return SessionPart(content_id, "code", session_hash, tokens, tuple(np.array(layer) for layer in counts), None)


def test_parts_add_up_in_any_order(make: Any) -> None:
    shape = make.shape()
    sessions = [make.session(shape, make.hash(n % 2), seed=n) for n in range(4)]
    parts = make.parts(shape, sessions)
    for order in itertools.permutations(parts):
        merged = merge_parts(order)
        assert [session.session_hash for session in merged] == sorted([make.hash(0), make.hash(1)])
        for session in merged:
            mine = [p for p in parts if p.session_hash == session.session_hash]
            assert session.tokens == sum(p.tokens for p in mine)
            for layer in range(3):
                np.testing.assert_array_equal(session.counts[layer], sum(p.counts[layer] for p in mine))
                assert session.reuse is not None
                np.testing.assert_array_equal(session.reuse[layer], sum(p.reuse[layer] for p in mine if p.reuse))


def test_sums_beyond_64_bits_keep_their_shares() -> None:
    parts = [part(str(n), "a", [[MAX_COUNT, MAX_COUNT // 2, 0], [0, 1, 2]], tokens=MAX_COUNT) for n in range(3000)]
    [session] = merge_parts(parts)
    assert session.tokens == MAX_COUNT
    assert 0 < session.counts[0].sum() <= MAX_COUNT
    np.testing.assert_allclose(session.counts[0] / session.counts[0].sum(), [2 / 3, 1 / 3, 0], rtol=1e-9)


def test_sessions_without_selections_are_left_out() -> None:
    assert [s.session_hash for s in merge_parts([part("1", "a", [[0, 0]]), part("2", "b", [[0, 1]])])] == ["b"]
    assert merge_parts([]) == []


def test_the_split_comes_from_the_hash(make: Any) -> None:
    parts = [part(str(n), make.hash(n, side), [[1]]) for n in range(3) for side in ("calibration", "held_out")]
    calibration, held_out = split_sessions(merge_parts([SessionPart(f"{p.session_hash}", *p_fields(p)) for p in parts]))
    assert [s.session_hash for s in calibration] == sorted(make.hash(n) for n in range(3))
    assert [s.session_hash for s in held_out] == sorted(make.hash(n, "held_out") for n in range(3))


def p_fields(p: SessionPart) -> tuple[Any, ...]:
    return p.workload, p.session_hash, p.tokens, p.counts, p.reuse
