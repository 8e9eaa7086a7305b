from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from spark_agent.sizes import format_size, parse_size
from spark_schemas.ids import Policy, Verdict
from spark_schemas.profile import LivePolicy
from spark_service.dashboard import words


@given(st.integers(1, 2**53))
def test_sizes_are_printed_as_the_commands_print_them(n_bytes: int) -> None:
    assert words.size(n_bytes) == format_size(n_bytes)


@given(st.one_of(st.integers(1, 2**53), st.builds(lambda n, p: n * 2**p, st.integers(1, 4096), st.integers(0, 40))))
def test_a_size_given_to_a_command_is_exactly_that_size(n_bytes: int) -> None:
    text = words.size_argument(n_bytes)
    assert parse_size(text, "--vram") == n_bytes
    assert " " not in text


def test_sizes_that_people_choose_are_short() -> None:
    found = [words.size_argument(n) for n in (14 * 2**30, 29 * 2**29, 2**40, 3 * 2**20, 2**30 + 1)]
    assert found == ["14G", "14.5G", "1T", "3M", "1073741825"]


def test_every_verdict_and_policy_has_words() -> None:
    assert set(words.VERDICTS) == {*get_args(Verdict), None}
    assert set(words.CURVES) == {*get_args(Policy), *get_args(LivePolicy)}


def test_numbers() -> None:
    assert words.counted(1, "session") == "1 session"
    assert words.counted(12345, "session") == "12,345 sessions"
    assert words.points(-0.0213) == "-2.1 points"
    assert words.interval(0.031, 0.0444) == "3.1% to 4.4%"
    assert words.tok_s(9.96, 9.98) == "10.0"
    assert words.tok_s(66.2, 111.4) == "66 to 111"
    assert words.day(20422) == "2025-11-30"
