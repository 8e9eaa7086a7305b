"""A trial while the worker serves, on a real engine: the same answers and counts, whatever is tried meanwhile."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generated import events_of

from spark_agent.output import Output
from spark_agent.prefetch_trials import Conditions, KeptTrial, find_trial, trial_of
from spark_agent.prefetching import HOST_FETCHES, PrefetchPlan
from spark_agent.server.generation import Finished, Generation
from spark_agent.server.prefetch_control import PrefetchControl
from spark_agent.server.prefetch_trial import TrialRules
from spark_agent.server.running import Running
from spark_agent.server.sessions import LiveSessions
from spark_agent.server.worker import Worker
from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import TierError
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.native_tier import LayerGuesses
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier import Tier
from spark_runtime.tier_start import uniform_start

TODAY = dt.date(2026, 11, 30)
EARLY = EarlyFetch(experts=2, threshold=0.1)
SHARE = 0.4
SHORT = TrialRules(learning_tokens=4, settling_tokens=2, resumed_tokens=1, timed_tokens=4, looks=(8,), most_tokens=900)
PROMPTS = ("How are you today?", "Tell me of the sea.", "def mean(values):", "What is a list?")


def conditions(engine: str = "host") -> Conditions:
    return Conditions("mf1-0", "here", engine, SHARE, EARLY.experts, EARLY.threshold, "1")


def plan(begun: KeptTrial | None = None, engine: str = "host") -> PrefetchPlan:
    return PrefetchPlan("trial", "nothing was measured here", EARLY, conditions(engine), begun)


@dataclass
class Told:
    """What a step's watcher saw: how experts were fetched early, and of which time it is told."""

    early: list[bool] = field(default_factory=list)
    seconds: Callable[[bool], float] = lambda early: 1.0 if early else 1.2


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def engine() -> Iterator[Engine]:
    tier = uniform_start(read_model_shape(demo_model_path()), SHARE)
    options = EngineOptions(n_ctx=512, n_batch=32, n_threads=1, n_outputs_max=1, n_seq_max=4, tier=tier, early=EARLY)
    with Engine.load(demo_model_path(), options) as engine:
        yield engine


async def text_of(generation: Generation) -> str:
    parts = []
    async for event in events_of(generation):
        if isinstance(event, Finished):
            return "".join(parts)
        parts.append(event.text)
    raise AssertionError("no end")


def served(
    engine: Engine,
    control: PrefetchControl | None,
    told: Told,
    between: Callable[[Worker], None] = lambda _: None,
    *,
    leaving: bool = False,
) -> tuple[list[str], dict[str, Any]]:
    """Answers, the second half of them by turns, and what their sessions counted; others may leave in the middle."""
    kept: dict[str, Any] = {}
    faults: list[Exception] = []

    def keep(lineage: str, _workload: str | None, counts: SessionCounts) -> None:
        kept[lineage] = counts.to_histogram("ab" * 32, "chat")

    worker = Worker(engine, LiveSessions(engine.shape, keep, lambda: 0.0), faults.append)
    if control is not None:
        control.listen(worker)
        watched = worker._watcher

        def watch(running: Running, in_prompt: bool) -> bool:
            assert engine.tier is not None
            early = bool(engine.tier.early.experts)
            told.early.append(early)
            running.step_s = told.seconds(early)  # this machine's own times would decide something else every time
            return watched is not None and watched(running, in_prompt)

        if watched is not None:
            worker.watch(watch)

    async def ask() -> list[str]:
        found = []
        for index, prompt in enumerate(PROMPTS):
            sampling = Sampling(temperature=1.0, seed=index)
            generation = Generation(f"one{index}", engine.tokenize(prompt), sampling, 60, ())
            worker.submit(generation)
            found.append(await text_of(generation))
            between(worker)
            if leaving:
                worker.submit(gone := Generation("gone", engine.tokenize(PROMPTS[-1]), Sampling(), 400, ()))
                assert await gone.events.wait(60)
                gone.cancelled.set()
        generations = [
            Generation(f"two{index}", engine.tokenize(prompt), Sampling(temperature=1.0, seed=9 + index), 60, ())
            for index, prompt in enumerate(PROMPTS)
        ]
        for generation in generations:
            worker.submit(generation)
        return found + await asyncio.gather(*map(text_of, generations))

    worker.start()
    try:
        answers = asyncio.run(ask())
    finally:
        worker.stop()
    assert faults == []
    return answers, kept


@pytest.fixture(scope="module")
def expected() -> tuple[list[str], dict[str, Any]]:
    """The same with nothing fetched early."""
    tier = uniform_start(read_model_shape(demo_model_path()), SHARE)
    options = EngineOptions(n_ctx=512, n_batch=32, n_threads=1, n_outputs_max=1, n_seq_max=4, tier=tier)
    with Engine.load(demo_model_path(), options) as engine:
        return served(engine, None, Told())


@pytest.mark.parametrize(("without_s", "use"), [(1.2, "on"), (0.9, "off")])
def test_a_trial_changes_no_output_and_its_result_is_used_told_and_kept(
    engine: Engine,
    expected: tuple[list[str], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    without_s: float,
    use: str,
) -> None:
    told = Told(seconds=lambda early: 1.0 if early else without_s)
    control = PrefetchControl(engine, plan(), Output(), rules=SHORT, today=lambda: TODAY)
    assert (control.state.use, control.state.experts, control.state.pairs) == ("trial", EARLY.experts, 0)
    assert served(engine, control, told) == expected
    turns = sum(one != other for one, other in zip(told.early, told.early[1:], strict=False))
    assert turns >= SHORT.looks[0], "both ways were decoded by turns"
    state = control.state
    assert (state.use, state.experts, state.pairs) == (use, EARLY.experts if use == "on" else 0, SHORT.looks[0])
    assert state.gain == pytest.approx((without_s, without_s, without_s))
    assert engine.tier is not None
    assert engine.tier.early == (EARLY if use == "on" else NO_EARLY_FETCH)
    trial = find_trial(conditions(), TODAY)
    assert trial is not None
    assert (trial.state, trial.reason) == (use, state.reason)
    assert f"prefetch: {use}; tried with 40% of the experts in slots" in capsys.readouterr().err
    control.close()
    assert find_trial(conditions(), TODAY) == trial


def test_the_worker_hears_no_more_once_it_is_over(engine: Engine) -> None:
    told = Told()
    control = PrefetchControl(engine, plan(), Output(), rules=SHORT)
    served(engine, control, told)
    assert control.state.tokens is not None
    heard = len(told.early)
    assert control.state.tokens <= heard < 8 * 60, "prompts are heard of, and what came after the end is not"


def test_nothing_is_heard_where_nothing_is_tried(engine: Engine) -> None:
    told = Told()
    control = PrefetchControl(engine, PrefetchPlan("on", "--prefetch on", EARLY, conditions()), Output())
    served(engine, control, told)
    assert told.early == []
    assert control.state.as_json() == {
        "use": "on",
        "reason": "--prefetch on",
        "experts": EARLY.experts,
        "trial": None,
    }


def test_a_placement_in_the_middle_begins_the_pair_anew(
    engine: Engine, expected: tuple[list[str], dict[str, Any]]
) -> None:
    """Between two answers the experts are placed anew, from the computing thread as an order to place does."""
    told = Told()

    def place(worker: Worker) -> None:
        worker.call(lambda: engine.place(uniform_start(engine.shape, SHARE))).result(30)

    control = PrefetchControl(engine, plan(), Output(), rules=SHORT)
    answers, histograms = served(engine, control, told, between=place)
    assert answers == expected[0]
    assert histograms == expected[1]
    assert control.state.use == "on"
    assert control.state.gain == pytest.approx((1.2, 1.2, 1.2))
    assert control.state.tokens is not None
    quiet = PrefetchControl(engine, plan(), Output(), rules=SHORT)
    served(engine, quiet, Told())
    assert quiet.state.tokens is not None
    assert quiet.state.tokens < control.state.tokens, "what was decoded of a pair before was not compared"


def test_who_leaves_in_the_middle_disturbs_nothing(engine: Engine, expected: tuple[list[str], dict[str, Any]]) -> None:
    control = PrefetchControl(engine, plan(), Output(), rules=SHORT)
    answers, histograms = served(engine, control, Told(), leaving=True)
    assert answers == expected[0]
    assert histograms.pop("gone") is not None
    # Prompts are shorter where another conversation had computed their beginning.
    decoded = [{name: one.decode for name, one in of.items()} for of in (histograms, expected[1])]
    assert decoded[0] == decoded[1]
    assert (control.state.use, control.state.gain) == ("on", pytest.approx((1.2, 1.2, 1.2)))


def weights(found: dict[int, LayerGuesses]) -> list[list[list[int]]]:
    return [found[block].weights.tolist() for block in sorted(found)]


def test_what_was_learned_outlasts_the_blocks_without(engine: Engine) -> None:
    assert engine.tier is not None
    control = PrefetchControl(engine, plan(), Output(), rules=SHORT)
    engine.prompt(engine.tokenize(PROMPTS[0]))
    for token in range(40):
        engine.feed([token], "decode")
    learned = weights(engine.tier.guesses())
    assert np.any(learned[-1])
    control._turn(engine.tier, early=False)
    assert engine.tier.guesses() == {}
    for token in range(10):
        engine.feed([token], "decode")
    control._turn(engine.tier, early=True)
    assert engine.tier.early == EARLY
    assert weights(engine.tier.guesses()) == learned


def test_a_trial_that_is_cut_short_is_gone_on_with(engine: Engine) -> None:
    assert engine.tier is not None
    rules = TrialRules(learning_tokens=0, settling_tokens=1, timed_tokens=30, looks=(8,))
    told = Told()
    control = PrefetchControl(engine, plan(), Output(), rules=rules, today=lambda: TODAY)
    served(engine, control, told)
    pairs = control.state.pairs
    assert pairs is not None
    assert 0 < pairs < 8
    control.close()
    assert engine.tier.early == EARLY, "what was learned can be kept"
    begun = find_trial(conditions(), TODAY)
    assert begun is not None
    assert (begun.state, len(begun.gains)) == ("begun", pairs)
    again = PrefetchControl(engine, plan(begun), Output(), learned=True, rules=rules, today=lambda: TODAY)
    served(engine, again, told)
    served(engine, again, told)
    assert (again.state.use, again.state.pairs) == ("on", 8)
    assert again.state.tokens is not None
    assert again.state.tokens > begun.tokens
    found = find_trial(conditions(), TODAY)
    assert found is not None
    assert found.state == "on"


def test_where_another_engine_fetches_than_was_planned_with_nothing_is_tried(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told()
    control = PrefetchControl(engine, plan(engine="cuda"), Output(), rules=SHORT)
    served(engine, control, told)
    assert told.early == []
    assert (control.state.use, control.state.reason, control.state.experts) == ("off", HOST_FETCHES, 0)
    assert HOST_FETCHES in capsys.readouterr().err


def test_without_memory_for_it_the_trial_ends_and_answers_go_on(
    engine: Engine,
    expected: tuple[list[str], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a card refuses it whose memory another program took while nothing was fetched early."""
    real = Tier.set_early

    def refusing(self: Tier, early: EarlyFetch) -> None:
        if early.experts:
            raise TierError("no memory for guesses")
        real(self, early)

    monkeypatch.setattr(Tier, "set_early", refusing)
    control = PrefetchControl(engine, plan(), Output(), rules=SHORT)
    assert served(engine, control, Told()) == expected
    assert (control.state.use, control.state.experts) == ("off", 0)
    assert "no memory for guesses" in control.state.reason
    assert "not fetched early any more" in capsys.readouterr().err
    assert find_trial(conditions(), TODAY) is None


def test_a_result_that_cannot_be_kept_is_used_all_the_same(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    control = PrefetchControl(engine, plan(), Output(), rules=SHORT)
    served(engine, control, Told())
    assert (control.state.use, control.state.experts) == ("on", EARLY.experts)
    said = capsys.readouterr().err
    assert "the next start tries again" in said
    assert "cannot keep the trial" in said


def test_a_start_and_its_reason_are_those_of_the_plan() -> None:
    begun = trial_of(conditions(), "begun", (1.1,), 200, TODAY)
    choice = plan(begun).choice
    assert choice == ("prefetch", "2 experts a layer, on trial", "nothing was measured here")
