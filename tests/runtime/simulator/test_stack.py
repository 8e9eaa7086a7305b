from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.recency import RecencyOrder
from spark_runtime.simulator.lanes import Lanes
from spark_runtime.simulator.stack import reuse_distances


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[np.ndarray], int, np.ndarray | None]:
    """Traces ``ids[token, k]`` of some lanes, the number of experts, and what the caches start with."""
    n_experts = draw(st.integers(2, 12))
    top_k = draw(st.integers(1, min(4, n_experts)))
    rows = st.permutations(range(n_experts)).map(lambda order: order[:top_k])
    traces = [
        np.array(draw(st.lists(rows, max_size=25)), dtype=np.int64).reshape(-1, top_k)
        for _ in range(draw(st.integers(1, 4)))
    ]
    started = draw(st.booleans())
    orders = np.array([draw(st.permutations(range(n_experts))) for _ in traces])
    return traces, n_experts, orders if started else None


def lanes_of(traces: list[np.ndarray]) -> Lanes:
    first = np.concatenate([[0], np.cumsum([len(trace) for trace in traces])])[:-1]
    return Lanes(np.concatenate(traces)[:, None], first, [np.ones(len(trace), dtype=np.int64) for trace in traces])


@settings(deadline=None)
@given(cases())
def test_all_lanes_together_are_each_by_itself(case: tuple[list[np.ndarray], int, np.ndarray | None]) -> None:
    traces, n_experts, initial = case
    found = reuse_distances(lanes_of(traces), n_experts, initial)
    expected = [
        RecencyOrder(n_experts, None if initial is None else initial[lane]).observe(trace)
        for lane, trace in enumerate(traces)
    ]
    assert found.tolist() == np.concatenate(expected).tolist()


def one_by_one(ids: np.ndarray, slots: int, initial: list[int]) -> int:
    """An LRU cache as a list, most recent first, that thinks of one selection at a time."""
    cache, cold = initial[:slots], 0
    for expert in ids.ravel().tolist():
        cold += expert not in cache
        cache = [expert, *(other for other in cache if other != expert)][:slots]
    return cold


@settings(deadline=None)
@given(cases())
def test_selection_by_selection_it_is_the_plain_cache(case: tuple[list[np.ndarray], int, np.ndarray | None]) -> None:
    traces, n_experts, initial = case
    lanes = lanes_of(traces)
    found = reuse_distances(lanes, n_experts, initial, unit="selection")
    ends = np.cumsum(lanes.lengths)
    for lane, (trace, end) in enumerate(zip(traces, ends, strict=True)):
        own = found[end - len(trace) : end]
        start = [] if initial is None else initial[lane].tolist()
        for slots in range(trace.shape[1], n_experts + 1):
            assert int((own >= slots).sum()) == one_by_one(trace, slots, start)


@settings(deadline=None)
@given(cases())
def test_keeping_what_the_token_selects_never_costs_a_first_use(
    case: tuple[list[np.ndarray], int, np.ndarray | None],
) -> None:
    traces, n_experts, _ = case
    found = reuse_distances(lanes_of(traces), n_experts)
    first_uses = sum(len(np.unique(trace)) for trace in traces)
    assert int((found >= n_experts).sum()) == first_uses
