from __future__ import annotations

from typing import Any

import pytest

from spark_schemas.profile import Profile
from spark_service.builders import Inputs, build_profile
from spark_service.nearest_workloads import MAX_HINTS, RESTS_PER_MEASUREMENT, GeneralHints, general_hint


class Clock:
    """Every measurement takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.measured = 0

    def __call__(self) -> float:
        return self.seconds

    def profiles(self) -> dict[str, Profile]:
        self.seconds += 1.0
        self.measured += 1
        return {}


def profiles(make: Any, held_out: int) -> dict[str, Profile]:
    shape = make.shape()
    parts = {
        name: make.parts(shape, make.sessions(shape, 3, n_held_out, workload=name, taste=taste))
        for name, n_held_out, taste in (("chat", held_out, 1), ("code", 0, 2))
    }
    found = {
        name: build_profile(shape, name, "decode", "0" * 64, Inputs.of_parts(shape, name, parts)) for name in parts
    }
    return {name: one.profile for name, one in found.items() if one is not None}


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


def test_nothing_known_is_no_hint() -> None:
    assert general_hint({}) == ""


@pytest.mark.parametrize(("held_out", "word"), [(2, "on 2 held-out sessions of 1 other workload, "), (0, "measures")])
def test_the_hint_says_what_it_rests_on(make: Any, held_out: int, word: str) -> None:
    hint = general_hint(profiles(make, held_out))
    assert word in hint
    assert ("until then use code" in hint) == bool(held_out), "the one that is measured on the other's"
