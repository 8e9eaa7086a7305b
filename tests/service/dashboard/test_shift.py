from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_runtime.calibration.sessions import merge_parts
from spark_runtime.calibration.tally import Tally, Window, tally_of
from spark_runtime.placement import layer_sizes
from spark_service.dashboard.shift import between, shift_since

TODAY = 20_000


def tally(make: Any, *groups: tuple[int, int, int]) -> Tally:
    """Calibration sessions: (day, how many, taste)."""
    shape, parts, number = make.shape(), [], 0
    for day, count, taste in groups:
        for _ in range(count):
            session = make.session(shape, make.hash(number), seed=number, taste=taste)
            parts += [replace(part, day=day) for part in make.parts(shape, [session])]
            number += 1
    found = merge_parts(parts)
    assert found is not None
    return tally_of([layer.n_experts for layer in shape.layers], found)


def told(make: Any, found: Tally, window: Window | None = None, min_sessions: int = 3) -> Any:
    sizes = layer_sizes(make.shape())
    return shift_since(sizes, found, window or Window(), TODAY - 6, min_sessions=min_sessions)


def test_other_traffic_moves_a_profile(make: Any) -> None:
    same = told(make, tally(make, (TODAY - 20, 5, 0), (TODAY, 5, 0))).moved
    other = told(make, tally(make, (TODAY - 20, 5, 0), (TODAY, 5, 7))).moved
    assert same is not None
    assert other is not None
    assert 0 < same.frequency_shift < 0.1 < other.frequency_shift < 1
    assert other.entering > same.entering
    assert other.entering_share > same.entering_share


def test_numbers_are_of_the_sessions_before_and_since(make: Any) -> None:
    shift = told(make, tally(make, (TODAY - 20, 3, 0), (TODAY - 7, 1, 0), (TODAY - 6, 2, 0), (TODAY, 2, 0)))
    assert (shift.n_before, shift.n_since, shift.since) == (4, 4, "2024-09-28")
    assert "4 new sessions, 4 before" in shift.sentence


def test_nothing_new_is_said_as_such(make: Any) -> None:
    shift = told(make, tally(make, (TODAY - 20, 5, 0)))
    assert shift.moved is None
    assert shift.sentence.startswith("Unchanged: ")


@pytest.mark.parametrize(
    ("before", "since", "words"), [(5, 2, "2 of 3 sessions needed came since"), (1, 5, "1 of 3 sessions needed came")]
)
def test_few_sessions_on_either_side_cannot_be_taken_apart(make: Any, before: int, since: int, words: str) -> None:
    shift = told(make, tally(make, (TODAY - 20, before, 0), (TODAY, since, 3)))
    assert shift.moved is None
    assert words in shift.sentence
    assert f"{3 - min(before, since)} more needed" in shift.sentence


def test_as_of_then_the_windows_bounds_held_then(make: Any) -> None:
    found = tally(make, (TODAY - 20, 4, 5), (TODAY - 12, 4, 0), (TODAY, 4, 0))
    shift = told(make, found, Window(TODAY, days=14))
    # What came twenty days ago counted a week ago, and does not now.
    assert (shift.n_before, shift.n_since) == (8, 4)


frequencies = st.integers(0, 2**32 - 1).map(
    lambda seed: [
        np.random.default_rng([seed, layer]).dirichlet(np.full(size, 0.4)) for layer, size in enumerate((12, 16, 8))
    ]
)


@given(before=frequencies, after=frequencies)
def test_a_difference_is_a_distance(make: Any, before: Any, after: Any) -> None:
    sizes = layer_sizes(make.shape())
    one, back = between(sizes, before, after), between(sizes, after, before)
    assert 0 <= one.frequency_shift <= 1
    assert one.frequency_shift == pytest.approx(back.frequency_shift)
    assert (one.entering, one.leaving) == (back.leaving, back.entering)
    assert between(sizes, before, before).frequency_shift == 0
    assert between(sizes, before, before).entering == 0
