"""Tuning: what it may look at, what it spares, and that it never ends worse than it began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import related, study_of, trace_of

from spark_runtime.early_fetch import EarlyFetch
from spark_runtime.guess_replay import NativeGuesser
from spark_runtime.simulator.policies import Cache
from spark_runtime.simulator.study import Judgement, Study, TraceTooSmallError, equal_slots
from spark_runtime.simulator.tuning import EARLY_WAYS, _halves, tune, tune_early


def test_tuning_looks_at_calibration_sessions_alone() -> None:
    study = study_of()
    slots = equal_slots(study.trace, 0.4)
    tuned = tune(study, Cache("scored"), slots, "own")
    assert tuned.cold_hit_rate <= tuned.default_cold_hit_rate
    assert tuned.tried > 10
    other = trace_of(7, [40] * 12, n_experts=16)
    for layer in other.ids:
        layer[9 * 40 :] = np.roll(layer[9 * 40 :], 1, axis=0)
    changed = Study(other, ["a", "b", "c"] * 4, [False] * 9 + [True] * 3)
    assert tune(changed, Cache("scored"), slots, "own") == tuned


@pytest.mark.parametrize("workloads", [["a", "a"], ["a", "b", "a"]])
def test_too_few_sessions_to_tune_on_are_said(workloads: list[str]) -> None:
    held_out = [False] * (len(workloads) - 1) + [True]
    study = Study(trace_of(1, [5] * len(workloads)), workloads, held_out)
    with pytest.raises(TraceTooSmallError, match=f"{len(workloads) - 1} sessions to tune on"):
        tune(study, Cache("scored"), [4, 4], "own")


@pytest.mark.parametrize("copy_cost", [0.0, 0.5, 10.0])
def test_the_way_of_fetching_early_is_the_best_of_all_that_are_tried(copy_cost: float) -> None:
    """On the calibration sessions, each half with what the other one taught."""
    sides = [False] * 9 + [True] * 3
    study = Study(related(1200, 3, 16, 2, sessions=12), ["a", "b", "c"] * 4, sides, guesser=NativeGuesser())
    slots, cache = equal_slots(study.trace, 0.4), Cache("scored", "pool")

    def tok_s(judged: Judgement) -> float:
        fetched = 0.0 if judged.early is None else judged.early.fetched
        return 1 / (1 + judged.cold_hits_per_token + copy_cost * fetched)

    found = tune_early(study, cache, slots, "own", tok_s)
    halves = _halves(study.calibrating, [study.workloads[session] for session in study.calibrating])
    speeds = {}
    for early in EARLY_WAYS:
        tried = replace(cache, early=early, early_from="calibrated")
        judged = [study.judge_among(tried, slots, "own", np.sort(one), other) for one, other in (halves, halves[::-1])]
        speeds[early] = np.mean([tok_s(each) for each in judged])
    assert found.tok_s == max(speeds.values()) == speeds[found.early]
    assert found.usual_tok_s == speeds[EarlyFetch()]
    assert (found.early.experts == 0) == (copy_cost == 10.0)
    assert found.tok_s > found.usual_tok_s


class Watched(Study):
    """Notes which sessions judged and which calibrated."""

    seen: list[tuple[Cache, list[int], list[int]]]

    def judge_among(
        self, cache: Cache, slots: Sequence[int], profile: Any, judging: Any, calibrating: Any, positions: Any = ()
    ) -> Any:
        self.seen.append((cache, judging.tolist(), calibrating.tolist()))
        return super().judge_among(cache, slots, profile, judging, calibrating, positions)


def watched(n_sessions: int, workloads: str) -> Watched:
    study = Watched(
        trace_of(3, [6] * n_sessions), [workloads[i % len(workloads)] for i in range(n_sessions)], [False] * n_sessions
    )
    study.held_out[-1] = True
    study.seen = []
    return study


def test_many_numbers_are_tried_on_a_sample_and_the_best_on_all() -> None:
    study = watched(161, "aaab")
    tuned = tune(study, Cache("scored"), [4, 4], "mixed")
    by_size: dict[int, set[tuple[float, float]]] = {}
    for cache, judging, calibrating in study.seen:
        assert not set(judging) & set(calibrating)
        assert len(calibrating) == 80
        shares = [study.workloads[session] for session in judging].count("b") / len(judging)
        assert shares == pytest.approx(0.25, abs=0.5 / len(judging))
        by_size.setdefault(len(judging), set()).add((cache.decay, cache.prior_tokens))
    assert sorted(by_size) == [10, 40, 80]
    assert len(by_size[10]) > len(by_size[40]) > len(by_size[80])
    assert (Cache("scored").decay, Cache("scored").prior_tokens) in by_size[80]
    assert (tuned.decay, tuned.prior_tokens) in by_size[80]
    assert tuned.tried == len(by_size[10])


def test_few_sessions_all_judge_every_number() -> None:
    study = watched(21, "a")
    tune(study, Cache("scored"), [4, 4], "mixed")
    assert {len(judging) for _, judging, _ in study.seen} == {10}


@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 2**32),
    n_sessions=st.integers(4, 40),
    profile=st.sampled_from(["none", "mixed", "own"]),
    usual=st.tuples(st.floats(0, 1), st.floats(0, 30)),
)
def test_it_never_ends_worse_than_it_began(
    seed: int, n_sessions: int, profile: Any, usual: tuple[float, float]
) -> None:
    study = Study(trace_of(seed, [8] * n_sessions), ["a", "b"] * (n_sessions // 2) + ["a"] * (n_sessions % 2),
                  [False] * (n_sessions - 1) + [True])  # fmt: skip
    tuned = tune(study, Cache("scored", decay=usual[0], prior_tokens=usual[1]), [4, 4], profile)
    assert tuned.cold_hit_rate <= tuned.default_cold_hit_rate
    if profile == "none":
        assert tuned.prior_tokens == usual[1]
    if tuned.cold_hit_rate == tuned.default_cold_hit_rate:
        assert (tuned.decay, tuned.prior_tokens) == usual
