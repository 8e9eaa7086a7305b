"""A tier under a router that is broken: refused with what it asked for, and as good as new afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from expert_graph import ExpertGraph, expert_graph

from spark_runtime.errors import TierError
from spark_runtime.tier_start import LayerStart

N_EXPERTS = 16
BAD_IDS = (-1, N_EXPERTS, 2**31 - 1, -(2**31))


def place(graph: ExpertGraph, slots: int) -> None:
    order, prior = np.arange(N_EXPERTS), np.zeros(N_EXPERTS)
    graph.tier.place([LayerStart(block, graph.shape[1], slots, order, prior) for block in graph.tier.blocks], 0.97)


def random_ids(graph: ExpertGraph, rng: np.random.Generator) -> list[np.ndarray]:
    tokens, top_k = graph.shape
    return [np.array([rng.permutation(N_EXPERTS)[:top_k] for _ in range(tokens)]) for _ in graph.ids]


def check(graph: ExpertGraph, rng: np.random.Generator) -> None:
    ids = random_ids(graph, rng)
    assert graph.compute(ids) == 0, graph.tier.take_fault()
    for found, expected in zip(graph.results(), graph.expected(ids), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 8, 20], ids=["through-the-slots", "several-tokens", "around-the-slots"])
def test_products_are_right(tokens: int) -> None:
    rng = np.random.default_rng(1)
    with expert_graph(tokens=tokens) as graph:
        place(graph, 6)
        for _ in range(20):
            check(graph, rng)


@pytest.mark.parametrize("tokens", [1, 20], ids=["through-the-slots", "around-the-slots"])
@pytest.mark.parametrize("bad", BAD_IDS)
def test_ids_out_of_range_fail_the_step_with_a_reason(bad: int, tokens: int) -> None:
    rng = np.random.default_rng(2)
    with expert_graph(tokens=tokens) as graph:
        place(graph, 6)
        check(graph, rng)
        ids = random_ids(graph, rng)
        ids[1][-1, 0] = bad
        assert graph.compute(ids) != 0
        assert graph.tier.take_fault() == f"block 1 selected expert {bad}, expected 0 to {N_EXPERTS - 1}"
        assert graph.tier.take_fault() == ""
        for _ in range(20):
            check(graph, rng)


def test_many_failed_steps_leave_no_slot_taken() -> None:
    """Each failed step had selected experts of the first block, which nothing may hold on to."""
    rng = np.random.default_rng(3)
    with expert_graph() as graph:
        place(graph, 4)
        for _ in range(20):
            ids = random_ids(graph, rng)
            ids[1][0, 0] = N_EXPERTS
            assert graph.compute(ids) != 0
            assert graph.tier.take_fault() == f"block 1 selected expert {N_EXPERTS}, expected 0 to {N_EXPERTS - 1}"
        for _ in range(20):
            check(graph, rng)


def test_failed_steps_are_not_observed() -> None:
    rng = np.random.default_rng(4)
    with expert_graph() as graph:
        place(graph, 6)
        graph.tier.set_phase(1)
        check(graph, rng)
        ids = random_ids(graph, rng)
        ids[1][0, 0] = -1
        assert graph.compute(ids) != 0
        graph.tier.read()
        assert [graph.tier.counts(block, 1).tokens for block in graph.tier.blocks] == [1, 1]
        assert [int(graph.tier.counts(block, 1).selections.sum()) for block in graph.tier.blocks] == [2, 2]


def test_without_a_plan_half_of_the_experts_are_resident() -> None:
    rng = np.random.default_rng(5)
    with expert_graph() as graph:
        for _ in range(10):
            check(graph, rng)


def test_refused_placements_change_nothing() -> None:
    rng = np.random.default_rng(6)
    order, prior = np.arange(N_EXPERTS), np.zeros(N_EXPERTS)
    layers = [LayerStart(block, 2, 6, order, prior) for block in (0, 1)]
    with expert_graph() as graph:
        place(graph, 6)
        check(graph, rng)
        for start, reason in (
            ([], "no layer to place"),
            ([*layers, LayerStart(7, 2, 6, order, prior)], "block 7 has no experts on this device"),
            ([layers[0], layers[0]], "block 0 is placed twice"),
            ([layers[0], LayerStart(1, 0, 6, order, prior)], "block 1: top_k 0"),
            ([layers[0], LayerStart(1, 2, 3, order, prior)], r"3 slots, expected at least 2 \* top_k = 4"),
        ):
            graph.tier.read()
            before = [graph.tier.slots(block).tolist() for block in graph.tier.blocks]
            with pytest.raises(TierError, match=reason):
                graph.tier.place(start, 0.97)
            assert [graph.tier.slots(block).tolist() for block in graph.tier.blocks] == before
            check(graph, rng)


def test_a_block_without_a_place_cannot_compute() -> None:
    """Blocks that only predict further tokens are loaded, but no start names them."""
    rng = np.random.default_rng(7)
    order, prior = np.arange(N_EXPERTS), np.zeros(N_EXPERTS)
    with expert_graph() as graph:
        graph.tier.place([LayerStart(0, 2, 6, order, prior)], 0.97)
        assert graph.compute([rng.integers(0, N_EXPERTS, graph.shape) for _ in graph.ids])
        assert graph.tier.take_fault() == "block 1 computes with experts that have no place"
        graph.tier.place([LayerStart(block, 2, 6, order, prior) for block in graph.tier.blocks], 0.97)
        check(graph, rng)


def test_the_phase_outlives_placements() -> None:
    """Also the first, and one that takes new memory, which comes with a new engine."""
    rng = np.random.default_rng(8)
    with expert_graph() as graph:
        graph.tier.set_phase(1)
        for tokens, slots in ((1, 4), (2, 6)):
            place(graph, slots)
            check(graph, rng)
            graph.tier.read()
            assert [graph.tier.counts(block, 1).tokens for block in graph.tier.blocks] == [tokens] * 2
            assert [graph.tier.counts(block, 0).tokens for block in graph.tier.blocks] == [0, 0]
