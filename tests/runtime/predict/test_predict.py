"""Predictions from earlier selections: against plain definitions, and what must hold for any trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.predict.predictors import NaiveBayes, Predictor, Ridge
from spark_runtime.predict.prefetch import replay_prefetch
from spark_runtime.predict.selections import indicators, last_selections, moving_averages, recall_at
from spark_runtime.simulator.policies import Cache, replay
from spark_runtime.simulator.traces import Trace

MAKERS = (NaiveBayes, Ridge, lambda layer: Ridge(layer, average_decay=0.9))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n_layers, n_experts = draw(st.integers(1, 4)), draw(st.integers(2, 9))
    top_k = draw(st.integers(1, min(3, n_experts)))
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = np.argsort(random.random((n_layers, sum(lengths), n_experts)), axis=2)[:, :, :top_k].astype(np.int32)
    return Trace(tuple(ids), (n_experts,) * n_layers, np.cumsum([0, *lengths]).astype(np.int64))


def followed(n_tokens: int = 400) -> Trace:
    """A second layer that always selects the neighbours of what the first selected."""
    random = np.random.default_rng(7)
    first = np.argsort(random.random((n_tokens, 8)), axis=1)[:, :2]
    return Trace((first, (first + 1) % 8), (8, 8), np.array([0, n_tokens // 2, n_tokens]))


@settings(deadline=None)
@given(traces(), st.floats(0, 1), st.floats(0, 5))
def test_a_moving_average_is_what_it_says(trace: Trace, decay: float, prior_tokens: float) -> None:
    prior = np.full(trace.n_experts[0], 1 / trace.n_experts[0])
    found = moving_averages(trace, 0, decay, prior, prior_tokens)
    last = last_selections(trace, 0)
    for start, end in zip(trace.offsets, trace.offsets[1:], strict=False):
        score = np.zeros(trace.n_experts[0])
        selected = np.zeros(trace.n_experts[0])
        for token in range(start, end):
            share = prior * trace.ids[0].shape[1] * prior_tokens
            np.testing.assert_allclose(found[token], score + share, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(last[token], selected)
            selected = np.isin(np.arange(len(score)), trace.ids[0][token]).astype(float)
            score = score * decay + selected


@settings(deadline=None)
@given(traces(), st.integers(0, 2**32))
def test_recall_grows_to_all(trace: Trace, seed: int) -> None:
    n_experts = trace.n_experts[0]
    if not trace.n_tokens:
        with pytest.raises(ValueError, match="no tokens"):
            recall_at(np.empty((0, n_experts)), trace.ids[0], (1,))
        return
    scores = np.random.default_rng(seed).random((trace.n_tokens, n_experts))
    found = recall_at(scores, trace.ids[0], tuple(range(1, n_experts + 1)))
    assert list(found) == sorted(found)
    assert found[-1] == 1
    best = recall_at(indicators(trace.ids[0], n_experts), trace.ids[0], (trace.ids[0].shape[1],))
    assert best == (1.0,)


@pytest.mark.parametrize("make", MAKERS)
def test_what_always_follows_is_learned(make: type[Predictor]) -> None:
    trace = followed()
    predictor = make(1)
    predictor.learn(trace.select([0]))
    assert recall_at(predictor.scores(trace.select([1])), trace.ids[1][200:], (2,))[0] == 1


@settings(deadline=None, max_examples=40)
@given(traces(), st.sampled_from(MAKERS))
def test_learning_in_parts_is_learning_at_once(trace: Trace, make: type[Predictor]) -> None:
    layer = len(trace.ids) - 1
    whole, parts = make(layer), make(layer)
    whole.learn(trace.select([session for session in range(trace.n_sessions) if trace.lengths[session]]))
    for session in range(trace.n_sessions):
        parts.learn(trace.select([session]))
    if trace.n_tokens:
        np.testing.assert_allclose(whole.scores(trace), parts.scores(trace), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_is_said_before_anything_was_learned(make: type[Predictor]) -> None:
    with pytest.raises(ValueError, match="nothing was learned"):
        make(1).scores(followed())


@settings(deadline=None, max_examples=60)
@given(traces(), st.integers(0, 3), st.integers(0, 2**32), st.floats(0, 1, exclude_max=True))
def test_fetching_early(trace: Trace, n_early: int, seed: int, decay: float) -> None:
    """Nothing early is the slot policy itself, and perfect predictions leave no cold hit where all may be fetched."""
    n_experts, top_k = trace.n_experts[0], trace.ids[0].shape[1]
    random = np.random.default_rng(seed)
    profile = [np.full(n_experts, 1 / n_experts)] * len(trace.ids)
    slots = [int(random.integers(min(2 * top_k, n_experts), n_experts + 1)) for _ in trace.ids]
    none = replay_prefetch(trace, slots, profile, [None] * len(slots), n_early, decay=0.5, prior_tokens=1)
    assert none.fetched_early == 0
    found = replay(Cache("scored", decay=0.5, prior_tokens=1), trace, slots, [profile] * trace.n_sessions)
    assert none.cold_hits >= 0
    if all(count == n_experts for count in slots):
        assert none.cold_hits == int(found.cold.sum()) == 0
    exact = [indicators(ids, n_experts) for ids in trace.ids]
    foreseen = replay_prefetch(trace, slots, profile, exact, top_k, decay=decay)
    assert foreseen.cold_hits == 0


def test_nothing_fetched_early_misses_as_the_slot_policy() -> None:
    random = np.random.default_rng(3)
    scores = random.gumbel(size=(3, 1, 16)) + random.gumbel(size=(3, 300, 16))
    ids = tuple(np.argsort(-scores, axis=2)[:, :, :2].astype(np.int32))
    trace = Trace(ids, (16, 16, 16), np.array([0, 100, 300]))
    # No two scores are equal, whose order the two might see differently.
    profile = [random.dirichlet(np.ones(16)) for _ in range(3)]
    early = replay_prefetch(trace, [6, 7, 8], profile, [None] * 3, 2)
    assert early.cold_hits == int(replay(Cache("scored"), trace, [6, 7, 8], [profile] * 2).cold.sum())
    assert early.moved_per_selection == early.cold_hit_rate > 0


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda trace: moving_averages(trace, 0, 1.5), "decay"),
        (lambda trace: recall_at(np.zeros((2, 4)), np.zeros((2, 1), np.int64), (5,)), "the best 5"),
        (lambda trace: replay_prefetch(trace, [3, 8], [np.ones(8)] * 2, [None, None], 1), "3 slots"),
    ],
)
def test_what_makes_no_sense_is_refused(call: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(followed())  # type: ignore[operator]
