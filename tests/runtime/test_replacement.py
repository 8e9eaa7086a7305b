from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_runtime.placement import LayerSizes
from spark_runtime.replacement import RecentTraffic, Rules, decide, pool_slots

N_EXPERTS, TOP_K = 16, 2
SIZES = [LayerSizes(N_EXPERTS, TOP_K, 100)] * 2
SLOTS = [6, 6]
POOLS = ["one", "one"]
RULES = Rules(window_tokens=50, every_tokens=100)


def drawn(rng: np.random.Generator, hot: int, n_tokens: int = 50) -> list[np.ndarray]:
    """Selections of two layers, most of them of four experts from ``hot`` on."""
    weights = np.full(N_EXPERTS, 0.1)
    weights[hot : hot + 4] = 4
    picked = [rng.choice(N_EXPERTS, TOP_K, replace=False, p=weights / weights.sum()) for _ in range(n_tokens)]
    counts = np.bincount(np.concatenate(picked), minlength=N_EXPERTS)
    return [counts, counts[::-1].copy()]


def traffic_of(hot: int, n_windows: int = 20, cold_hits: int = 40, seed: int = 0) -> RecentTraffic:
    rng = np.random.default_rng(seed)
    traffic = RecentTraffic([N_EXPERTS] * 2, RULES)
    for _ in range(n_windows):
        traffic.add(drawn(rng, hot), 50, cold_hits)
    return traffic


def profile(hot: int) -> list[np.ndarray]:
    counts = drawn(np.random.default_rng(9), hot, 2000)
    return [layer / layer.sum() for layer in counts]


def test_traffic_that_has_moved_changes_the_prior():
    traffic = traffic_of(hot=10)
    present = profile(hot=0)
    decision = decide(traffic, present, traffic.frequencies(present), SIZES, SLOTS, POOLS)
    assert decision.outcome == "changed"
    saving = decision.predicted_saving
    assert saving is not None
    assert 0 < saving.low <= saving.mean <= saving.high <= decision.live_cold_hits == pytest.approx(0.8)


def test_traffic_that_stays_changes_nothing():
    traffic = traffic_of(hot=0)
    present = profile(hot=0)
    assert decide(traffic, present, traffic.frequencies(present), SIZES, SLOTS, POOLS).outcome == "no_change"


def test_what_costs_more_than_it_saves_is_not_done():
    traffic = traffic_of(hot=10)
    present = profile(hot=0)
    candidate = traffic.frequencies(present)
    affordable = decide(traffic, present, candidate, SIZES, SLOTS, POOLS, cost_bytes=1)
    assert affordable.outcome == "changed"
    saved = affordable.predicted_saving.low * RULES.horizon_tokens * 100
    dear = decide(traffic, present, candidate, SIZES, SLOTS, POOLS, cost_bytes=int(saved / RULES.margin) + 1)
    assert (dear.outcome, "pay" in dear.reason) == ("no_change", True)


def test_nothing_is_said_of_little_traffic_or_of_slots_that_miss_nothing():
    present = profile(hot=0)
    little = traffic_of(hot=10, n_windows=RULES.fewest_windows - 1)
    found = decide(little, present, little.frequencies(present), SIZES, SLOTS, POOLS)
    assert (found.outcome, found.predicted_saving) == ("no_change", None)
    whole = traffic_of(hot=10, cold_hits=0)
    assert decide(whole, present, whole.frequencies(present), SIZES, SLOTS, POOLS).reason == "nothing is missed"


def test_without_a_profile_the_first_experts_are_compared():
    traffic = traffic_of(hot=12)
    assert decide(traffic, None, traffic.frequencies(None), SIZES, SLOTS, POOLS).outcome == "changed"


def test_held_aside_traffic_teaches_nothing():
    rng = np.random.default_rng(1)
    one, other = (RecentTraffic([N_EXPERTS] * 2, RULES) for _ in range(2))
    for number in range(1, 13):
        counts = drawn(rng, 0)
        one.add(counts, 50, 1)
        other.add(drawn(rng, 12) if number % RULES.aside_every == 0 else counts, 50, 1)
    for mine, theirs in zip(one.frequencies(None), other.frequencies(None), strict=True):
        assert np.array_equal(mine, theirs)


@given(
    parts=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 12)), max_size=80),
    slots=st.lists(st.integers(4, N_EXPERTS), min_size=2, max_size=2),
)
def test_any_traffic_keeps_the_invariants(parts, slots):
    rng = np.random.default_rng(3)
    traffic = RecentTraffic([N_EXPERTS] * 2, RULES)
    for tokens, hot in parts:
        traffic.add(drawn(rng, hot, 5), tokens, tokens)
    assert traffic.tokens == sum(tokens for tokens, _ in parts)
    assert len(traffic.windows) <= RULES.windows
    frequencies = traffic.frequencies(None)
    for layer in frequencies:
        assert layer.min() > 0
        assert layer.sum() == pytest.approx(1)
    placed = pool_slots(frequencies, SIZES, slots, POOLS)
    assert sum(placed) == sum(slots), "no memory is asked for"
    assert min(placed) >= 2 * TOP_K
    first = decide(traffic, None, frequencies, SIZES, slots, POOLS)
    assert first == decide(traffic, None, frequencies, SIZES, slots, POOLS)
    assert (first.outcome == "changed") <= (first.predicted_saving is not None and first.predicted_saving.low > 0)


def test_pools_do_not_lend_to_each_other():
    frequency = [np.array([0.97, *[0.002] * 15]), np.full(16, 1 / 16)]
    assert pool_slots(frequency, SIZES, [8, 6], ["one", "other"]) == [8, 6]
    assert pool_slots(frequency, SIZES, [8, 6], ["one", "one"]) == [4, 10]
