"""Starts: from a share, from frequencies, from a manifest; each is one that the slots take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_runtime.slot_pool import SlotPool
from spark_runtime.tier_start import keeping, manifest_start, profile_start, slots_start, uniform_start
from spark_schemas.model import ModelShape

LARGER = {"n_experts": 32, "top_k": 4}


@pytest.fixture
def shape(toy_shape: ModelShape) -> ModelShape:
    """32 experts, top-4, in block 1; 5, top-1, in block 2."""
    first, second = toy_shape.layers
    return toy_shape.model_copy(update={"layers": (first.model_copy(update=LARGER), second)})


@given(data=st.data())
def test_keeping_what_is_resident_keeps_the_share_that_is_pinned(data: st.DataObject) -> None:
    shape = cast(ModelShape, SimpleNamespace(layers=[SimpleNamespace(block=1, **LARGER)]))
    slots = data.draw(st.integers(8, 32))
    freq = np.random.default_rng(data.draw(st.integers(0, 9))).dirichlet(np.ones(32))
    start = profile_start(shape, [freq], [slots], pinned_share=data.draw(st.floats(0.0, 1.0)))
    here = np.array(sorted(data.draw(st.sets(st.integers(0, 31), min_size=slots, max_size=slots))))
    (kept,) = keeping(start, [here]).layers
    assert kept.pinned == start.layers[0].pinned
    assert sorted(kept.order[: kept.slots].tolist()) == here.tolist(), "nothing is copied"
    ranks = kept.prior[kept.order[: kept.slots]]
    assert (np.diff(ranks) <= 0).all(), "the hottest of them are pinned"
    SlotPool(keeping(start, [here]))


def test_slots_that_moved_away_leave_fewer_to_pin(shape: ModelShape) -> None:
    start = profile_start(shape, [np.full(32, 1 / 32), np.full(5, 1 / 5)], [20, 5], pinned_share=0.5)
    assert [layer.pinned for layer in start.layers] == [10, 0]
    assert [layer.pinned for layer in keeping(start, [np.arange(12), np.arange(5)]).layers] == [4, 0]


@pytest.mark.parametrize("residency", [0.0, 0.31, 0.6, 1.0])
def test_a_share_is_kept_above_the_floors(shape: ModelShape, residency: float) -> None:
    start = uniform_start(shape, residency)
    for layer, mine in zip(start.layers, shape.layers, strict=True):
        assert (layer.block, layer.top_k, layer.pinned) == (mine.block, mine.top_k, 0)
        assert min(2 * mine.top_k, mine.n_experts) <= layer.slots <= mine.n_experts
        assert layer.order.tolist() == list(range(mine.n_experts))
        assert not layer.prior.any()
    assert start.slots == sum(layer.slots for layer in start.layers)
    assert (start.slots == 37) == (residency == 1.0)
    SlotPool(start)


@given(st.floats(0, 1), st.floats(0, 1), st.data())
def test_any_profile_is_a_start_that_is_taken(residency: float, pinned: float, data: st.DataObject) -> None:
    layers = [SimpleNamespace(block=block, n_experts=n, top_k=k) for block, n, k in ((1, 32, 4), (4, 6, 3), (5, 5, 1))]
    frequency = [
        np.array(data.draw(st.lists(st.floats(0, 1, width=32), min_size=layer.n_experts, max_size=layer.n_experts)))
        for layer in layers
    ]
    slots = [max(min(2 * layer.top_k, layer.n_experts), int(residency * layer.n_experts)) for layer in layers]
    shape = cast("ModelShape", SimpleNamespace(layers=layers))
    start = profile_start(shape, frequency, slots, pinned_share=pinned)
    pool = SlotPool(start)
    for index, layer in enumerate(start.layers):
        assert pool.capacity(index) >= min(layer.top_k, len(layer.order))
        # Nothing colder is resident than what is not.
        resident = layer.order[: layer.slots]
        rest = np.setdiff1d(np.arange(len(layer.order)), resident)
        assert rest.size == 0 or frequency[index][resident].min() >= frequency[index][rest].max()


def test_a_prior_is_what_so_many_tokens_would_have_selected(shape: ModelShape) -> None:
    frequency = [np.full(32, 1 / 32), np.array([0.5, 0.2, 0.1, 0.1, 0.1])]
    start = profile_start(shape, frequency, [8, 2], prior_tokens=3.0)
    assert start.layers[0].prior.sum() == pytest.approx(4 * 3.0)
    assert start.layers[1].prior.tolist() == pytest.approx([1.5, 0.6, 0.3, 0.3, 0.3])


def test_pins_leave_room_for_two_tokens(shape: ModelShape) -> None:
    frequency = [np.full(32, 1 / 32), np.full(5, 0.2)]
    pins = [
        [layer.pinned for layer in profile_start(shape, frequency, slots, pinned_share=share).layers]
        for slots, share in (((20, 4), 0.5), ((20, 4), 1.0), ((8, 2), 1.0), ((32, 5), 1.0))
    ]
    assert pins == [[10, 2], [12, 2], [0, 0], [0, 0]]


def manifest(**changes: Any) -> Any:
    layer = SimpleNamespace(block=1, n_experts=6, top_k=1, slots=3, prior=(1, 4, 0, 4, 2, 1))
    return SimpleNamespace(layers=(SimpleNamespace(**vars(layer) | changes),))


def test_a_manifest_says_who_starts() -> None:
    [layer] = manifest_start(manifest(), prior_tokens=2.0).layers
    assert layer.order[:3].tolist() == [1, 3, 4]
    assert sorted(layer.order.tolist()) == list(range(6))
    assert layer.prior.tolist() == pytest.approx([2 / 12 * value for value in (1, 4, 0, 4, 2, 1)])
    [layer] = manifest_start(manifest(), pinned_share=1.0).layers
    assert layer.pinned == 1


def test_a_manifest_without_counts_has_no_prior() -> None:
    [layer] = manifest_start(manifest(prior=(0,) * 6)).layers
    assert not layer.prior.any()
    assert layer.order.tolist() == list(range(6))


def test_too_few_slots_are_left_for_the_tier_to_refuse(shape: ModelShape) -> None:
    from spark_runtime.errors import TierError

    start = slots_start(shape, [7, 2])
    with pytest.raises(TierError, match=r"7 slots, expected at least 2 \* top_k = 8"):
        SlotPool(start)
    with pytest.raises(ValueError, match="zip"):
        slots_start(shape, [8])
    assert replace(start, decay=0.5).decay == 0.5
