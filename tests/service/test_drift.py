"""Traffic that moves is found, and traffic that does not is left alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spark_runtime.placement import bootstrap_interval
from spark_service.drift import (
    MIN_CALIBRATION,
    MIN_JUDGES,
    MIN_RECENT,
    Evidence,
    State,
    change_day,
    rebuilt,
    recent_sessions,
    reviewed,
)

SPREAD = 0.04
USUAL = 0.12
PER_DAY = 5


def rates(rng: np.random.Generator, mean: float, count: int) -> np.ndarray:
    """Cold-hit rates of sessions: between 0 and 1, standard deviation :data:`SPREAD`."""
    size = mean * (1 - mean) / SPREAD**2 - 1
    return rng.beta(mean * size, (1 - mean) * size, count)


class Traffic:
    """A promise from some held-out sessions, and later sessions day by day."""

    def __init__(self, seed: int, judges: int = 15) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows: list[tuple[int, float, float, float, float, int]] = []
        self.promise(USUAL, judges)

    def promise(self, mean: float, judges: int = 15) -> None:
        found = bootstrap_interval(rates(self.rng, mean, judges).tolist())
        self.promised = (found.mean, found.low, found.high, judges)

    def day(self, day: int, mean: float) -> Evidence:
        low, middle, high, judges = self.promised[1], self.promised[0], self.promised[2], self.promised[3]
        self.rows += [(day, rate, middle, low, high, judges) for rate in rates(self.rng, mean, PER_DAY)]
        return Evidence.of(self.rows)


def flagged_on(traffic: Traffic, means: list[float]) -> State | None:
    state = State()
    for day, mean in enumerate(means):
        state = reviewed(state, traffic.day(day, mean), newest_sequence=7)
        if state.state == "moved":
            return state
    return None


@pytest.mark.parametrize("judges", [MIN_JUDGES, 8, 15])
def test_steady_traffic_is_rarely_flagged_in_a_month(judges: int) -> None:
    """Of 60 workloads with a look a day for a month, at most one."""
    found = [flagged_on(Traffic(seed, judges), [USUAL] * 30) for seed in range(60)]
    assert sum(state is not None for state in found) <= 1


def test_traffic_that_moves_is_flagged_from_the_day_on_which_it_did() -> None:
    found = [flagged_on(Traffic(seed), [USUAL] * 12 + [2 * USUAL] * 12) for seed in range(30)]
    days = [state.since_day for state in found if state is not None]
    assert len(days) >= 29
    assert np.median(days) == 12
    assert sum(11 <= day <= 13 for day in days if day is not None) >= 25
    for state in found:
        if state is not None:
            assert (state.rebuilt, state.after_sequence, state.n_sessions >= MIN_RECENT) == (False, 7, True)
            assert state.measured is not None
            assert state.promised is not None
            assert state.measured.low > state.promised.high


def test_better_than_promised_is_no_drift() -> None:
    assert flagged_on(Traffic(0), [USUAL] * 5 + [USUAL / 2] * 15) is None


def test_too_little_to_be_worth_it_is_no_drift() -> None:
    """However certain it is."""
    rows = [(0, 0.109, 0.1, 0.0999, 0.1001, 1000)] * 40
    assert reviewed(State(), Evidence.of(rows), 0).state == "steady"
    rows = [(0, 0.112, 0.1, 0.0999, 0.1001, 1000)] * 40
    assert reviewed(State(), Evidence.of(rows), 0).state == "moved"


def test_few_sessions_change_nothing() -> None:
    rows = [(day, 0.9, 0.1, 0.09, 0.11, 20) for day in range(MIN_RECENT - 1)]
    for state in (State(), State(state="moved", since_day=3)):
        assert reviewed(state, Evidence.of(rows), 5) == state
        assert reviewed(state, Evidence.of([]), 5) == state
    assert reviewed(State(), Evidence.of([*rows, rows[-1]]), 5).state == "moved"


def test_it_ends_when_the_promise_is_kept_and_the_day_stays() -> None:
    """In between, neither state changes: it does not flap."""
    met, between, broken = (
        Evidence.of([(9, rate, 0.2, 0.18, 0.22, 200)] * 10 + [(9, rate + 0.04, 0.2, 0.18, 0.22, 200)] * 10)
        for rate in (0.18, 0.21, 0.4)
    )
    moved = State(state="moved", since_day=4, rebuilt=True, after_sequence=3)
    steady = reviewed(moved, met, 9)
    assert (steady.state, steady.since_day, steady.rebuilt, steady.after_sequence) == ("steady", 4, True, 3)
    for state in (moved, steady):
        looked = reviewed(state, between, 9)
        assert (looked.state, looked.since_day) == (state.state, 4)
    again = reviewed(steady, broken, 9)
    assert (again.state, again.since_day, again.rebuilt, again.after_sequence) == ("moved", 9, False, 9)
    assert reviewed(moved, broken, 9).since_day == 9, "a rebuilt profile that disappoints has seen another change"
    waiting = replace(moved, rebuilt=False)
    assert reviewed(waiting, broken, 9).since_day == 4, "the old profile's promise is broken still"


def test_a_whole_change_and_its_end() -> None:
    traffic = Traffic(3)
    state = State()
    for day in range(8):
        state = reviewed(state, traffic.day(day, USUAL if day < 4 else 0.35), newest_sequence=day)
    assert (state.state, state.since_day) == ("moved", 4)
    state = rebuilt(state, MIN_CALIBRATION, MIN_JUDGES, 8)
    assert state.rebuilt
    traffic.rows.clear()
    traffic.promise(0.15)
    for day in range(8, 14):
        state = reviewed(state, traffic.day(day, 0.15), newest_sequence=9)
    assert (state.state, state.since_day, state.rebuilt, state.after_sequence) == ("steady", 4, True, 8)


@pytest.mark.parametrize(
    ("sides", "min_sessions", "expected"),
    [
        ((MIN_CALIBRATION, MIN_JUDGES), 1, True),
        ((MIN_CALIBRATION - 1, MIN_JUDGES), 1, False),
        ((MIN_CALIBRATION, MIN_JUDGES - 1), 1, False),
        ((MIN_CALIBRATION, MIN_JUDGES), MIN_CALIBRATION + 1, False),
    ],
)
def test_a_profile_is_rebuilt_from_enough_on_both_sides(
    sides: tuple[int, int], min_sessions: int, expected: bool
) -> None:
    moved = State(state="moved", since_day=4)
    found = rebuilt(moved, *sides, 6, min_sessions)
    assert (found.rebuilt, found.after_sequence) == ((True, 6) if expected else (False, -1))
    for state in (State(), replace(moved, rebuilt=True)):
        assert rebuilt(state, 100, 100, 6) == state


def test_the_recent_ones_are_whole_days() -> None:
    assert recent_sessions(np.array([], dtype=np.int64)) == 0
    assert recent_sessions(np.arange(5)) == 5
    assert recent_sessions(np.arange(50)) == 20
    assert recent_sessions(np.repeat([1, 2, 3], [10, 15, 12])) == 27
    assert recent_sessions(np.repeat([1, 2], [10, 40])) == 40


@pytest.mark.parametrize("change", [0, 3, 9])
def test_the_day_of_change_without_noise(change: int) -> None:
    rows = [(day, 0.3 if day >= change else 0.1, 0.1, 0.09, 0.11, 20) for day in range(10) for _ in range(3)]
    assert change_day(Evidence.of(rows), 0.2) == change


def test_the_order_within_a_day_changes_nothing() -> None:
    traffic = Traffic(5)
    for day in range(6):
        traffic.day(day, 0.3)
    state = reviewed(State(), Evidence.of(traffic.rows), 1)
    assert state.state == "moved"
    assert change_day(Evidence.of(traffic.rows), 0.1) == change_day(Evidence.of(sorted(traffic.rows)), 0.1)
