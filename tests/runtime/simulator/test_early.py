"""Fetching early in the vectorised slot policy against the native one, call by call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import related

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.errors import TierError
from spark_runtime.guess_replay import NativeGuesser
from spark_runtime.simulator.early import Guessed
from spark_runtime.simulator.guesses import Weights
from spark_runtime.simulator.policies import Cache, replay
from spark_runtime.simulator.pools import PoolStarts, Replayed, replay_pools
from spark_runtime.simulator.traces import Trace
from spark_runtime.slot_pool import SlotPool
from spark_runtime.tier_start import LayerStart, TierStart

INT16 = np.iinfo(np.int16)
COUNTS = ("cold", "loads", "early", "early_used", "early_wasted")
PRIORS = [0.0, 0.5, 1.0, 2.0, 3.7, 2.0**-149, 2.0**-126, 1.6e38, 3e38]


@dataclass
class Case:
    """Sessions of one class of layers, each with a pool of its own."""

    trace: Trace
    calls: list[np.ndarray]
    starts: list[TierStart]
    early: EarlyFetch
    weights: list[np.ndarray] | None

    @property
    def pools(self) -> PoolStarts:
        return PoolStarts(
            order=np.array([[layer.order for layer in start.layers] for start in self.starts]),
            prior=np.array([[layer.prior for layer in start.layers] for start in self.starts]),
            slots=np.array([[layer.slots for layer in start.layers] for start in self.starts]),
            pinned=np.array([[layer.pinned for layer in start.layers] for start in self.starts]),
        )

    def replayed(self) -> Replayed:
        [of] = self.trace.classes()
        guesses = NativeGuesser().guess(
            self.trace, of, self.calls, self.early.threshold_units, self.weights, learning=self.early.learning
        )
        lanes = self.trace.pooled(of, self.calls)
        guessed = Guessed(self.early.experts, guesses)
        return replay_pools(lanes, self.pools, self.starts[0].decay, guessed=guessed)

    def native(self, session: int) -> SlotPool:
        pool = SlotPool(self.starts[session])
        pool.set_early(self.early)
        for layer, weights in enumerate(self.weights or ()):
            pool.set_guesses(layer, weights)
        return pool


def wild(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """From nothing to the ends of what 16 bits hold."""
    values = random.integers(INT16.min, INT16.max + 1, shape) * random.choice([0.0, 0.01, 0.3, 1.0], shape)
    return values.astype(np.int16)


def weight_shapes(n_layers: int, n_experts: int) -> list[tuple[int, int]]:
    return [(min(layer, 2) * n_experts + (layer > 0), n_experts) for layer in range(n_layers)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_layers, n_experts = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    top_k = draw(st.integers(1, min(3, n_experts)))
    floor = min(2 * top_k, n_experts)
    decay = draw(st.sampled_from([0.0, 0.5, 0.97, 1.0]) | st.floats(0, 1, width=32))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    starts, calls = [], []
    for _ in range(draw(st.integers(1, 4))):
        layers = []
        for block in range(n_layers):
            slots = draw(st.integers(floor, n_experts))
            pinned = draw(st.integers(0, n_experts if slots == n_experts else max(0, slots - floor)))
            prior = random.choice(PRIORS[: draw(st.integers(1, len(PRIORS)))], n_experts)
            layers.append(LayerStart(block, top_k, slots, random.permutation(n_experts), prior, pinned))
        starts.append(TierStart(tuple(layers), decay))
        calls.append(np.array(draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 9]), max_size=14)), dtype=np.int64))
    lengths = [int(sizes.sum()) for sizes in calls]
    # Layers that say much of each other, or nothing.
    common = random.random((sum(lengths), 1, n_experts)) * draw(st.sampled_from([0.0, 1.0, 10.0]))
    scores = common + random.random((sum(lengths), n_layers, n_experts)) * random.random(n_experts)
    ids = np.argsort(-scores, axis=2)[:, :, :top_k].astype(np.int32)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    thresholds = st.sampled_from([float("inf"), float("-inf"), 0.0, 0.02, 0.3, 1.0]) | st.floats(-3, 3)
    early = EarlyFetch(draw(st.integers(1, 16)), draw(thresholds), learning=draw(st.booleans()))
    weights = None
    if draw(st.booleans()):
        weights = [wild(shape, random) for shape in weight_shapes(n_layers, n_experts)]
    trace = Trace(tuple(ids[:, layer] for layer in range(n_layers)), (n_experts,) * n_layers, offsets)
    return Case(trace, calls, starts, early, weights)


def counted(pool: SlotPool) -> np.ndarray:
    """``[layer, count]``"""
    counts = [pool.counts(layer, "decode") for layer in range(pool.n_layers)]
    return np.array([[getattr(count, name) for name in COUNTS] for count in counts])


@settings(deadline=None, max_examples=200)
@given(cases())
def test_it_fetches_early_as_the_runtime(case: Case) -> None:
    """Every count of every call and layer, from any weights, by any threshold."""
    found = case.replayed()
    assert found.early is not None
    columns = (found.cold, found.loads, found.early.fetched, found.early.used, found.early.wasted)
    row = 0
    for session, sizes in enumerate(case.calls):
        native = case.native(session)
        before = counted(native)
        for size in sizes.tolist():
            rows = slice(row, row + size)
            native.step([ids[rows].astype(np.int64) for ids in case.trace.ids], "decode")
            after = counted(native)
            np.testing.assert_array_equal(np.stack([column[rows].sum(axis=0) for column in columns], 1), after - before)
            before, row = after, row + size


@settings(deadline=None, max_examples=100)
@given(cases())
def test_it_guesses_and_learns_as_the_runtime(case: Case) -> None:
    """What all sessions teach one after the other, where the slots play no part."""
    [of] = case.trace.classes()
    learned = NativeGuesser().learn(case.trace, of, case.calls, case.weights)
    native = SlotPool(TierStart(tuple(LayerStart(0, of.top_k, of.n_experts, np.arange(of.n_experts),
                                                 np.zeros(of.n_experts)) for _ in of.layers)))  # fmt: skip
    native.set_early(EarlyFetch(1, float("inf")))
    for layer, weights in enumerate(case.weights or ()):
        native.set_guesses(layer, weights)
    row = 0
    for size in np.concatenate(case.calls).tolist():
        native.step([ids[row : row + size].astype(np.int64) for ids in case.trace.ids], "decode")
        row += size
    for layer, weights in enumerate(learned):
        np.testing.assert_array_equal(weights, native.guesses(layer))


@pytest.mark.parametrize(("experts", "threshold"), [(1, 0.3), (2, 0.1), (16, -1.0)])
def test_long_sessions_fetch_early_as_the_runtime(experts: int, threshold: float) -> None:
    """With the shape of a real model, from what other sessions taught, and saving what early copies are for."""
    trace = related(1200, 5, 64, 6, sessions=3)
    [of] = trace.classes()
    guesser, early = NativeGuesser(), EarlyFetch(experts, threshold)
    taught = guesser.learn(related(1500, 5, 64, 6, sessions=1, seed=2), of, [np.ones(1500, dtype=np.int64)], None)
    start = TierStart(tuple(LayerStart(layer, 6, 20, np.arange(64), np.zeros(64)) for layer in range(5)))
    case = Case(trace, trace.calls(), [start] * 3, early, list(taught))
    found = case.replayed()
    assert found.early is not None
    for session in range(3):
        native = case.native(session)
        rows = slice(int(trace.offsets[session]), int(trace.offsets[session + 1]))
        native.decode(np.stack([ids[rows] for ids in trace.ids], axis=1).astype(np.int64))
        columns = (found.cold, found.loads, found.early.fetched, found.early.used, found.early.wasted)
        np.testing.assert_array_equal(np.stack([column[rows].sum(axis=0) for column in columns], 1), counted(native))
    without = replay(Cache("scored", "pool"), trace, [20] * 5, [None] * 3)
    assert found.early.fetched.sum() > found.early.used.sum() > 0
    if threshold > 0:
        assert found.cold.sum() < without.cold.sum()


def test_classes_of_layers_guess_apart() -> None:
    """Layers of other experts in between are no source of a guess, and share no slots."""
    one, other = related(400, 3, 16, 2, sessions=2), related(400, 2, 24, 3, sessions=2, seed=1)
    ids = (one.ids[0], other.ids[0], one.ids[1], other.ids[1], one.ids[2])
    mixed = Trace(ids, (16, 24, 16, 24, 16), one.offsets)
    guesser, calls, cache = NativeGuesser(), one.calls(), Cache("scored", "pool", early=EarlyFetch(2, 0.1))

    def guessed(trace: Trace) -> Any:
        return lambda of: guesser.guess(trace, of, calls, EarlyFetch(2, 0.1).threshold_units, None, learning=True)

    found = replay(cache, mixed, [6, 8, 6, 8, 6], [None] * 2, calls, guessed(mixed))
    apart = [
        (replay(cache, one, [6] * 3, [None] * 2, calls, guessed(one)), [0, 2, 4]),
        (replay(cache, other, [8] * 2, [None] * 2, calls, guessed(other)), [1, 3]),
    ]
    assert found.early is not None
    assert found.early.used.sum() > 0
    for part, layers in apart:
        assert part.early is not None
        np.testing.assert_array_equal(found.cold[:, layers], part.cold)
        np.testing.assert_array_equal(found.early.fetched[:, layers], part.early.fetched)
        np.testing.assert_array_equal(found.early.used[:, layers], part.early.used)
        np.testing.assert_array_equal(found.early.wasted[:, layers], part.early.wasted)


def test_many_guesses_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the room for them is bounded, a session is guessed for in several calls of the library."""
    trace = related(300, 4, 16, 2, sessions=2)
    [of] = trace.classes()
    guesser, calls = NativeGuesser(), trace.calls()
    units = EarlyFetch(1, float("-inf")).threshold_units
    whole = guesser.guess(trace, of, calls, units, None, learning=True)
    monkeypatch.setattr("spark_runtime.guess_replay._FOUND_AT_ONCE", 1)
    pieces = guesser.guess(trace, of, calls, units, None, learning=True)
    np.testing.assert_array_equal(whole.counts, pieces.counts)
    np.testing.assert_array_equal(whole.experts, pieces.experts)
    assert whole.counts.sum() == 300 * 3 * 16


@pytest.mark.parametrize(
    "weights",
    [
        [np.zeros((0, 8), np.int16)],
        [np.zeros((0, 8), np.int16), np.zeros((8, 8), np.int16)],
        [np.zeros((0, 8), np.int16), np.zeros((9, 8), np.int32)],
    ],
)
def test_weights_of_other_layers_are_refused(weights: Weights) -> None:
    trace = related(10, 2, 8, 2, sessions=1)
    [of] = trace.classes()
    with pytest.raises(TierError, match=r"expected \[\(0, 8\), \(9, 8\)\] of int16"):
        NativeGuesser().guess(trace, of, trace.calls(), 0, weights, learning=True)


def test_layers_that_nothing_guesses_are_refused() -> None:
    ids = np.zeros((1, 1), np.int32)
    trace = Trace((ids, ids), (1025, 1025), np.array([0, 1]))
    [of] = trace.classes()
    with pytest.raises(TierError, match="1025 experts of a layer, expected at most 1024"):
        NativeGuesser().guess(trace, of, trace.calls(), 0, None, learning=True)


def test_what_makes_no_sense_is_refused() -> None:
    trace = related(10, 2, 8, 2, sessions=1)
    [of] = trace.classes()
    for cache in (Cache("lru", "pool", early=EarlyFetch()), Cache("scored", "layer", early=EarlyFetch())):
        with pytest.raises(ValueError, match="scored in one pool only"):
            replay(cache, trace, [4, 4], [None])
    with pytest.raises(ValueError, match="nothing is guessed"):
        replay(Cache("scored", "pool", early=EarlyFetch()), trace, [4, 4], [None])
    guesses = NativeGuesser().guess(trace, of, trace.calls(), 0, None, learning=True)
    with pytest.raises(ValueError, match="needs no guesses"):
        replay(
            Cache("scored", "pool", early=EarlyFetch(), foreseen=True), trace, [4, 4], [None], None, lambda _: guesses
        )
    shorter = related(9, 2, 8, 2, sessions=1)
    with pytest.raises(ValueError, match=r"guesses \(10, 2\), expected \(9, 2\)"):
        replay(Cache("scored", "pool", early=EarlyFetch()), shorter, [4, 4], [None], None, lambda _: guesses)


def test_nothing_early_is_the_policy_as_it_was() -> None:
    trace = related(200, 3, 16, 2, sessions=2)
    [of] = trace.classes()
    units = EarlyFetch(1, float("inf")).threshold_units
    guesses = NativeGuesser().guess(trace, of, trace.calls(), units, None, learning=True)
    found = replay(Cache("scored", "pool", early=EarlyFetch()), trace, [6] * 3, [None] * 2, None, lambda _: guesses)
    without = replay(Cache("scored", "pool", early=NO_EARLY_FETCH), trace, [6] * 3, [None] * 2)
    np.testing.assert_array_equal(found.cold, without.cold)
    assert without.early is None
    assert found.early is not None
    assert not found.early.fetched.any()
