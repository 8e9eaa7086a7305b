"""The vectorised slot policy against the plain one and the native one, decision by decision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_model import PoolModel

from spark_runtime.simulator.lanes import Lanes
from spark_runtime.simulator.pools import PoolStarts, replay_pools
from spark_runtime.slot_pool import SlotPool
from spark_runtime.tier_start import LayerStart, TierStart

PRIORS = [0.0, 0.5, 1.0, 2.0, 3.7, 2.0**-149, 2.0**-148, 2.0**-127, 2.0**-126, 1.6e38, 3e38]
"""Among them doubles of each other, numbers too small for an exponent, and one too large to be doubled."""


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[TierStart], list[np.ndarray], list[np.ndarray]]:
    """Some lanes: their starts, ``ids[token, layer, k]`` and the sizes of their calls."""
    n_layers, n_experts = draw(st.integers(1, 3)), draw(st.integers(2, 10))
    top_k = draw(st.integers(1, min(3, n_experts)))
    floor = min(2 * top_k, n_experts)
    decay = draw(st.sampled_from([0.0, 0.5, 0.97, 1.0]) | st.floats(0, 1, width=32))
    starts, traces, calls = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        layers = []
        for block in range(n_layers):
            slots = draw(st.integers(floor, n_experts))
            pinned = draw(st.integers(0, n_experts if slots == n_experts else max(0, slots - floor)))
            prior = draw(st.lists(st.sampled_from(PRIORS), min_size=n_experts, max_size=n_experts))
            order = np.array(draw(st.permutations(range(n_experts))))
            layers.append(LayerStart(block, top_k, slots, order, np.array(prior), pinned))
        sizes = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 9]), max_size=12))
        random = np.random.default_rng(draw(st.integers(0, 2**32)))
        n_tokens = sum(sizes)
        ids = np.argsort(random.random((n_tokens, n_layers, n_experts)) * random.random(n_experts), axis=2)
        starts.append(TierStart(tuple(layers), decay))
        traces.append(ids[:, :, :top_k].astype(np.int64))
        calls.append(np.array(sizes, dtype=np.int64))
    return starts, traces, calls


def lanes_of(traces: list[np.ndarray], calls: list[np.ndarray]) -> Lanes:
    first_row = np.concatenate([[0], np.cumsum([len(trace) for trace in traces])])[:-1]
    return Lanes(np.concatenate(traces), first_row, calls)


def starts_of(starts: list[TierStart]) -> PoolStarts:
    return PoolStarts(
        order=np.array([[layer.order for layer in start.layers] for start in starts]),
        prior=np.array([[layer.prior for layer in start.layers] for start in starts]),
        slots=np.array([[layer.slots for layer in start.layers] for start in starts]),
        pinned=np.array([[layer.pinned for layer in start.layers] for start in starts]),
    )


def counted(machine: Any, start: TierStart, layer: int) -> tuple[int, int]:
    if isinstance(machine, PoolModel):
        counts = machine.layers[layer].counts["decode"]
        return counts["cold"], counts["loads"]
    found = machine.counts(layer, "decode")
    return found.cold, found.loads


@settings(deadline=None, max_examples=300)
@given(pools())
def test_it_decides_as_the_runtime(case: tuple[list[TierStart], list[np.ndarray], list[np.ndarray]]) -> None:
    """Cold hits and copies of every call, layer by layer."""
    starts, traces, calls = case
    found = replay_pools(lanes_of(traces, calls), starts_of(starts), starts[0].decay)
    row = 0
    for start, ids, sizes in zip(starts, traces, calls, strict=True):
        native, model = SlotPool(start), PoolModel(start)
        token = 0
        for size in sizes.tolist():
            step = [ids[token : token + size, layer] for layer in range(len(start.layers))]
            before = [counted(native, start, layer) for layer in range(len(step))]
            native.step(step, "decode")
            after = [counted(native, start, layer) for layer in range(len(step))]
            for layer, selected in enumerate(step):
                if native.goes_through(layer, selected.shape[1], size):
                    model.ensure(layer, selected.tolist(), "decode")
                else:
                    model.pass_by(layer, selected.tolist(), "decode")
            for layer, selected in enumerate(step):
                model.observe(layer, selected.tolist(), "decode")
            model.end_step()
            made = [tuple(np.subtract(new, old)) for new, old in zip(after, before, strict=True)]
            cold, loads = found.cold[row : row + size].sum(axis=0), found.loads[row : row + size].sum(axis=0)
            assert list(zip(cold.tolist(), loads.tolist(), strict=True)) == made
            row, token = row + size, token + size
        for layer in range(len(start.layers)):
            assert counted(native, start, layer) == counted(model, start, layer)


@pytest.mark.parametrize("decay", [0.97, 0.999, 1.0])
def test_long_sessions_decide_as_the_runtime(decay: float) -> None:
    """Beyond the first table of weights, with the shape of a real model."""
    random = np.random.default_rng(3)
    n_tokens, n_layers, n_experts, top_k = 700, 3, 64, 6
    taste = random.gumbel(size=(n_layers, n_experts))
    drift = np.cumsum(random.normal(scale=0.2, size=(n_tokens, n_layers, n_experts)), axis=0)
    noise = random.gumbel(size=(n_tokens, n_layers, n_experts))
    ids = np.argsort(-(taste + drift + noise), axis=2)[:, :, :top_k]
    frequency = np.exp(taste) / np.exp(taste).sum(axis=1, keepdims=True)
    start = TierStart(
        tuple(
            LayerStart(block, top_k, 20, np.argsort(-freq, kind="stable"), freq * (2 * top_k))
            for block, freq in enumerate(frequency)
        ),
        decay,
    )
    native = SlotPool(start)
    for token in ids:
        native.step(list(token[:, None]), "decode")
    found = replay_pools(lanes_of([ids], [np.ones(n_tokens, dtype=np.int64)]), starts_of([start]), decay)
    assert found.cold.sum(axis=0).tolist() == [native.counts(layer, "decode").cold for layer in range(n_layers)]
    assert found.cold.sum() > 0


def test_bad_starts_are_refused() -> None:
    lanes = lanes_of([np.array([[[0, 1]]])], [np.array([1])])
    good: dict[str, Any] = {
        "order": np.arange(4).reshape(1, 1, 4),
        "prior": np.zeros((1, 1, 4)),
        "slots": np.array([[3]]),
        "pinned": np.array([[0]]),
    }
    replay_pools(lanes, PoolStarts(**good), 0.5)
    for changes, reason in (
        ({"slots": np.array([[1]])}, "1 slots"),
        ({"slots": np.array([[5]])}, "5 slots"),
        ({"pinned": np.array([[2]])}, "leave fewer than top_k = 2"),
        ({"pinned": np.array([[-1]])}, "pinned"),
        ({"prior": np.full((1, 1, 4), np.nan)}, "priors"),
        ({"prior": np.full((1, 1, 4), -1.0)}, "priors"),
        ({"order": np.zeros((1, 1, 4), dtype=np.int64)}, "every expert once"),
    ):
        with pytest.raises(ValueError, match=reason):
            replay_pools(lanes, PoolStarts(**good | changes), 0.5)
    with pytest.raises(ValueError, match="decay 2"):
        replay_pools(lanes, PoolStarts(**good), 2)


@settings(deadline=None, max_examples=60)
@given(pools(), st.integers(0, 3), st.booleans())
def test_sparing_layers_to_come_moves_slots_only(
    case: tuple[list[TierStart], list[np.ndarray], list[np.ndarray]], doublings: int, foreseen: bool
) -> None:
    """With everything in slots nothing is missed; a single layer has none to come, so nothing changes for it."""
    starts, traces, calls = case
    lanes, pool = lanes_of(traces, calls), starts_of(starts)
    usual = replay_pools(lanes, pool, starts[0].decay, 0)
    spared = replay_pools(lanes, pool, starts[0].decay, doublings, foreseen=foreseen)
    assert (spared.cold <= lanes.ids.shape[2]).all()
    if pool.order.shape[1] == 1 or (doublings == 0 and not foreseen):
        assert (spared.cold == usual.cold).all()
        assert (spared.loads == usual.loads).all()
    if (pool.slots == pool.order.shape[2]).all():
        assert not spared.cold.any()


def test_a_layer_to_come_keeps_what_it_is_about_to_select() -> None:
    """The first layer misses; the lowest score is the second's, whose router selects just that a moment later."""
    ids = np.array([[[0], [1]], [[1], [0]], [[2], [1]]])
    lanes = Lanes(ids, np.array([0]), [np.ones(3, dtype=np.int64)])
    prior = np.array([[[1.0, 1.2, 0.0, 0.0], [1.0, 0.9, 1.1, 0.0]]])
    start = PoolStarts(np.tile(np.arange(4), (1, 2, 1)), prior, np.array([[2, 3]]), np.zeros((1, 2), dtype=np.int64))
    usual, spared, foreseen = (
        replay_pools(lanes, start, 0.0, doublings, foreseen=known).cold.sum()
        for doublings, known in ((0, False), (1, False), (0, True))
    )
    assert usual == 2
    assert spared == foreseen == 1


@settings(deadline=None, max_examples=60)
@given(pools(), st.integers(0, 3))
def test_lru_is_the_same_in_layers_to_come(
    case: tuple[list[TierStart], list[np.ndarray], list[np.ndarray]], doublings: int
) -> None:
    """Twice nothing is nothing: without memory and priors the longest unused leaves, in whatever layer."""
    starts, traces, calls = case
    lanes, pool = lanes_of(traces, calls), starts_of(starts)
    unknown = PoolStarts(pool.order, np.zeros_like(pool.prior), pool.slots, pool.pinned)
    usual, doubled = (replay_pools(lanes, unknown, 0.0, times) for times in (0, doublings))
    assert (usual.cold == doubled.cold).all()
    assert (usual.loads == doubled.loads).all()


@pytest.mark.parametrize("doublings", [-1, 65])
def test_doublings_out_of_range_are_refused(doublings: int) -> None:
    lanes = Lanes(np.zeros((0, 1, 1), dtype=np.int64), np.array([0]), [np.empty(0, dtype=np.int64)])
    start = PoolStarts(
        np.zeros((1, 1, 1), np.int64), np.zeros((1, 1, 1)), np.ones((1, 1), np.int64), np.zeros((1, 1), np.int64)
    )
    with pytest.raises(ValueError, match="doublings"):
        replay_pools(lanes, start, 0.5, doublings)
