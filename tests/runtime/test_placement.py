"""Placement arithmetic against brute force and on real routing counts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.placement import (
    BudgetTooSmallError,
    LayerSizes,
    bootstrap_interval,
    bootstrap_intervals,
    cold_hit_rates,
    floor_bytes,
    frequencies,
    greedy_slots,
    hot_set,
    layer_sizes,
    residency_budget,
    shares,
    stratified_intervals,
    uniform_slots,
    weighted_mean,
)
from spark_schemas.model import ModelShape

REAL = Path(__file__).parents[3] / "shared/data/routing/gptoss20b"


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[LayerSizes], list[np.ndarray]]:
    layers, frequency = [], []
    for _ in range(draw(st.integers(1, 4))):
        n_experts = draw(st.integers(1, 8))
        top_k = draw(st.integers(1, n_experts))
        layers.append(LayerSizes(n_experts, top_k, draw(st.integers(1, 9))))
        weights = np.array(draw(st.lists(st.integers(1, 50), min_size=n_experts, max_size=n_experts)), dtype=float)
        frequency.append(weights / weights.sum())
    return layers, frequency


def used(slots: list[int], layers: list[LayerSizes]) -> int:
    return sum(count * layer.expert_bytes for count, layer in zip(slots, layers, strict=True))


@settings(deadline=None)
@given(layouts(), st.floats(0, 1.2))
def test_slots_respect_floor_budget_and_size(layout, fraction: float) -> None:
    layers, frequency = layout
    budget = residency_budget(layers, min(fraction, 1.0))
    for slots in (greedy_slots(frequency, layers, budget), uniform_slots(layers, budget)):
        assert used(slots, layers) <= budget
        for count, layer in zip(slots, layers, strict=True):
            assert layer.floor_slots <= count <= layer.n_experts
        # Nothing that still fits is left out.
        left = budget - used(slots, layers)
        assert all(
            count == layer.n_experts or layer.expert_bytes > left for count, layer in zip(slots, layers, strict=True)
        )


@settings(deadline=None)
@given(layouts(), st.floats(0, 1.2))
def test_uniform_slots_go_one_by_one_to_the_layer_with_the_smallest_share(layout, fraction: float) -> None:
    layers, _ = layout
    budget = residency_budget(layers, min(fraction, 1.0))
    slots, left, waiting = (
        [layer.floor_slots for layer in layers],
        budget - floor_bytes(layers),
        set(range(len(layers))),
    )
    while waiting:
        index = min(waiting, key=lambda i: (slots[i] / layers[i].n_experts, i))
        if slots[index] == layers[index].n_experts or layers[index].expert_bytes > left:
            waiting.remove(index)
        else:
            slots[index] += 1
            left -= layers[index].expert_bytes
    assert uniform_slots(layers, budget) == slots


@settings(deadline=None, max_examples=60)
@given(layouts(), st.floats(0, 1))
def test_greedy_is_optimal_up_to_one_expert(layout, fraction: float) -> None:
    layers, frequency = layout
    budget = residency_budget(layers, fraction)

    def covered(slots) -> float:
        return sum(
            layer.top_k * np.sort(freq)[::-1][:count].sum()
            for layer, freq, count in zip(layers, frequency, slots, strict=True)
        )

    choices = itertools.product(*(range(layer.floor_slots, layer.n_experts + 1) for layer in layers))
    best = max(covered(slots) for slots in choices if used(list(slots), layers) <= budget)
    largest_gain = max(layer.top_k * freq.max() for layer, freq in zip(layers, frequency, strict=True))
    assert covered(greedy_slots(frequency, layers, budget)) >= best - largest_gain - 1e-9


def test_budget_below_the_floor_names_what_is_needed() -> None:
    layers = [LayerSizes(8, 2, 100), LayerSizes(8, 2, 50)]
    with pytest.raises(BudgetTooSmallError, match="599 bytes for experts, expected at least 600"):
        greedy_slots([np.ones(8) / 8] * 2, layers, 599)
    with pytest.raises(BudgetTooSmallError):
        uniform_slots(layers, 599)
    assert greedy_slots([np.ones(8) / 8] * 2, layers, floor_bytes(layers)) == [4, 4]


def test_frequencies_are_votes_of_sessions() -> None:
    long, short = [np.array([9000, 0, 0, 0])], [np.array([0, 300, 0, 0])]
    [layer] = frequencies([long, short], [9000, 300])
    assert layer[0] == pytest.approx(layer[1])
    assert layer[2] == layer[3] > 0
    assert layer.sum() == pytest.approx(1)


def test_a_stray_prompt_is_not_a_whole_vote() -> None:
    [layer] = frequencies([[np.array([1000, 0])], [np.array([0, 4])]], [1000, 4])
    assert layer[1] < 0.05


def test_unseen_layers_fall_back_to_the_prior() -> None:
    [layer] = frequencies([[np.zeros(4, dtype=np.int64)]], [10])
    assert layer.tolist() == [0.25] * 4
    assert shares([np.zeros(4, dtype=np.int64)])[0].tolist() == [0, 0, 0, 0]


def test_cold_hit_rates_count_selections() -> None:
    counts = [np.array([[5, 3, 2], [0, 0, 0], [2**53, 0, 0]]), np.array([[0, 10, 0], [0, 0, 0], [0, 0, 2**53]])]
    rates = cold_hit_rates(counts, [np.array([0]), np.array([1])])
    np.testing.assert_array_equal(rates, [1 - 15 / 20, np.nan, 0.5])


def test_sums_beyond_64_bits_are_exact() -> None:
    layers = [np.array([[2**53, 0]])] * 4096
    assert cold_hit_rates(layers, [np.array([0])] * 2048 + [np.array([1])] * 2048).tolist() == [0.5]


def test_layer_sizes_are_the_shapes(toy_shape: ModelShape) -> None:
    assert layer_sizes(toy_shape) == (LayerSizes(4, 2, 1), LayerSizes(5, 1, 1))


def test_equal_frequencies_go_to_the_lower_id() -> None:
    assert hot_set([np.array([0.2, 0.4, 0.2, 0.2])], [3])[0].tolist() == [1, 0, 2]


def test_interval_is_over_sessions_and_repeats() -> None:
    first = bootstrap_interval([0.1, 0.2, 0.3, 0.4], seed=3)
    assert first == bootstrap_interval([0.1, 0.2, 0.3, 0.4], seed=3)
    assert first.low < first.mean < first.high
    assert bootstrap_interval([0.2]).low == 0.0
    assert bootstrap_interval([0.2]).high == 1.0
    with pytest.raises(ValueError, match="no values"):
        bootstrap_interval([])


def test_interval_of_many_sessions_is_narrow_and_bounded_in_memory() -> None:
    # 10,000 sessions are resampled in five blocks; the interval is that of a mean, 1.96 standard errors to each side.
    interval = bootstrap_interval(np.random.default_rng(0).uniform(size=10_000).tolist())
    error = 1.96 * (1 / 12) ** 0.5 / 100
    assert interval.high - interval.low == pytest.approx(2 * error, rel=0.1)


def plain_bootstrap(values: np.ndarray, resamples: int = 2000) -> list[tuple[float, float, float]]:
    """The bootstrap over the sessions of one workload, written down once more."""
    rng = np.random.default_rng(0)
    count = len(values)
    drawn = rng.integers(0, count, size=(resamples, count)) + count * np.arange(resamples)[:, None]
    times = np.bincount(drawn.ravel(), minlength=resamples * count).reshape(resamples, count)
    means = np.clip(times @ values / count, values.min(axis=0), values.max(axis=0))
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return list(zip(values.mean(axis=0).tolist(), low.tolist(), high.tolist(), strict=True))


@pytest.mark.parametrize("n_sessions", [2, 3, 17, 200])
def test_one_stratum_is_the_plain_bootstrap_to_the_bit(n_sessions: int) -> None:
    values = np.random.default_rng(n_sessions).uniform(size=(n_sessions, 7))
    expected = plain_bootstrap(values)
    for found in (bootstrap_intervals(values), stratified_intervals([values], [1])):
        assert [(one.mean, one.low, one.high) for one in found] == expected


def test_strata_are_averaged_first_and_resampled_among_themselves() -> None:
    rng = np.random.default_rng(5)
    many, few = rng.normal(0.2, 0.05, size=(4000, 1)), rng.normal(0.6, 0.05, size=(40, 1))
    [found] = stratified_intervals([many, few], [1, 3])
    assert found.mean == pytest.approx((many.mean() + 3 * few.mean()) / 4, abs=1e-15)
    # 1.96 standard errors of the weighted mean of two independent means.
    error = 1.96 * (many.var() / 4000 / 16 + 9 * few.var() / 40 / 16) ** 0.5
    assert found.high - found.low == pytest.approx(2 * error, rel=0.1)
    assert found.low < found.mean < found.high
    # How many sessions a stratum has is not its weight.
    [again] = stratified_intervals([np.tile(many, (2, 1)), few], [1, 3])
    assert again.mean == pytest.approx(found.mean, abs=1e-12)


def test_a_stratum_without_sessions_gives_no_interval() -> None:
    two, one = np.array([[0.1], [0.3]]), np.array([[0.5]])
    [found] = stratified_intervals([two, one], [1, 1])
    assert (found.mean, found.low, found.high) == (0.35, 0.0, 1.0)
    with pytest.raises(ValueError, match="no values"):
        stratified_intervals([two, np.zeros((0, 1))], [1, 1])


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 1000)), min_size=1, max_size=8))
def test_a_weighted_mean_of_rates_is_a_rate(rows: list[tuple[float, int]]) -> None:
    values, weights = [np.array([rate]) for rate, _ in rows], [weight for _, weight in rows]
    [found] = weighted_mean(values, weights)
    assert 0.0 <= found <= 1.0
    assert found == pytest.approx(np.average([rate for rate, _ in rows], weights=weights), abs=1e-12)
    assert weighted_mean(values[:1], [1])[0] == rows[0][0]


@pytest.mark.skipif(not REAL.exists(), reason="real routing data is not beside this checkout")
def test_a_profile_helps_a_real_model() -> None:
    counts = np.load(REAL / "session_counts.npz")["counts"].astype(np.int64)
    sessions = json.loads((REAL / "sessions.json").read_text())
    kept = [list(c) for c, meta in zip(counts, sessions, strict=True) if not meta.get("repetition")]
    calibration, held_out = kept[::2], kept[1::2]
    layers = [LayerSizes(32, 4, 1)] * 24
    budget = residency_budget(layers, 0.6)
    own = frequencies(calibration, [int(session[0].sum()) // 4 for session in calibration])
    placed = hot_set(own, greedy_slots(own, layers, budget))
    first = [np.arange(count) for count in uniform_slots(layers, budget)]
    side_by_side = [np.stack(layer) for layer in zip(*held_out, strict=True)]
    own_rate = cold_hit_rates(side_by_side, placed).mean()
    uniform_rate = cold_hit_rates(side_by_side, first).mean()
    # Measured by others on this data: 0.131 against 0.405 at 60% with equal slots per layer.
    assert own_rate < 0.16
    assert 0.38 < uniform_rate < 0.43
