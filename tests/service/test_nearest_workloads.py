from __future__ import annotations

from typing import Any

import pytest

from spark_service.builders import BuiltProfile, build_profile
from spark_service.nearest_workloads import MAX_HINTS, RESTS_PER_MEASUREMENT, GeneralHints, general_hint


class Clock:
    """Every measurement takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.measured = 0

    def __call__(self) -> float:
        return self.seconds

    def profiles(self) -> dict[str, BuiltProfile]:
        self.seconds += 1.0
        self.measured += 1
        return {}


def built(make: Any, workload: str, held_out: int, taste: int = 0) -> BuiltProfile:
    shape = make.shape()
    parts = make.parts(shape, make.sessions(shape, 3, held_out, workload=workload, taste=taste))
    found = build_profile(shape, workload, "decode", "0" * 64, {workload: parts})
    assert found is not None
    return found


def test_a_hint_is_measured_again_only_after_a_write(make: Any) -> None:
    clock = Clock()
    hints, shape = GeneralHints(clock), make.shape()
    for _ in range(3):
        clock.seconds += 1000
        hints.hint(shape, "decode", 7, clock.profiles)
    assert clock.measured == 1
    hints.hint(shape, "prefill", 7, clock.profiles)
    hints.hint(make.shape(fingerprint="mf1-" + "e" * 32), "decode", 7, clock.profiles)
    assert clock.measured == 3
    clock.seconds += 1000
    hints.hint(shape, "decode", 8, clock.profiles)
    assert clock.measured == 4


def test_wrong_names_and_writes_together_cost_a_twentieth(make: Any) -> None:
    clock = Clock()
    hints, shape = GeneralHints(clock), make.shape()
    for generation in range(10_000):
        clock.seconds += 0.1
        hints.hint(shape, "decode", generation, clock.profiles)
    assert 0 < clock.measured / clock.seconds <= 1 / RESTS_PER_MEASUREMENT
    assert clock.measured > 40


def test_hints_are_bounded(make: Any) -> None:
    clock = Clock()
    hints = GeneralHints(clock)
    for number in range(MAX_HINTS + 5):
        hints.hint(make.shape(fingerprint=f"mf1-{number:032x}"), "decode", 1, clock.profiles)
    assert len(hints._hints) == MAX_HINTS


def test_nothing_known_is_no_hint(make: Any) -> None:
    assert general_hint(make.shape(), {}) == ""


@pytest.mark.parametrize(("held_out", "word"), [(2, "on 2 held-out sessions of 1 other workload, "), (0, "measures")])
def test_the_hint_says_what_it_rests_on(make: Any, held_out: int, word: str) -> None:
    known = {"chat": built(make, "chat", held_out, taste=1), "code": built(make, "code", 0, taste=2)}
    hint = general_hint(make.shape(), known)
    assert word in hint
    assert ("until then use code" in hint) == bool(held_out), "the one that is measured on the other's"
