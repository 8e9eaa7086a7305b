"""A trial of fetching early: what belongs to which way, when it ends, and how often it is wrong."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_agent.server.prefetch_trial import PrefetchTrial, TrialRules

DISTURBED_S = 1000.0
"""Of a token that must not be timed."""
Outcomes = Callable[..., list[PrefetchTrial]]
SHORT = TrialRules(learning_tokens=5, settling_tokens=3, timed_tokens=8, looks=(8, 10), most_tokens=2000)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Decodes in the way that a trial asks for, between other things."""

    def __init__(self, rules: TrialRules | None = None, **options: object) -> None:
        self.clock = Clock()
        self.trial = PrefetchTrial(rules=rules, clock=self.clock, **options)  # type: ignore[arg-type]
        self.changes = 0

    def decode(self, seconds: float) -> None:
        early = self.trial.early
        self.clock.now += seconds
        self.trial.decoded(seconds)
        self.changes += self.trial.early != early

    def run(self, seconds_of: Callable[[bool], float]) -> None:
        while not self.trial.over:
            self.decode(seconds_of(self.trial.early))


@settings(deadline=None)
@given(st.lists(st.sampled_from(["prompt", "pause", "placed", "token"]), max_size=400), st.booleans())
def test_a_token_counts_for_the_way_it_was_decoded_in_or_not_at_all(events: list[str], learned: bool) -> None:
    """With it a token takes 1 s, without 2 s, and whatever comes right after something else far longer."""
    bench = Bench(SHORT, learned=learned)
    trial, rules = bench.trial, SHORT
    disturbed, before = rules.settling_tokens, trial.early
    while not trial.over:
        event = events.pop() if events else "token"
        if event == "prompt":
            trial.interrupted()
            disturbed = max(disturbed, rules.resumed_tokens)
        elif event == "pause":
            bench.clock.now += rules.pause_s * 1.5
            disturbed = max(disturbed, rules.resumed_tokens)
        elif event == "placed":
            trial.restart()
            disturbed = rules.settling_tokens
        else:
            bench.decode(DISTURBED_S if disturbed else 1.0 if before else 2.0)
            disturbed = max(0, disturbed - 1)
        if trial.early != before and not trial.over:
            before, disturbed = trial.early, rules.settling_tokens
        assert trial.tokens <= rules.most_tokens
    assert set(trial.gains) == {2.0}
    assert len(trial.gains) == rules.looks[0]
    assert trial.pays is True
    assert trial.early


def test_ways_come_first_by_turns_and_change_once_a_pair() -> None:
    bench = Bench(SHORT, learned=True)
    order: list[bool] = []
    while not bench.trial.over:
        if not order or order[-1] != bench.trial.early:
            order.append(bench.trial.early)
        bench.decode(1.0)
    # With, without and without, with and with, …: every way is decoded for two blocks on end.
    assert order == [index % 2 == 0 for index in range(len(order))]
    assert bench.changes == len(bench.trial.gains) + 1 - (len(bench.trial.gains) % 2)


def test_nothing_is_compared_before_something_was_learned() -> None:
    bench = Bench(SHORT)
    for _ in range(SHORT.learning_tokens + SHORT.settling_tokens + SHORT.timed_tokens - 1):
        assert bench.trial.early
        bench.decode(1.0)
    bench.decode(1.0)
    assert not bench.trial.early


@pytest.mark.parametrize(("without_s", "pays"), [(2.0, True), (1.0, False), (0.5, False), (1.01, False)])
def test_what_is_plain_is_known_at_the_first_look(without_s: float, pays: bool) -> None:
    bench = Bench()
    bench.run(lambda early: 1.0 if early else without_s)
    assert (bench.trial.pays, bench.trial.early) == (pays, pays)
    assert len(bench.trial.gains) == 8
    assert bench.trial.tokens < TrialRules().learning_tokens + 1000


def test_a_trial_goes_on_where_it_was_cut_short() -> None:
    whole = Bench(SHORT, learned=True)
    whole.run(lambda early: 1.0 if early else 1.5)
    for pairs in range(1, 8):
        bench = Bench(SHORT, learned=True, gains=whole.trial.gains[:pairs], tokens=100)
        assert bench.trial.tokens == 100
        bench.run(lambda early: 1.0 if early else 1.5)
        assert bench.trial.gains == whole.trial.gains
        assert bench.trial.pays


def test_what_is_always_interrupted_ends_undecided_and_off() -> None:
    bench = Bench(SHORT)
    while not bench.trial.over:
        bench.trial.interrupted()
        bench.decode(1.0)
    assert (bench.trial.gains, bench.trial.tokens) == ([], SHORT.most_tokens)
    assert bench.trial.pays is None
    assert not bench.trial.early


def test_a_clock_that_stands_still_ends_it_as_well() -> None:
    bench = Bench(SHORT)
    bench.run(lambda _: 0.0)
    assert bench.trial.gains == []


def test_after_its_end_nothing_changes() -> None:
    bench = Bench(SHORT)
    bench.run(lambda early: 1.0 if early else 2.0)
    before = (list(bench.trial.gains), bench.trial.tokens, bench.trial.early)
    bench.trial.restart()
    bench.trial.interrupted()
    for _ in range(100):
        bench.decode(3.0)
    assert (bench.trial.gains, bench.trial.tokens, bench.trial.early) == before


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Trials beside the traffic that the benchmark makes: conversations by turns, prompts, pauses, other programs."""
    folder = Path(__file__).resolve().parents[3] / "infra/benchmarks"
    sys.path.append(str(folder))  # what benchmarks share
    spec = importlib.util.spec_from_file_location("prefetch_trials_benchmark", folder / "prefetch_trials.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda effect, noise, count=60: list(module.trials(effect, noise, count))


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noise_alone_does_not_switch_it_on(outcomes: Outcomes, noise: float) -> None:
    # Of so many, an interval at 95% in place of 99% would let one in thirteen through at the larger noise.
    found = outcomes(0.0, noise, 400)
    assert sum(trial.early for trial in found) <= 0.03 * len(found)


@pytest.mark.parametrize("effect", [0.05, 0.14])
def test_what_is_gained_is_found(outcomes: Outcomes, effect: float) -> None:
    found = outcomes(effect, 0.2)
    assert sum(trial.early for trial in found) >= 0.95 * len(found)
    assert all(trial.tokens <= TrialRules().most_tokens for trial in found)
    estimates = [trial.interval.estimate for trial in found if trial.interval is not None]
    assert sorted(estimates)[len(estimates) // 2] == pytest.approx(1 + effect, abs=0.02)


def test_what_loses_is_off_soon(outcomes: Outcomes) -> None:
    found = outcomes(-0.1, 0.2)
    assert not any(trial.early for trial in found)
    assert sorted(trial.tokens for trial in found)[len(found) // 2] < TrialRules().learning_tokens + 1300
