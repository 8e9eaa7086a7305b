"""Every token of a conversation is counted once, however it grew, forked and came again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_agent.recorded import STEP, Stretch, missing, stretches

KEY = bytes(32)
lengths = st.integers(min_value=1, max_value=5 * STEP)


def conversation(length: int, seed: int = 0) -> list[int]:
    return [seed + position * 7 % 1009 for position in range(length)]


@given(growth=st.lists(lengths, min_size=1, max_size=6))
def test_a_conversation_that_grows_is_counted_exactly_once(growth: list[int]) -> None:
    known: list[Stretch] = []
    length = 0
    for more in growth:
        before, length = length, length + more
        tokens = conversation(length)
        left = missing(KEY, tokens, known)
        assert left == [(before, length)]
        known += stretches(KEY, tokens, left)
        assert missing(KEY, tokens, known) == []
    for length_of_old in range(1, length, 97):
        assert sum(end - start for start, end in missing(KEY, conversation(length_of_old), known)) < STEP


@given(shared=lengths, one=lengths, other=lengths)
def test_a_fork_counts_its_own_end_and_less_than_a_step_before_it(shared: int, one: int, other: int) -> None:
    root = conversation(shared)
    first, second = root + conversation(one, 2000), root + conversation(other, 4000)
    known = stretches(KEY, first, [(0, len(first))])
    ((start, end),) = missing(KEY, second, known)
    assert end == len(second)
    assert shared - STEP < start <= shared


@given(cut=st.integers(min_value=1, max_value=3 * STEP), rest=lengths)
def test_what_was_forgotten_in_between_is_counted_again(cut: int, rest: int) -> None:
    tokens = conversation(cut + rest)
    (kept,) = stretches(KEY, tokens, [(cut, len(tokens))])
    assert missing(KEY, tokens, [kept]) == [(0, cut)]


@given(start=st.integers(0, 2000), end=st.integers(0, 4000), marks=st.binary(max_size=100), length=lengths)
def test_damaged_marks_cover_nothing(start: int, end: int, marks: bytes, length: int) -> None:
    tokens = conversation(length)
    left = missing(KEY, tokens, [Stretch(start, end, marks)])
    assert sum(stop - begin for begin, stop in left) == length


def test_another_key_knows_nothing() -> None:
    tokens = conversation(600)
    known = stretches(KEY, tokens, [(0, 600)])
    assert missing(bytes([1]) * 32, tokens, known) == [(0, 600)]
    assert missing(bytes(100), tokens, stretches(bytes(100), tokens, [(0, 600)])) == []
    assert missing(KEY, [], known) == []
