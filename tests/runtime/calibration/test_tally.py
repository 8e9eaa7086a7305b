from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.calibration.sessions import Rows, Sessions, merge_rows
from spark_runtime.calibration.tally import Tally, Window, tally_of
from spark_runtime.votes import Votes
from spark_schemas.ids import MAX_COUNT

N_EXPERTS = (3, 2)


@st.composite
def several(draw: st.DrawFn) -> list[Sessions]:
    """Batches of different sessions, as they may come from anywhere."""
    counts = st.one_of(st.integers(0, 5), st.integers(0, MAX_COUNT // 5))
    batches, number = [], 0
    for _ in range(draw(st.integers(1, 4))):
        n_sessions = draw(st.integers(1, 4))
        table = np.array([[draw(counts) for _ in range(5)] for _ in range(n_sessions)], dtype=np.int64)
        table[:, 0] += 1
        hashes = [f"{number + index:064x}" for index in range(n_sessions)]
        number += n_sessions
        days = np.array([draw(st.integers(100, 103)) for _ in hashes])
        tokens = np.array([draw(st.integers(1, 600)) for _ in hashes])
        batches.append(merge_rows(Rows(hashes, hashes, days, tokens, table, None)))
    return batches


def same(one: Tally, other: Tally) -> bool:
    return one.to_bytes() == other.to_bytes()


@settings(deadline=None, derandomize=True, max_examples=100)
@given(batches=several(), data=st.data())
def test_any_order_of_adding_and_taking_away_gives_the_same_bits(batches: list[Sessions], data: st.DataObject) -> None:
    tallies = [tally_of(N_EXPERTS, batch) for batch in batches]
    order = data.draw(st.permutations(range(len(tallies))))
    gone = data.draw(st.sets(st.sampled_from(range(len(tallies)))))
    total = Tally(N_EXPERTS)
    for index in order:
        total += tallies[index]
    for index in gone:
        total -= tallies[index]
    left = [batches[index] for index in range(len(batches)) if index not in gone]
    anew = Tally(N_EXPERTS)
    if left:
        rows = Rows.joined(
            [Rows([f"{i:x}" for i in b.identities], b.hashes, b.days, b.tokens, b.counts, b.reuse) for b in left]
        )
        anew = tally_of(N_EXPERTS, merge_rows(rows))
    assert same(total, anew)
    assert same(Tally.from_bytes(total.to_bytes()), total)
    for side in ("calibration", "held_out"):
        assert total.votes(side).n_sessions == sum(  # type: ignore[arg-type]
            int((batch.held_out == (side == "held_out")).sum()) for batch in left
        )


def test_the_frequencies_are_the_mean_of_shares(make: Any) -> None:
    counts = np.array([[3, 1, 0, 4, 0], [0, 0, 8, 1, 1]])
    hashes = [make.hash(0), make.hash(1)]
    tally = tally_of(N_EXPERTS, merge_rows(Rows(hashes, hashes, np.zeros(2, int), np.array([256, 128]), counts, None)))
    first, second = tally.votes("calibration").frequencies()
    prior = 4 / 256
    total = 1.5 + prior
    np.testing.assert_allclose(first, (np.array([0.75, 0.25, 0.5]) + prior / 3) / total, rtol=1e-9)
    np.testing.assert_allclose(second, (np.array([1.25, 0.25]) + prior / 2) / total, rtol=1e-9)
    assert tally.votes("calibration").selections(8) == [[3, 1, 8], [5, 1]]
    assert tally.votes("calibration").tokens == 384


def test_held_out_sessions_are_a_full_vote_each(make: Any) -> None:
    hashes = [make.hash(n, "held_out") for n in range(2)]
    counts = np.array([[4, 0, 0, 1, 0], [0, 4, 0, 1, 0]])
    tally = tally_of(N_EXPERTS, merge_rows(Rows(hashes, hashes, np.zeros(2, int), np.array([1, 900]), counts, None)))
    first, second = tally.votes("held_out").mean_shares()
    assert first.tolist() == [0.5, 0.5, 0]
    assert second.tolist() == [1, 0]


def test_a_window_leaves_out_and_fades() -> None:
    window = Window(today=100, days=10, half_life_days=5.0)
    assert [window.factor(day) for day in (101, 100, 95, 91, 90, 0)] == [1.0, 1.0, 0.5, 0.5**1.8, 0.0, 0.0]
    assert Window().factor(-5) == 1.0


def test_votes_of_two_models_do_not_mix() -> None:
    with pytest.raises(ValueError, match="two models"):
        Votes.none((3, 2)) + Votes.none((2, 3))
    with pytest.raises(ValueError, match="two models"):
        Tally((3, 2)) - Tally((2, 3))
    with pytest.raises(ValueError, match="-1 sessions"):
        Votes.none((1,)) - Votes.of((1,), np.array([[1]]), np.array([1]))


def test_another_format_is_refused() -> None:
    data = Tally(N_EXPERTS).to_bytes()
    assert same(Tally.from_bytes(data), Tally(N_EXPERTS))
    for damaged in (data[:50], b"no archive at all", b""):
        with pytest.raises(ValueError, match=r"."):
            Tally.from_bytes(damaged)
