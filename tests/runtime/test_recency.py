"""Reuse distances against a cache that is simulated slot by slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.recency import RecencyOrder
from spark_runtime.simulate import lru_cold_hits, scored_cold_hits


def slot_by_slot(ids: np.ndarray, slots: int, initial: list[int]) -> int:
    """An LRU cache as a list, most recent first, which never evicts what the current token uses."""
    cache = initial[:slots]
    cold = 0
    for row in ids.tolist():
        missing = [expert for expert in row if expert not in cache]
        cold += len(missing)
        cache = row + [expert for expert in cache if expert not in row]
        cache = cache[:slots]
    return cold


@st.composite
def traces(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    n_experts = draw(st.integers(2, 12))
    top_k = draw(st.integers(1, n_experts))
    rows = draw(st.lists(st.permutations(range(n_experts)).map(lambda p: p[:top_k]), max_size=40))
    return np.array(rows, dtype=np.int64).reshape(len(rows), top_k), n_experts


@settings(deadline=None)
@given(traces(), st.booleans(), st.randoms(use_true_random=False))
def test_one_pass_gives_every_cache_size(trace: tuple[np.ndarray, int], started: bool, random) -> None:
    ids, n_experts = trace
    order = list(range(n_experts))
    random.shuffle(order)
    sizes = list(range(ids.shape[1], n_experts + 1))
    hottest_first = np.array(order) if started else None
    assert lru_cold_hits(ids, n_experts, sizes, hottest_first) == [
        slot_by_slot(ids, size, order if started else []) for size in sizes
    ]


@settings(deadline=None)
@given(traces(), st.integers(0, 40))
def test_observing_in_pieces_changes_nothing(trace: tuple[np.ndarray, int], cut: int) -> None:
    ids, n_experts = trace
    whole = RecencyOrder(n_experts).observe(ids)
    order = RecencyOrder(n_experts)
    pieces = np.concatenate([order.observe(ids[:cut]), order.observe(ids[cut:])])
    assert (whole == pieces).all()


def test_first_uses_are_marked() -> None:
    distances = RecencyOrder(4).observe(np.array([[0, 1], [0, 1], [2, 0]]))
    assert distances.tolist() == [[4, 4], [0, 1], [4, 0]]


def test_a_cache_below_top_k_is_refused() -> None:
    with pytest.raises(ValueError, match="1 slots, expected at least top_k = 2"):
        lru_cold_hits(np.array([[0, 1]]), 4, [1, 2])


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=40), st.integers(1, 8))
def test_fast_decay_is_lru(experts: list[int], slots: int) -> None:
    ids = np.array(experts).reshape(-1, 1)
    # Both start with the first experts; without a score the lower id leaves first, as the later in LRU's order does.
    started = lru_cold_hits(ids, 8, [slots], np.array([*reversed(range(slots)), *range(slots, 8)]))
    assert [scored_cold_hits(ids, 8, slots, decay=1e-6)] == started


@settings(deadline=None)
@given(traces(), st.floats(0, 1), st.booleans(), st.integers(0, 20))
def test_scored_cache_misses_at_least_once_an_expert_and_never_with_all_resident(
    trace: tuple[np.ndarray, int], decay: float, profiled: bool, extra: int
) -> None:
    ids, n_experts = trace
    frequency = np.arange(n_experts, 0, -1) / (n_experts * (n_experts + 1) / 2) if profiled else None
    assert scored_cold_hits(ids, n_experts, n_experts, frequency, decay=decay) == 0
    slots = min(ids.shape[1] + extra, n_experts)
    cold = scored_cold_hits(ids, n_experts, slots, frequency, decay=decay)
    assert len(set(ids.ravel().tolist()) - set(range(slots))) <= cold <= ids.size


def test_the_current_tokens_experts_never_leave() -> None:
    # Two slots for two experts a token: every change of both is two cold hits, and none more.
    ids = np.array([[0, 1], [2, 3], [3, 2], [0, 3]])
    assert scored_cold_hits(ids, 4, 2) == 2 + 1


def test_scored_cache_below_top_k_is_refused() -> None:
    with pytest.raises(ValueError, match="1 slots, expected at least top_k = 2"):
        scored_cold_hits(np.array([[0, 1]]), 4, 1)
