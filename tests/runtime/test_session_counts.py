"""Counts, distances and traces of one session against the selections themselves."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from spark_runtime.recency import RecencyOrder
from spark_runtime.session_counts import SessionCounts, TierMisses
from spark_runtime.tier_start import uniform_start
from spark_schemas.invariants import check_session
from spark_schemas.model import ModelShape

SESSION = "ab" * 32


def routed(shape: ModelShape, n_tokens: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        np.array([rng.permutation(layer.n_experts)[: layer.top_k] for _ in range(n_tokens)]) for layer in shape.layers
    ]


def test_however_calls_are_cut_the_histogram_is_the_same(toy_shape: ModelShape) -> None:
    prompt, answer = routed(toy_shape, 7, 1), routed(toy_shape, 9, 2)
    whole, single = SessionCounts(toy_shape, keep_trace=True), SessionCounts(toy_shape, keep_trace=True)
    whole.add("prefill", 7, prompt)
    whole.add("decode", 9, answer)
    for phase, selected in (("prefill", prompt), ("decode", answer)):
        for token in range(len(selected[0])):
            single.add(phase, 1, [layer[token : token + 1] for layer in selected])
    histogram = whole.to_histogram(SESSION, "chat")
    assert histogram is not None
    assert histogram == single.to_histogram(SESSION, "chat")
    check_session(histogram, toy_shape)
    assert (whole.tokens_total, histogram.tokens) == (16, 16)
    for layer, ids, kept, again in zip(toy_shape.layers, answer, whole.trace(), single.trace(), strict=True):
        np.testing.assert_array_equal(kept, ids)
        np.testing.assert_array_equal(again, ids)
        [reuse] = [part for part in histogram.reuse if part.block == layer.block]
        distances = RecencyOrder(layer.n_experts).observe(ids)
        assert list(reuse.distances) == np.bincount(distances.ravel(), minlength=layer.n_experts + 1).tolist()


def test_prefill_alone_has_no_distances(toy_shape: ModelShape) -> None:
    session = SessionCounts(toy_shape, keep_trace=True)
    session.add("prefill", 3, routed(toy_shape, 3, 1))
    histogram = session.to_histogram(SESSION, "chat")
    assert histogram is not None
    assert (histogram.decode, histogram.reuse) == (None, None)
    check_session(histogram, toy_shape)
    assert [ids.shape for ids in session.trace()] == [(0, 2), (0, 1)]


def test_nothing_counted_is_no_histogram(toy_shape: ModelShape) -> None:
    assert SessionCounts(toy_shape).to_histogram(SESSION, "chat") is None
    with pytest.raises(ValueError, match="keep_trace"):
        SessionCounts(toy_shape).trace()


def test_its_size_is_what_it_takes(large_shape: ModelShape) -> None:
    ids = routed(large_shape, 4, 1)
    tracemalloc.start()
    try:
        session = SessionCounts(large_shape)
        session.add("prefill", 4, ids)
        session.add("decode", 4, ids)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken == pytest.approx(SessionCounts.size_bytes(large_shape), rel=0.15)


@pytest.fixture
def large_shape(toy_shape: ModelShape) -> ModelShape:
    layer = toy_shape.layers[0].model_copy(update={"n_experts": 128, "top_k": 8})
    layers = tuple(layer.model_copy(update={"block": block}) for block in range(48))
    return toy_shape.model_copy(update={"layers": layers, "n_blocks": 48})


def test_a_long_session_holds_none_of_the_starts_it_saw(toy_shape: ModelShape) -> None:
    session = SessionCounts(toy_shape)
    starts = [uniform_start(toy_shape, 0.5) for _ in range(3)]
    for start in starts:
        session.note_misses(TierMisses(1, 1, start))
        session.note_misses(TierMisses(1, 0, start))
    assert session.misses is None
    assert not [kept for kept in gc.get_referrers(starts[2]) if isinstance(kept, TierMisses)]
