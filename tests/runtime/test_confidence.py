"""Tiers sized by how sure it is that an expert will be used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_runtime.confidence import BANDS, bands, covering_slots, slots_coverage
from spark_runtime.placement import LayerSizes


@st.composite
def profiles(draw: st.DrawFn) -> tuple[list[np.ndarray], list[LayerSizes]]:
    layers, frequency = [], []
    for _ in range(draw(st.integers(1, 4))):
        n_experts = draw(st.integers(1, 40))
        layers.append(LayerSizes(n_experts, draw(st.integers(1, n_experts)), draw(st.sampled_from([1, 7, 1000]))))
        weights = np.array(draw(st.lists(st.integers(1, 50), min_size=n_experts, max_size=n_experts)))
        frequency.append(weights / weights.sum())
    return frequency, layers


@given(profiles(), st.floats(0, 1))
def test_slots_cover_what_was_asked_for_above_the_floor(
    profile: tuple[list[np.ndarray], list[LayerSizes]], coverage: float
) -> None:
    frequency, layers = profile
    slots = covering_slots(frequency, layers, coverage)
    assert slots_coverage(frequency, layers, slots) >= coverage - 1e-9
    for count, layer in zip(slots, layers, strict=True):
        assert min(2 * layer.top_k, layer.n_experts) <= count <= layer.n_experts


@given(profiles())
def test_less_coverage_never_takes_more_memory(profile: tuple[list[np.ndarray], list[LayerSizes]]) -> None:
    frequency, layers = profile
    taken = [
        sum(
            count * layer.expert_bytes
            for count, layer in zip(covering_slots(frequency, layers, share), layers, strict=True)
        )
        for share in (0.0, 0.3, 0.6, 0.9, 1.0)
    ]
    assert taken == sorted(taken)
    assert taken[0] == sum(layer.floor_slots * layer.expert_bytes for layer in layers)


@given(profiles(), st.floats(0, 1))
def test_bands_hold_every_expert_once_the_surest_first(
    profile: tuple[list[np.ndarray], list[LayerSizes]], coverage: float
) -> None:
    frequency, layers = profile
    slots = covering_slots(frequency, layers, coverage)
    found = bands(frequency, layers, slots)
    assert [band.coverage for band in found] == list(BANDS)
    assert sum(band.experts for band in found) == sum(layer.n_experts for layer in layers)
    assert sum(band.bytes for band in found) == sum(layer.n_experts * layer.expert_bytes for layer in layers)
    assert sum(band.in_slots for band in found) == sum(slots)


def test_a_skewed_profile_needs_few_experts_for_much() -> None:
    frequency = [np.array([0.5, 0.3, 0.1, 0.05, 0.03, 0.01, 0.005, 0.005])]
    layers = [LayerSizes(8, 1, 10)]
    assert [covering_slots(frequency, layers, share)[0] for share in (0.5, 0.85, 0.98, 1.0)] == [2, 3, 5, 8]
    found = bands(frequency, layers, [3])
    assert [(band.experts, band.in_slots, band.bytes) for band in found] == [
        (1, 1, 10), (1, 1, 10), (2, 1, 20), (2, 0, 20), (2, 0, 20)
    ]  # fmt: skip
    assert [band.least_per_token for band in found] == [0.5, 0.3, 0.05, 0.01, 0.005]


@pytest.mark.parametrize("coverage", [-0.1, 1.1])
def test_a_coverage_that_is_no_share_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match="expected 0 to 1"):
        covering_slots([np.ones(4) / 4], [LayerSizes(4, 1, 1)], coverage)
