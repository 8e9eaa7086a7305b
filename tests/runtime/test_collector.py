"""What is committed, and what is refused, without a model."""

from __future__ import annotations

import numpy as np
import pytest

from spark_runtime.collector import Collector
from spark_runtime.errors import RoutingReadError
from spark_runtime.session_counts import SessionCounts
from spark_schemas.model import ModelShape


@pytest.fixture
def collector(toy_shape: ModelShape) -> Collector:
    made = Collector(toy_shape)
    made.session = SessionCounts(toy_shape)
    return made


def ids(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def observe_call(collector: Collector, first: np.ndarray, last: np.ndarray) -> None:
    collector.begin()
    collector.observe(1, first)
    collector.observe(2, last)


def test_a_call_is_counted_when_it_is_committed(collector: Collector) -> None:
    observe_call(collector, ids((0, 1), (1, 2)), ids((3,), (3,)))
    assert collector.session.tokens_total == 0
    collector.commit("decode", 2)
    assert collector.session.tokens == {"prefill": 0, "decode": 2}
    assert [layer.tolist() for layer in collector.session.counts["decode"]] == [[1, 2, 1, 0], [0, 0, 0, 2, 0]]


def test_a_failed_call_leaves_nothing(collector: Collector) -> None:
    observe_call(collector, ids((0, 1)), ids((3,)))
    observe_call(collector, ids((2, 3)), ids((4,)))
    collector.commit("decode", 1)
    assert [layer.tolist() for layer in collector.session.counts["decode"]] == [[0, 0, 1, 1], [0, 0, 0, 0, 1]]


def test_parts_of_a_call_add_up(collector: Collector) -> None:
    observe_call(collector, ids((0, 1)), ids((3,), (3,)))
    collector.observe(1, ids((2, 3)))
    collector.commit("decode", 2)
    assert collector.session.counts["decode"][0].tolist() == [1, 1, 1, 1]


def test_without_a_session_selections_are_dropped(collector: Collector, toy_shape: ModelShape) -> None:
    collector.session = None
    observe_call(collector, ids((0, 1)), ids((3,)))
    collector.commit("decode", 1)
    collector.session = SessionCounts(toy_shape)
    collector.begin()
    with pytest.raises(RoutingReadError, match="routed 0 tokens, expected 1"):
        collector.commit("decode", 1)


def test_only_the_last_block_may_route_fewer_and_only_in_prefill(collector: Collector) -> None:
    observe_call(collector, ids((0, 1), (0, 1)), ids((3,)))
    collector.commit("prefill", 2)
    assert collector.session.to_histogram("ab" * 32, "chat").prefill.layers[1].tokens == 1
    observe_call(collector, ids((0, 1), (0, 1)), ids((3,)))
    with pytest.raises(RoutingReadError, match="block 2 routed 1 tokens, expected 2"):
        collector.commit("decode", 2)
    observe_call(collector, ids((0, 1)), ids((3,), (3,)))
    with pytest.raises(RoutingReadError, match="block 1 routed 1 tokens, expected 2"):
        collector.commit("prefill", 2)
    observe_call(collector, ids((0, 1)), ids((3,), (3,)))
    with pytest.raises(RoutingReadError, match="block 2 routed 2 tokens, expected 1"):
        collector.commit("prefill", 1)
    assert collector.session.tokens_total == 2


@pytest.mark.parametrize(
    ("block", "selected", "message"),
    [
        (0, ids((0, 1)), r"block 0 selected experts, expected only \[1, 2\]"),
        (1, ids((0,)), r"expected \(tokens, 2\)"),
        (1, np.array([0, 1]), r"expected \(tokens, 2\)"),
        (1, ids((0, 4)), "selected experts 0 to 4, expected 0 to 3"),
        (2, ids((-1,)), "selected experts -1 to -1, expected 0 to 4"),
    ],
)
def test_what_no_router_selects_is_refused(
    collector: Collector, block: int, selected: np.ndarray, message: str
) -> None:
    with pytest.raises(RoutingReadError, match=message):
        collector.observe(block, selected)
