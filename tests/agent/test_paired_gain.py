"""Gains of pairs: an interval that holds what it should as often as it says, whatever a few pairs were disturbed by."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_agent.paired_gain import gain_interval

GAINS = st.lists(st.floats(0.01, 100), min_size=8, max_size=24)


def test_fewer_pairs_than_could_be_so_sure_say_nothing() -> None:
    assert gain_interval([]) is None
    assert gain_interval([1.5] * 7) is None
    assert gain_interval([1.5] * 5, 0.9) == pytest.approx((1.5, 1.5, 1.5))


@pytest.mark.parametrize(("n", "confidence"), [(8, 0.99), (9, 0.95), (11, 0.99), (12, 0.5)])
def test_as_many_means_are_left_out_as_the_signs_of_all_ranks_allow(n: int, confidence: float) -> None:
    gains = [math.exp(1.1**number) for number in range(n)]
    sums = [
        sum(rank for rank, chosen in enumerate(signs, 1) if chosen) for signs in itertools.product((0, 1), repeat=n)
    ]
    most = max(k for k in range(len(sums)) if sum(total <= k - 1 for total in sums) <= (1 - confidence) / 2 * 2**n)
    means = sorted(math.sqrt(gains[i] * gains[j]) for i in range(n) for j in range(i + 1))
    found = gain_interval(gains, confidence)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((means[most - 1], means[-most]))


@settings(deadline=None)
@given(GAINS, st.floats(0.1, 10))
def test_it_follows_what_is_done_to_all_pairs(gains: list[float], factor: float) -> None:
    found = gain_interval(gains)
    assert found is not None
    assert found.low <= found.estimate <= found.high
    assert min(gains) * (1 - 1e-9) <= found.low
    assert found.high <= max(gains) * (1 + 1e-9)
    scaled = gain_interval([gain * factor for gain in gains])
    assert scaled == pytest.approx([value * factor for value in found])
    swapped = gain_interval([1 / gain for gain in gains])
    assert swapped == pytest.approx((1 / found.estimate, 1 / found.high, 1 / found.low))


@settings(deadline=None)
@given(st.lists(st.floats(1.0, 1.1), min_size=16, max_size=16), st.floats(0.001, 1000), st.integers(0, 15))
def test_one_pair_alone_moves_little(gains: list[float], wild: float, place: int) -> None:
    found = gain_interval([*gains[:place], wild, *gains[place + 1 :]])
    assert found is not None
    assert 1.0 <= found.estimate <= 1.1


def test_what_is_true_is_within_it_as_often_as_it_says() -> None:
    chance = random.Random(5)
    held = 0
    for _ in range(1000):
        found = gain_interval([math.exp(chance.gauss(0.1, 0.3)) for _ in range(12)], 0.95)
        assert found is not None
        held += found.low <= math.exp(0.1) <= found.high
    assert held >= 930
