from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_schemas.manifest import PRIOR_SCALE, Expectation, LayerPlacement, PlacementManifest, TierBytes
from spark_schemas.manifest_diff import diff_manifests

EXPERTS, TOP_K, BYTES = 6, 2, 10
Layer = tuple[int, list[int]]
LAYERS = st.lists(
    st.tuples(
        st.integers(2 * TOP_K, EXPERTS), st.lists(st.integers(1, PRIOR_SCALE), min_size=EXPERTS, max_size=EXPERTS)
    ),
    min_size=3,
    max_size=3,
)


def manifest(layers: list[Layer], rate: float | None = 0.25, **changes: object) -> PlacementManifest:
    """One of ``(slots, prior)`` per block."""
    placed = tuple(
        LayerPlacement(
            block=block,
            n_experts=len(prior),
            top_k=TOP_K,
            slots=slots,
            expert_bytes=BYTES,
            prior=tuple(prior),
            total_share=sum(prior) / PRIOR_SCALE,
        )
        for block, (slots, prior) in enumerate(layers)
    )
    held = sum(slots for slots, _ in layers) * BYTES
    fields: dict[str, object] = {
        "fingerprint": "mf1-" + "a" * 32,
        "sibling": "ms1-" + "b" * 32,
        "workload": "chat",
        "phase": "decode",
        "profile_revision": "c" * 64,
        "vram_budget_bytes": 1000,
        "n_ctx": 64,
        "layers": placed,
        "bytes": TierBytes(
            vram_core=0, vram_kv=0, vram_slots=held, vram_reserve=0, vram_total=held, host_experts=180, disk=0
        ),
        "expected": None
        if rate is None
        else Expectation(cold_hit_rate=rate, low=0.0, high=1.0, uniform_cold_hit_rate=0.5),
        "verdict": None,
        "verdict_reason": "",
        "n_calibration": 1,
        "n_held_out": 0,
    }
    return PlacementManifest.model_validate({**fields, **changes})


@given(LAYERS, LAYERS)
def test_it_leads_from_one_hot_set_to_the_other(one: list[Layer], other: list[Layer]) -> None:
    before, after = manifest(one), manifest(other)
    found = diff_manifests(before, after)
    for layer, was, now in zip(found.layers, before.layers, after.layers, strict=True):
        assert set(was.hot_set) - set(layer.leaving) | set(layer.entering) == set(now.hot_set)
        assert not set(layer.entering) & set(was.hot_set)
        assert set(layer.leaving) <= set(was.hot_set)
        assert len(layer.entering) - len(layer.leaving) == layer.slots_after - layer.slots_before
        total = sum(now.prior)
        assert layer.entering_share == pytest.approx(sum(now.prior[expert] for expert in layer.entering) / total)
        assert layer.leaving_share == pytest.approx(sum(now.prior[expert] for expert in layer.leaving) / total)
        assert [now.hot_set.index(expert) for expert in layer.entering] == sorted(
            now.hot_set.index(expert) for expert in layer.entering
        )
    assert found.slots_change * BYTES == found.vram_bytes_change
    assert found.experts_entering == sum(len(layer.entering) for layer in found.layers)
    assert found.entering_share == pytest.approx(math.fsum(layer.entering_share for layer in found.layers) / 3)
    back = diff_manifests(after, before)
    assert [(layer.leaving, layer.entering) for layer in back.layers] == [
        (layer.entering, layer.leaving) for layer in found.layers
    ]
    assert back.frequency_shift == pytest.approx(found.frequency_shift)


@given(LAYERS)
def test_nothing_changes_against_itself(layers: list[Layer]) -> None:
    found = diff_manifests(manifest(layers), manifest(layers))
    assert (found.experts_entering, found.experts_leaving, found.slots_change, found.vram_bytes_change) == (0, 0, 0, 0)
    assert (found.entering_share, found.leaving_share, found.frequency_shift) == (0.0, 0.0, 0.0)
    assert found.expected_change == 0.0


def test_worked_by_hand() -> None:
    before = manifest([(4, [60, 20, 10, 5, 5, 0])], 0.5)
    after = manifest([(5, [0, 20, 10, 5, 5, 60])], 0.25)
    (layer,) = diff_manifests(before, after).layers
    # Before: 0 1 2 3. After: 5 1 2 3 4.
    assert (layer.entering, layer.leaving) == ((5, 4), (0,))
    assert (layer.entering_share, layer.leaving_share, layer.frequency_shift) == (0.65, 0.0, 0.6)
    found = diff_manifests(before, after)
    assert (found.expected_change, found.slots_change, found.vram_bytes_change) == (-0.25, 1, 10)
    assert diff_manifests(manifest([(4, [1] * 6)], None), after).expected_change is None


def test_blocks_weigh_by_their_selections() -> None:
    flat, moved = (4, [10, 10, 10, 10, 1, 1]), (4, [1, 10, 10, 10, 10, 1])
    before, after = manifest([flat, flat]), manifest([flat, moved])
    heavy = [side.layers[1].model_copy(update={"top_k": 6}) for side in (before, after)]
    weighted = [
        side.model_copy(update={"layers": (side.layers[0], layer)})
        for side, layer in zip((before, after), heavy, strict=True)
    ]
    assert diff_manifests(*weighted).entering_share == pytest.approx(0.75 * 10 / 42)


def test_other_models_cannot_be_compared() -> None:
    layers: list[Layer] = [(4, [1] * 6)]
    with pytest.raises(ValueError, match="fingerprint: found mf1-dd"):
        diff_manifests(manifest(layers), manifest(layers, fingerprint="mf1-" + "d" * 32))
    with pytest.raises(ValueError, match="layers: found other blocks"):
        diff_manifests(manifest(layers), manifest([*layers, *layers]))
