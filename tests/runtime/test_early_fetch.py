"""Fetching early: decided by whole numbers as plainly told, and whatever is guessed, the same bits come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_model import PoolModel
from small_models import write_small_model
from test_slots import check_invariants, layer_start, pool_of, slots_by_layer, starts
from tier_runs import SIZE, digest, load

from spark_runtime.early_fetch import MAX_EARLY, NO_EARLY_FETCH, EarlyFetch, LinkBudget
from spark_runtime.engine import Engine
from spark_runtime.errors import TierError
from spark_runtime.models import demo_model_path
from spark_runtime.native_tier import LayerGuesses
from spark_runtime.slot_pool import Move, SlotPool
from spark_runtime.tier import PHASES, TierCounters
from spark_runtime.tier_start import TierStart

NEVER, ALWAYS = float("inf"), float("-inf")
INT16 = np.iinfo(np.int16)


@st.composite
def steps(draw: st.DrawFn, start: TierStart) -> list[np.ndarray]:
    """Mostly of one token, which alone is guessed from."""
    tokens = draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
    rows = [
        [draw(st.permutations(range(len(layer.order))))[: layer.top_k] for _ in range(tokens)] for layer in start.layers
    ]
    return [np.array(of_layer) for of_layer in rows]


def fill(pool: SlotPool, model: PoolModel, random: np.random.Generator) -> None:
    """Weights from nothing to the ends of what 16 bits hold."""
    for layer in range(pool.n_layers):
        shape = pool.guesses(layer).shape
        wild = random.integers(INT16.min, INT16.max + 1, shape)
        weights = (wild * random.choice([0.0, 0.01, 0.3, 1.0], shape)).astype(np.int16)
        pool.set_guesses(layer, weights)
        if layer:
            model.weights[layer][...] = weights


def plain(moves: list[Move]) -> list[tuple[int, int]]:
    return [(move.expert, move.slot) for move in moves]


@settings(deadline=None, max_examples=60)
@given(starts(), st.data())
def test_the_native_guesses_are_the_plain_ones(start: TierStart, data: st.DataObject) -> None:
    """What is fetched early, learned and counted, to the last bit, from any weights."""
    early = EarlyFetch(
        data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from([NEVER, ALWAYS, 0.0, 0.5, 1.0]) | st.floats(-3, 3)),
        learning=data.draw(st.booleans()),
    )
    pool, model = SlotPool(start), PoolModel(start, early)
    pool.set_early(early)
    fill(pool, model, np.random.default_rng(data.draw(st.integers(0, 2**32))))
    for _ in range(data.draw(st.integers(0, 8))):
        phase, step = data.draw(st.sampled_from(PHASES)), data.draw(steps(start))
        for index, ids in enumerate(step):
            if not pool.goes_through(index, *reversed(ids.shape)):
                pool.pass_by(index, ids, phase)
                model.pass_by(index, ids.tolist(), phase)
                continue
            assert plain(pool.ensure(index, ids, phase)[1]) == model.ensure(index, ids.tolist(), phase)
            before = slots_by_layer(pool)
            moves = pool.fetch_early(index, ids, phase)
            assert plain(moves) == model.fetch_early(index, ids.tolist(), phase)
            # What this step has selected, here or in any layer before, is where it was.
            for place, selected in enumerate(step[: index + 1]):
                if pool.goes_through(place, *reversed(selected.shape)):
                    still = slots_by_layer(pool)[place]
                    for expert in set(selected.ravel().tolist()) & before[place].keys():
                        assert still[expert] == before[place][expert]
            check_invariants(pool, start)
        for index, ids in enumerate(step):
            pool.observe(index, ids, phase)
            model.observe(index, ids.tolist(), phase)
        for machine in (pool, model):
            machine.learn()
            machine.end_step()
    for index, layer in enumerate(model.layers):
        assert slots_by_layer(pool)[index] == layer.slot_of
        if index:
            np.testing.assert_array_equal(pool.guesses(index), model.weights[index])
        for phase in PHASES:
            counts = pool.counts(index, phase)
            assert {name: getattr(counts, name) for name in layer.counts[phase]} == layer.counts[phase]


@settings(deadline=None, max_examples=30)
@given(starts(), st.data())
def test_decoding_at_once_is_decoding_step_by_step(start: TierStart, data: st.DataObject) -> None:
    top_k = min(layer.top_k for layer in start.layers)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    ids = [[random.permutation(len(layer.order))[:top_k] for layer in start.layers] for _ in range(12)]
    one, other = SlotPool(start), SlotPool(start)
    for pool in (one, other):
        pool.set_early(EarlyFetch(2, 0.1))
    one.decode(np.array(ids))
    for token in ids:
        other.step([of_layer[None] for of_layer in token], "decode")
    assert slots_by_layer(one) == slots_by_layer(other)
    for layer in range(one.n_layers):
        np.testing.assert_array_equal(one.guesses(layer), other.guesses(layer))
        assert one.counts(layer, "decode").cold == other.counts(layer, "decode").cold


def test_what_always_follows_is_learned_and_there_before_it_is_asked_for() -> None:
    """Each expert of the first layer is followed by one of the second's, of which only half have slots."""
    random = np.random.default_rng(1)
    chosen = random.integers(0, 8, 400)
    ids = np.stack([np.stack([chosen, 8 + chosen], 1), np.stack([15 - chosen, 7 - chosen], 1)], 1)
    rates = {}
    for early in (NO_EARLY_FETCH, EarlyFetch(2)):
        pool = pool_of(*[layer_start(16, slots=8)] * 2)
        pool.set_early(early)
        pool.decode(ids[:200])
        pool.reset_counts()
        pool.decode(ids[200:])
        rates[early] = [pool.counts(layer, "decode") for layer in (0, 1)]
    without, early = rates.values()
    assert without[1].cold > 100
    assert without[1].early == 0
    assert early[1].cold < without[1].cold / 20
    assert early[1].early_used >= early[1].early - 2
    assert early[0].cold <= without[0].cold + early[1].early


def test_weights_of_another_layer_are_refused() -> None:
    pool = pool_of(layer_start(), layer_start(6))
    with pytest.raises(TierError, match=r"weights \(9, 6\) of int16, expected \(0, 6\)"):
        pool.set_guesses(1, np.zeros((9, 6), np.int16))
    pool.set_early(EarlyFetch())
    assert pool.guesses(0).shape == (0, 8)
    assert pool.guesses(1).shape == (9, 6)
    for wrong in (np.zeros((8, 6), np.int16), np.zeros((9, 6), np.int32)):
        with pytest.raises(TierError, match="expected"):
            pool.set_guesses(1, wrong)
    pool.set_early(NO_EARLY_FETCH)
    assert pool.guesses(1).size == 0


@pytest.mark.parametrize(("experts", "threshold"), [(-1, 0.5), (MAX_EARLY + 1, 0.5), (1, float("nan"))])
def test_what_makes_no_sense_is_refused(experts: int, threshold: float) -> None:
    with pytest.raises(TierError, match=r"expected 0 to 16|no number"):
        EarlyFetch(experts, threshold)


# ---- a whole model


def random_guesses(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    return random.integers(INT16.min, INT16.max + 1, shape).astype(np.int16)


def always_the_same(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    weights = np.zeros(shape, np.int16)
    weights[-1, :3] = INT16.max
    return weights


def nothing(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    return np.zeros(shape, np.int16)


@pytest.fixture(params=["qwen3moe", "gpt-oss", "llama4", "deepseek2", "trained"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "trained":
        return demo_model_path()
    return write_small_model(tmp_path / "model.gguf", request.param, SIZE)


def counted(engine: Engine) -> TierCounters:
    assert engine.tier is not None
    return engine.tier.counters(reset=True)


def selected(counters: TierCounters) -> list[Any]:
    return [
        counters.tokens,
        {phase: [layer.tolist() for layer in layers] for phase, layers in counters.counts.items()},
        [layer.tolist() for layer in counters.reuse],
    ]


@pytest.mark.parametrize("residency", [0.0, 0.5])
def test_whatever_is_guessed_the_bits_and_the_counts_are_the_same(model: Path, residency: float) -> None:
    random = np.random.default_rng(4)
    with load(model, residency, n_seq_max=1) as engine:
        expected = digest(engine)
        counted(engine)  # whose first uses are of a new engine
        assert digest(engine) == expected
        counts = counted(engine)
        assert sum(counts.early["decode"]) == 0
        assert sum(counts.cold["decode"]) > 0
        tier = engine.tier
        assert tier is not None
        fetched = []
        for make in (random_guesses, always_the_same, nothing):
            for threshold, learning in ((ALWAYS, False), (0.0, True), (0.5, False)):
                tier.set_early(NO_EARLY_FETCH)
                tier.set_early(EarlyFetch(3, threshold, learning=learning))
                tier.set_guesses(
                    {
                        block: LayerGuesses(layer.sources, make(layer.weights.shape, random))
                        for block, layer in tier.guesses().items()
                    }
                )
                assert digest(engine) == expected
                found = counted(engine)
                assert selected(found) == selected(counts)
                fetched.append(sum(found.early["decode"]))
        if residency:
            assert max(fetched) > 0


def all_wrong(engine: Engine) -> dict[int, LayerGuesses]:
    """The contrary of what was learned."""
    assert engine.tier is not None
    contrary = {}
    for block, layer in engine.tier.guesses().items():
        weights = np.clip(-layer.weights.astype(np.int32), INT16.min, INT16.max)
        contrary[block] = LayerGuesses(layer.sources, weights.astype(np.int16))
    return contrary


def test_learned_guesses_are_used_and_their_contrary_is_wasted() -> None:
    with load(demo_model_path(), 0.5) as engine:
        expected = digest(engine, 120)
        tier = engine.tier
        assert tier is not None
        counted(engine)
        tier.set_early(EarlyFetch(2, 0.3))
        digest(engine, 120)
        counted(engine)
        assert digest(engine, 120) == expected
        learned = counted(engine)
        tier.set_guesses(all_wrong(engine))
        tier.set_early(EarlyFetch(2, 0.0, learning=False))
        assert digest(engine, 120) == expected
        wrong = counted(engine)
    assert sum(learned.early_used["decode"]) > sum(learned.early["decode"]) / 2 > 0
    assert sum(wrong.early_used["decode"]) < sum(wrong.early["decode"]) / 2
    assert learned.early_bytes["decode"] >= learned.early_used_bytes["decode"] > 0


def test_guesses_come_out_and_go_in(tmp_path: Path) -> None:
    path = write_small_model(tmp_path / "model.gguf", "qwen3moe", SIZE)
    with load(path, 0.5, early=EarlyFetch(2, 0.2)) as engine:
        assert engine.tier is not None
        digest(engine)
        learned = engine.tier.guesses()
        assert all(layer.weights.any() for layer in learned.values())
    with load(path, 0.5, early=EarlyFetch(2, 0.2)) as engine:
        tier = engine.tier
        assert tier is not None
        tier.set_guesses(learned)
        for block, layer in tier.guesses().items():
            np.testing.assert_array_equal(layer.weights, learned[block].weights)
        block, layer = next(iter(learned.items()))
        for wrong in (
            {block: LayerGuesses((77,), layer.weights)},
            {block: LayerGuesses(layer.sources, layer.weights[1:])},
            {77: layer},
        ):
            with pytest.raises(TierError, match=r"blocks \[77\]|expected"):
                tier.set_guesses(wrong)
        # Placing experts anew keeps what was learned; fetching nothing early forgets it.
        assert tier.start is not None
        tier.place(tier.start)
        np.testing.assert_array_equal(tier.guesses()[block].weights, layer.weights)
        tier.set_early(NO_EARLY_FETCH)
        assert tier.guesses() == {}


FIGURES = st.floats(1e-9, 1e15)


@settings(deadline=None)
@given(FIGURES, FIGURES, FIGURES)
def test_what_fits_beside_a_layer_is_copied_while_it_computes(size: float, rate: float, computing: float) -> None:
    budget = LinkBudget(size, rate, computing)
    assert 0 <= budget.experts <= MAX_EARLY
    assert budget.experts * budget.copy_s <= computing * (1 + 1e-9)
    if budget.experts < MAX_EARLY:
        assert (budget.experts + 1) * budget.copy_s > computing * (1 - 1e-9)
    assert LinkBudget(size, 2 * rate, computing).experts >= budget.experts
    assert LinkBudget(size, rate, 2 * computing).experts >= budget.experts
    assert LinkBudget(2 * size, rate, computing).experts <= budget.experts


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_a_budget_of_figures_that_no_machine_has_is_refused(wrong: float) -> None:
    for figures in ((wrong, 1.0, 1.0), (1.0, wrong, 1.0), (1.0, 1.0, wrong)):
        with pytest.raises(ValueError, match="expected numbers above 0"):
            LinkBudget(*figures)
