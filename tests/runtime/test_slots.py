"""The slot policy: what holds after any sequence of calls, and the caches that it becomes at its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slot_model import PoolModel

from spark_runtime.errors import TierError
from spark_runtime.recency import RecencyOrder
from spark_runtime.simulate import lru_cold_hits, scored_cold_hits
from spark_runtime.slot_pool import Move, SlotPool
from spark_runtime.tier_start import LayerStart, TierStart
from spark_schemas.ids import Phase

PHASES: tuple[Phase, ...] = ("prefill", "decode")
EDGES = [
    float(bits.view(np.float32))
    for bits in np.array([1, 2, 2**23 - 1, 2**23, 2**24, 0x7F000000, 0x7F7FFFFF], np.uint32)
]
"""The smallest numbers of 32 bits, those around the first with an exponent, the largest doubles, the largest."""


def layer_start(n_experts: int = 8, **changes: Any) -> LayerStart:
    values: dict[str, Any] = {
        "block": 0,
        "top_k": 2,
        "slots": 4,
        "order": np.arange(n_experts),
        "prior": np.zeros(n_experts),
    }
    return LayerStart(**values | changes)


def pool_of(*layers: LayerStart, decay: float = 0.97) -> SlotPool:
    return SlotPool(TierStart(layers, decay))


@st.composite
def layer_starts(draw: st.DrawFn, block: int, n_experts: int | None = None) -> LayerStart:
    n_experts = draw(st.integers(2, 10)) if n_experts is None else n_experts
    top_k = draw(st.integers(1, min(3, n_experts)))
    slots = draw(st.integers(min(2 * top_k, n_experts), n_experts))
    # A layer of which everything is resident may be pinned as a whole; any other keeps room for a token.
    pinned = draw(st.integers(0, n_experts if slots == n_experts else max(0, slots - 2 * top_k)))
    worth = st.floats(0, 4, width=32) | st.sampled_from(EDGES)
    prior = draw(st.lists(worth, min_size=n_experts, max_size=n_experts))
    order = np.array(draw(st.permutations(range(n_experts))))
    return LayerStart(block, top_k, slots, order, np.array(prior), pinned)


@st.composite
def starts(draw: st.DrawFn) -> TierStart:
    n_layers = draw(st.integers(1, 3))
    decay = draw(st.sampled_from([0.0, 0.5, 0.97, 1.0]) | st.floats(0, 1, width=32))
    return TierStart(tuple(draw(layer_starts(block)) for block in range(n_layers)), decay)


def draw_ids(data: st.DataObject, layer: LayerStart) -> np.ndarray:
    tokens = data.draw(st.integers(1, 4))
    rows = [data.draw(st.permutations(range(len(layer.order))))[: layer.top_k] for _ in range(tokens)]
    return np.array(rows)


def slots_by_layer(pool: SlotPool) -> list[dict[int, int]]:
    found = []
    for layer in range(pool.n_layers):
        slots = pool.experts(layer).slots
        found.append({int(expert): int(slots[expert]) for expert in np.flatnonzero(slots >= 0)})
    return found


def check_invariants(pool: SlotPool, start: TierStart) -> None:
    found = slots_by_layer(pool)
    owned = sorted(slot for layer in found for slot in layer.values())
    assert owned == list(range(start.slots))
    for index, (layer, slots) in enumerate(zip(start.layers, found, strict=True)):
        assert len(slots) == pool.n_resident(index) >= pool.floor(index) == min(2 * layer.top_k, len(layer.order))
        assert {int(expert) for expert in layer.order[: layer.pinned]} <= set(slots)


@settings(deadline=None)
@given(starts(), st.data())
def test_the_native_policy_is_the_plain_one(start: TierStart, data: st.DataObject) -> None:
    """Decisions, scores and counts, bit for bit; and what must hold between any two calls."""
    pool, model = SlotPool(start), PoolModel(start)
    check_invariants(pool, start)
    for _ in range(data.draw(st.integers(0, 8))):
        phase = data.draw(st.sampled_from(PHASES))
        step = [draw_ids(data, layer) for layer in start.layers]
        for index, ids in enumerate(step):
            if not pool.goes_through(index, *reversed(ids.shape)):
                pool.pass_by(index, ids, phase)
                model.pass_by(index, ids.tolist(), phase)
                continue
            before = slots_by_layer(pool)
            slots, moves = pool.ensure(index, ids, phase)
            after = slots_by_layer(pool)
            assert [(move.expert, move.slot) for move in moves] == model.ensure(index, ids.tolist(), phase)
            # What the layer has now and did not have is what was moved, and into the slots that others had.
            assert {move.expert: move.slot for move in moves} == dict(after[index].items() - before[index].items())
            assert slots.tolist() == [[after[index][expert] for expert in token] for token in ids.tolist()]
            gone = {slot for old, new in zip(before, after, strict=True) for slot in old.keys() - new.keys()}
            assert len(gone) <= len(moves)
            check_invariants(pool, start)
        for index, ids in enumerate(step):
            pool.observe(index, ids, phase)
            model.observe(index, ids.tolist(), phase)
        pool.end_step()
        model.end_step()
    for index, layer in enumerate(model.layers):
        state = pool.experts(index)
        assert slots_by_layer(pool)[index] == layer.slot_of
        assert {e: s for e, s in enumerate(state.stamps.tolist()) if s} == layer.last
        assert {e: state.scores[e] for e in layer.score} == layer.score
        for phase in PHASES:
            counts = pool.counts(index, phase)
            assert counts.selections.tolist() == layer.selections[phase]
            assert {name: getattr(counts, name) for name in layer.counts[phase]} == layer.counts[phase]
        assert pool.counts(index, "decode").reuse.tolist() == layer.distances
        assert not pool.counts(index, "prefill").reuse.any()


@settings(deadline=None)
@given(starts(), st.data())
def test_capacity_is_a_promise(start: TierStart, data: st.DataObject) -> None:
    """So many different experts find slots, whatever the other layers hold and whatever this step selected before."""
    pool = SlotPool(start)
    for _ in range(data.draw(st.integers(1, 6))):
        index = data.draw(st.integers(0, len(start.layers) - 1))
        layer = start.layers[index]
        n_experts = len(layer.order)
        count = min(pool.capacity(index), n_experts)
        assert count >= min(layer.top_k, n_experts - layer.pinned)
        ids = np.array(data.draw(st.permutations(range(n_experts))))[:count].reshape(1, count)
        slots, _ = pool.ensure(index, ids, "decode")
        assert len(set(slots.ravel().tolist())) == count
        check_invariants(pool, start)
        pool.end_step()


def test_more_than_the_capacity_is_refused_with_numbers() -> None:
    pool = pool_of(layer_start())
    with pytest.raises(TierError, match="layer 0: 5 experts at once, expected at most 4"):
        pool.ensure(0, np.array([[0, 1, 2, 3, 4]]), "decode")


def test_layers_lend_each_other_slots_down_to_their_floors() -> None:
    busy, idle = layer_start(12, slots=4), layer_start(12, slots=12)
    pool = pool_of(busy, idle)
    for first in range(0, 12, 2):
        pool.step([np.array([[first, first + 1]]), np.array([[0, 1]])], "decode")
    assert (pool.n_resident(0), pool.n_resident(1)) == (12, 4)
    assert set(slots_by_layer(pool)[1]) >= {0, 1}


@pytest.mark.parametrize(
    ("misses", "prior", "leaves"),
    [
        (0, [1.1, 1.0, 0.5, 1.3], (0, 1)),
        (0, [1.1, 1.0, 0.49, 1.3], (1, 0)),
        (1, [0.49, 1.0, 0.5, 1.1], (0, 0)),
        (1, [0.51, 1.0, 0.5, 1.1], (1, 0)),
        (0, [1.1, 0.0, 0.0, 0.0], (0, 1)),
        (0, [1.1, 2.0**-149, 0.0, 1.3], (1, 0)),
        (0, [1.1, 2.0**-148, 2.0**-149, 1.3], (0, 1)),
        (0, [1.1, 2.0**-126, 1.5 * 2.0**-127, 1.3], (0, 1)),
        (0, [3e38, 2.9e38, 1.6e38, 3e38], (0, 1)),
        (0, [3e38, 2.9e38, 1.4e38, 3e38], (1, 0)),
    ],
)
def test_layers_to_come_count_double(misses: int, prior: list[float], leaves: tuple[int, int]) -> None:
    """Two layers with a slot to spare each; of equal scores, and of zeros, the lower entry leaves."""
    layers = [
        layer_start(4, top_k=1, slots=3, prior=np.array([*scores, 3.4e38, 0.0]), order=np.arange(4))
        for scores in (prior[:2], prior[2:])
    ]
    pool = pool_of(*layers)
    before = slots_by_layer(pool)
    _, [move] = pool.ensure(misses, np.array([[3]]), "decode")
    layer, expert = leaves
    assert move == Move(3, before[layer][expert])
    assert expert not in slots_by_layer(pool)[layer]


def test_pinned_experts_never_leave() -> None:
    pool = pool_of(layer_start(slots=6, order=np.array([7, 5, 0, 1, 2, 3, 4, 6]), pinned=2))
    assert pool.capacity(0) == 4
    rng = np.random.default_rng(0)
    for _ in range(50):
        pool.step([rng.permutation(7)[None, :2]], "decode")
        assert {7, 5} <= set(slots_by_layer(pool)[0])
    assert np.isinf(pool.experts(0).priors[[7, 5]]).all()


# ---- the caches it becomes


@st.composite
def single_layers(draw: st.DrawFn, tokens: int = 30) -> tuple[np.ndarray, int, int]:
    """A trace of one layer, its experts, its slots."""
    n_experts = draw(st.integers(2, 12))
    top_k = draw(st.integers(1, min(3, n_experts)))
    rows = [draw(st.permutations(range(n_experts)))[:top_k] for _ in range(draw(st.integers(1, tokens)))]
    return np.array(rows), n_experts, draw(st.integers(min(2 * top_k, n_experts), n_experts))


def replayed(pool: SlotPool, ids: np.ndarray) -> int:
    for token in ids:
        pool.step([token[None]], "decode")
    return pool.counts(0, "decode").cold


@settings(deadline=None)
@given(single_layers(), st.randoms(use_true_random=False))
def test_without_memory_it_is_lru(trace: tuple[np.ndarray, int, int], random: Any) -> None:
    """The experts it starts with were never used: of those the lowest leaves first, as if it had been used first."""
    ids, n_experts, slots = trace
    order = list(range(n_experts))
    random.shuffle(order)
    pool = pool_of(layer_start(n_experts, top_k=ids.shape[1], slots=slots, order=np.array(order)), decay=0.0)
    as_used = [*sorted(order[:slots], reverse=True), *order[slots:]]
    assert [replayed(pool, ids)] == lru_cold_hits(ids, n_experts, [slots], np.array(as_used))


@settings(deadline=None)
@given(single_layers(tokens=12), st.sampled_from([0.0, 0.5, 1.0]), st.data())
def test_with_a_prior_it_is_the_simulated_cache(
    trace: tuple[np.ndarray, int, int], decay: float, data: st.DataObject
) -> None:
    """Where a prior is the same number in 32 bits, which these multiples of 2**-17 are."""
    ids, n_experts, slots = trace
    coarse = data.draw(st.lists(st.integers(0, 15), min_size=n_experts, max_size=n_experts))
    prior = np.array(coarse) / 16 + np.arange(1, n_experts + 1) * 2.0**-17
    hottest = np.argsort(-prior, kind="stable")
    start = layer_start(n_experts, top_k=ids.shape[1], slots=slots, order=hottest, prior=prior)
    expected = scored_cold_hits(ids, n_experts, slots, prior, decay=decay, prior_tokens=1 / ids.shape[1])
    assert replayed(pool_of(start, decay=decay), ids) == expected


def test_among_equal_scores_the_longest_unused_leaves() -> None:
    """Experts 0 and 1 were selected in one token, 1 second: 1 is the longer unused."""
    pool = pool_of(layer_start(4, top_k=2, slots=4), layer_start(4, top_k=2, slots=4), decay=1.0)
    with pytest.raises(IndexError, match="layer 2, expected 0 to 1"):
        pool.capacity(2)
    pool = pool_of(layer_start(5, top_k=2, slots=4, order=np.array([0, 1, 2, 3, 4])), decay=1.0)
    for token in ([0, 1], [2, 3]):
        pool.step([np.array([token])], "decode")
    assert [move.expert for move in pool.step([np.array([[4, 2]])], "decode")[0]] == [4]
    assert set(slots_by_layer(pool)[0]) == {0, 2, 3, 4}


@settings(deadline=None)
@given(single_layers(), st.lists(st.sampled_from(PHASES), min_size=30, max_size=30))
def test_reuse_distances_are_those_of_the_recency_order(
    trace: tuple[np.ndarray, int, int], phases: list[Phase]
) -> None:
    """Of decode alone: prompts in between change nothing."""
    ids, n_experts, slots = trace
    pool = pool_of(layer_start(n_experts, top_k=ids.shape[1], slots=slots))
    for token, phase in zip(ids, phases, strict=False):
        pool.step([token[None]], phase)
    order = RecencyOrder(n_experts)
    decoded = np.array([phase == "decode" for phase in phases[: len(ids)]])
    distances = order.observe(ids[decoded])
    expected = np.bincount(distances.ravel(), minlength=n_experts + 1)
    assert pool.counts(0, "decode").reuse.tolist() == expected.tolist()
    # Stamps of one token may leave gaps, so their order is what counts.
    order_of = np.argsort(pool.experts(0).recency, kind="stable")
    assert order_of.tolist() == np.argsort(order.stamps, kind="stable").tolist()


@settings(deadline=None)
@given(single_layers(), st.integers(1, 9))
def test_scores_do_not_depend_on_how_tokens_are_batched(trace: tuple[np.ndarray, int, int], size: int) -> None:
    ids, n_experts, slots = trace
    start = layer_start(n_experts, top_k=ids.shape[1], slots=slots)
    single, batched = pool_of(start), pool_of(start)
    replayed(single, ids)
    for first in range(0, len(ids), size):
        batched.step([ids[first : first + size]], "decode")
    one, other = single.experts(0), batched.experts(0)
    assert (one.scores == other.scores).all()
    assert (one.stamps == other.stamps).all()
    assert (one.recency == other.recency).all()
    assert (single.counts(0, "decode").reuse == batched.counts(0, "decode").reuse).all()


def test_ages_beyond_the_table_are_nothing() -> None:
    """65,536 tokens is more than the two tables reach; with any forgetting at all such a selection is worth nothing."""
    pool = pool_of(layer_start(8, top_k=1, slots=2), decay=0.999)
    pool.step([np.array([[7]])], "decode")
    pool.step([np.zeros((70_000, 1), dtype=np.int64)], "prefill")
    pool.step([np.array([[7]])], "decode")
    assert pool.experts(0).scores[7] == 1.0


# ---- placing


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"slots": 3}, r"3 slots, expected at least 2 \* top_k = 4"),
        ({"slots": 9}, "9 slots, expected at most its 8 experts"),
        ({"slots": 0}, r"0 slots, expected at least 2 \* top_k = 4"),
        ({"slots": -1}, "-1 slots, 0 pinned, expected none below 0"),
        ({"top_k": 0}, "top_k 0, expected 1 to its 8 experts"),
        ({"top_k": 9}, "top_k 9, expected 1 to its 8 experts"),
        ({"top_k": -1}, "top_k -1, 4 slots"),
        ({"pinned": 5}, "5 pinned, expected at most its 4 slots"),
        ({"pinned": 3}, "3 pinned leave fewer than top_k = 2 slots for the rest"),
        ({"pinned": -1}, "-1 pinned, expected none below 0"),
        ({"order": np.array([0, 1, 2, 3, 4, 5, 6, 6])}, "expert 6 twice, expected every expert once"),
        ({"order": np.array([0, 1, 2, 3, 4, 5, 6, 8])}, "expert 8, expected 0 to 7"),
        ({"order": np.array([0, 1, 2, 3, 4, 5, 6, -1])}, "expert -1, expected 0 to 7"),
        ({"order": np.array([0, 1, 2, 3, 4, 5, 6, 2**32 + 7])}, "expert 2147483647, expected 0 to 7"),
        ({"order": np.arange(7)}, r"an order \(7,\) and priors \(8,\), expected one an expert"),
        ({"order": np.zeros((8, 1), dtype=int), "prior": np.zeros((8, 1))}, r"an order \(8, 1\)"),
        ({"prior": np.array([0, 0, 0, np.nan, 0, 0, 0, 0])}, "the prior of expert 3 is not a finite number from 0 on"),
        ({"prior": np.array([0, 0, 0, 0, np.inf, 0, 0, 0])}, "the prior of expert 4 is not a finite number from 0 on"),
        ({"prior": np.array([-1.0, 0, 0, 0, 0, 0, 0, 0])}, "the prior of expert 0 is not a finite number from 0 on"),
    ],
    ids=str,
)
def test_bad_starts_are_refused_and_change_nothing(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TierError, match=reason):
        pool_of(layer_start(**changes))
    pool = pool_of(layer_start(), layer_start())
    pool.step([np.array([[5, 1]]), np.array([[6, 7]])], "decode")
    before, counts = slots_by_layer(pool), pool.counts(1, "decode")
    with pytest.raises(TierError, match=reason):
        pool.place(TierStart((layer_start(), layer_start(**changes))))
    assert slots_by_layer(pool) == before
    assert pool.counts(1, "decode").selections.tolist() == counts.selections.tolist()
    pool.step([np.array([[2, 3]]), np.array([[4, 5]])], "decode")


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_decay_that_is_no_share_is_refused(decay: float) -> None:
    with pytest.raises(TierError, match=r"decay -?[0-9a-z.]+, expected 0 to 1"):
        pool_of(layer_start(), decay=decay)


def test_pins_of_all_layers_together_leave_room_for_each() -> None:
    # Each pins what it starts with, but for one slot; together there is none left for a token of two.
    with pytest.raises(TierError, match="leave fewer than top_k = 2"):
        pool_of(*[layer_start(slots=4, pinned=3)] * 2)
    pool = pool_of(*[layer_start(slots=4, pinned=2)] * 2)
    assert [pool.capacity(layer) for layer in range(2)] == [2, 2]


@pytest.mark.parametrize("expert", [-1, 8, 2**31, 2**40, -(2**40)])
def test_ids_that_are_no_experts_are_refused_and_change_nothing(expert: int) -> None:
    pool = pool_of(layer_start())
    before = slots_by_layer(pool)
    calls: list[Any] = [pool.ensure, pool.pass_by, pool.observe]
    for call in calls:
        with pytest.raises(TierError, match=r"layer 0: expert -?\d+, expected 0 to 7"):
            call(0, np.array([[5, expert]]), "decode")
    counts = pool.counts(0, "decode")
    assert (slots_by_layer(pool), counts.cold, counts.loads, counts.tokens) == (before, 0, 0, 0)


@settings(deadline=None)
@given(starts(), st.data())
def test_placed_again_what_stays_stays_where_it_is(start: TierStart, data: st.DataObject) -> None:
    pool = SlotPool(start)
    for _ in range(data.draw(st.integers(0, 3))):
        pool.step([draw_ids(data, layer) for layer in start.layers], "decode")
    again = TierStart(
        tuple(data.draw(layer_starts(layer.block, len(layer.order))) for layer in start.layers), start.decay
    )
    assume(again.slots == start.slots)
    before = slots_by_layer(pool)
    scores = [pool.experts(index).scores.tolist() for index in range(pool.n_layers)]
    counts = [pool.counts(index, "decode").selections.tolist() for index in range(pool.n_layers)]
    try:
        pool.place(again)
    except TierError:
        # Pins that leave too little; then nothing has changed.
        assert slots_by_layer(pool) == before
        return
    after = slots_by_layer(pool)
    for layer, old, new in zip(again.layers, before, after, strict=True):
        assert set(new) == set(layer.order[: layer.slots].tolist())
        assert {expert: new[expert] for expert in old.keys() & new.keys()} == {
            expert: old[expert] for expert in old.keys() & new.keys()
        }
    check_invariants(pool, again)
    assert [pool.experts(index).scores.tolist() for index in range(pool.n_layers)] == scores
    assert [pool.counts(index, "decode").selections.tolist() for index in range(pool.n_layers)] == counts


def test_other_layers_start_anew() -> None:
    """As many experts in all, but not the same layers: nothing of the old ones is theirs."""
    pool = pool_of(layer_start(6), layer_start(10))
    pool.step([np.array([[5, 1]]), np.array([[9, 7]])], "decode")
    pool.place(TierStart((layer_start(10), layer_start(6))))
    assert [pool.counts(layer, "decode").selections.tolist() for layer in range(2)] == [[0] * 10, [0] * 6]
    assert [pool.experts(layer).stamps.tolist() for layer in range(2)] == [[0] * 10, [0] * 6]


def test_with_another_number_of_slots_counts_go_on() -> None:
    pool = pool_of(layer_start())
    pool.step([np.array([[5, 1]])], "decode")
    pool.place(TierStart((layer_start(slots=6),)))
    assert pool.n_resident(0) == 6
    assert pool.counts(0, "decode").tokens == 1


def test_counts_start_anew_and_nothing_else() -> None:
    pool = pool_of(layer_start())
    pool.step([np.array([[5, 1]])], "decode")
    slots, stamps = slots_by_layer(pool), pool.experts(0).stamps.tolist()
    pool.reset_counts()
    counts = pool.counts(0, "decode")
    assert (counts.tokens, counts.cold, counts.loads) == (0, 0, 0)
    assert not counts.selections.any()
    assert not counts.reuse.any()
    assert (slots_by_layer(pool), pool.experts(0).stamps.tolist()) == (slots, stamps)


def test_large_calls_go_around_the_slots() -> None:
    pool = pool_of(layer_start(32, top_k=2, slots=20))
    assert [pool.goes_through(0, 2, tokens) for tokens in (1, 8, 9)] == [True, True, False]
    full = pool_of(layer_start(32, top_k=2, slots=4))
    assert [full.goes_through(0, 2, tokens) for tokens in (1, 2, 3)] == [True, True, False]
    whole = pool_of(layer_start(8, top_k=2, slots=8))
    assert [whole.goes_through(0, 2, tokens) for tokens in (8, 9)] == [True, False]
