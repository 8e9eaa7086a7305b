from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.simulator.lanes import Lanes
from spark_runtime.simulator.optimum import optimal_cold_hits
from spark_runtime.simulator.pools import PoolStarts, replay_pools


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """A small trace ``ids[token, layer, k]``, its experts, its slots over all layers."""
    n_layers, n_experts = draw(st.integers(1, 2)), draw(st.integers(2, 5))
    top_k = draw(st.integers(1, min(2, n_experts)))
    row = st.permutations(range(n_experts)).map(lambda order: order[:top_k])
    token = st.lists(row, min_size=n_layers, max_size=n_layers)
    ids = np.array(draw(st.lists(token, min_size=1, max_size=6)))
    return ids, n_experts, draw(st.integers(top_k, n_layers * n_experts))


def fewest_misses(ids: np.ndarray, n_experts: int, slots: int) -> int:
    """Try every choice of what stays, call by call."""
    states = {frozenset(range(slots)): 0}
    for token in ids:
        for layer, selected in enumerate(token.tolist()):
            wanted = frozenset(layer * n_experts + expert for expert in selected)
            after: dict[frozenset[int], int] = {}
            for state, cold in states.items():
                missing = len(wanted - state)
                for leaving in itertools.combinations(state - wanted, missing):
                    key = (state | wanted) - frozenset(leaving)
                    after[key] = min(after.get(key, 10**9), cold + missing)
            states = after
    return min(states.values())


def resident(slots: int, n_layers: int, n_experts: int) -> np.ndarray:
    return (np.arange(n_layers * n_experts) < slots).reshape(1, n_layers, n_experts)


@settings(deadline=None, max_examples=200)
@given(cases())
def test_no_choice_misses_less(case: tuple[np.ndarray, int, int]) -> None:
    ids, n_experts, slots = case
    lanes = Lanes(ids, np.array([0]), [np.ones(len(ids), dtype=np.int64)])
    found = optimal_cold_hits(lanes, resident(slots, ids.shape[1], n_experts), n_experts)
    assert int(found.sum()) == fewest_misses(ids, n_experts, slots)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.9, 1.0]), st.integers(1, 3))
def test_no_policy_misses_less(seed: int, decay: float, n_layers: int) -> None:
    """Over several lanes of different lengths."""
    random = np.random.default_rng(seed)
    n_experts, top_k, slots = 12, 2, 5
    lengths = random.integers(0, 30, size=4)
    ids = np.argsort(random.random((lengths.sum(), n_layers, n_experts)) * np.arange(1, 13), axis=2)[:, :, :top_k]
    first = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    lanes = Lanes(ids, first, [np.ones(length, dtype=np.int64) for length in lengths])
    order = np.tile(np.arange(n_experts), (4, n_layers, 1))
    starts = PoolStarts(order, np.zeros(order.shape), np.full((4, n_layers), slots), np.zeros((4, n_layers), int))
    policy = replay_pools(lanes, starts, decay).cold
    best = optimal_cold_hits(lanes, order < slots, n_experts)
    ends = np.cumsum(lengths)
    for start, end in zip(ends - lengths, ends, strict=True):
        assert best[start:end].sum() <= policy[start:end].sum()


def test_too_few_slots_are_refused() -> None:
    lanes = Lanes(np.array([[[0, 1]]]), np.array([0]), [np.array([1])])
    with pytest.raises(ValueError, match="1 slots, expected at least top_k = 2"):
        optimal_cold_hits(lanes, resident(1, 1, 4), 4)
