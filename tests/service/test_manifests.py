from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.calibration.trials import first_experts
from spark_runtime.manifest_build import quantised_prior
from spark_runtime.placement import cold_hit_rates, floor_bytes, greedy_slots, layer_sizes, uniform_slots
from spark_runtime.votes import by_layer
from spark_schemas.ids import MAX_COUNT
from spark_schemas.manifest import PRIOR_SCALE, PlacementManifest
from spark_schemas.model import ModelShape
from spark_schemas.profile import LayerFrequencies, Profile
from spark_service.builders import BuiltProfile, Inputs, build_profile
from spark_service.errors import RequestError
from spark_service.manifests import Budget, build_manifest

# Core 1000; at 100 tokens 200 for the context; experts 12 x 100 + 16 x 100 + 8 x 50 = 3200, floor 400 + 400 + 100.
FIXED, FLOOR, ALL = 1200, 900, 3200


@pytest.fixture(scope="module")
def shape(make: Any) -> ModelShape:
    found: ModelShape = make.shape()
    return found


@pytest.fixture(scope="module")
def built(make: Any, shape: ModelShape) -> BuiltProfile:
    parts = {"code": make.parts(shape, make.sessions(shape, 4, 3))}
    found = build_profile(shape, "code", "decode", "0" * 64, Inputs.of_parts(shape, "code", parts))
    assert found is not None
    return found


def manifest(built: BuiltProfile, shape: ModelShape, vram_bytes: int, n_ctx: int = 100, reserve: int = 0) -> Any:
    return build_manifest(built.profile, shape, Budget(vram_bytes, n_ctx, reserve), built.judges)


def refusal(
    built: BuiltProfile, shape: ModelShape, vram_bytes: int, n_ctx: int = 100, reserve: int = 0
) -> RequestError:
    with pytest.raises(RequestError) as caught:
        manifest(built, shape, vram_bytes, n_ctx, reserve)
    return caught.value


def test_the_expectation_is_that_of_the_encoded_hot_set(built: BuiltProfile, shape: ModelShape) -> None:
    made: PlacementManifest = manifest(built, shape, FIXED + 2000)
    [judges] = built.judges[0].held_out()
    counts = by_layer(judges.counts, [layer.n_experts for layer in shape.layers])
    rates = cold_hit_rates(counts, [np.array(layer.hot_set) for layer in made.layers])
    assert made.expected is not None
    assert made.expected.cold_hit_rate == pytest.approx(rates.mean(), abs=1e-15)
    assert made.expected.low <= made.expected.cold_hit_rate <= made.expected.high
    uniform = cold_hit_rates(counts, first_experts(uniform_slots(layer_sizes(shape), made.bytes.vram_slots)))
    assert made.expected.uniform_cold_hit_rate == pytest.approx(uniform.mean(), abs=1e-15)
    assert made.expected.cold_hit_rate < made.expected.uniform_cold_hit_rate


def test_slots_are_the_greedy_ones_and_bytes_add_up(built: BuiltProfile, shape: ModelShape) -> None:
    made = manifest(built, shape, FIXED + 50 + 2000, reserve=50)
    shares = [np.array(layer.shares) for layer in built.profile.layers]
    assert [layer.slots for layer in made.layers] == greedy_slots(shares, layer_sizes(shape), 2000)
    found = made.bytes
    assert (found.vram_core, found.vram_kv, found.vram_reserve, found.disk) == (1000, 200, 50, 0)
    assert found.host_experts == ALL
    assert (made.verdict, made.verdict_reason) == (built.profile.verdict, built.profile.verdict_reason)


def test_a_budget_for_everything(built: BuiltProfile, shape: ModelShape) -> None:
    made = manifest(built, shape, MAX_COUNT)
    assert [layer.slots for layer in made.layers] == [12, 16, 8]
    assert made.expected is not None
    assert (made.expected.cold_hit_rate, made.expected.low, made.expected.high) == (0, 0, 0)
    assert made.expected.uniform_cold_hit_rate == 0
    assert made.bytes.vram_total == FIXED + ALL


def test_the_floor_itself_is_enough(built: BuiltProfile, shape: ModelShape) -> None:
    made = manifest(built, shape, FIXED + FLOOR)
    assert [layer.slots for layer in made.layers] == [4, 4, 2]


def test_without_held_out_sessions_nothing_is_promised(built: BuiltProfile, shape: ModelShape) -> None:
    assert build_manifest(built.profile, shape, Budget(FIXED + FLOOR, 100), ()).expected is None


def test_too_small_a_budget_names_the_smallest_fixes(built: BuiltProfile, shape: ModelShape) -> None:
    error = refusal(built, shape, FIXED + FLOOR - 1)
    assert (error.status, error.code, error.expected) == (422, "budget_too_small", f"at least {FIXED + FLOOR}")
    assert error.hint == "smallest change that fits: vram_bytes=2100 or n_ctx=99"
    manifest(built, shape, FIXED + FLOOR - 1, n_ctx=99)
    assert refusal(built, shape, 1000 + FLOOR).hint == "smallest change that fits: vram_bytes=2100"
    assert refusal(built, shape, 1).expected == f"at least {FIXED + FLOOR}"
    assert refusal(built, shape, FIXED + FLOOR, reserve=7).expected == f"at least {FIXED + FLOOR + 7}"


def test_a_context_beyond_the_models(built: BuiltProfile, shape: ModelShape) -> None:
    error = refusal(built, shape, MAX_COUNT, n_ctx=4097)
    assert (error.status, error.code, error.found) == (422, "context_too_long", "4097")


def test_no_context_fix_where_the_context_costs_nothing(built: BuiltProfile, make: Any) -> None:
    free = make.shape(kv_bytes_per_token=0)
    assert refusal(built, free, 1800).hint == "smallest change that fits: vram_bytes=1900"


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(any))
def test_a_prior_is_zero_only_for_no_share(shares: list[float]) -> None:
    prior = quantised_prior(np.array(shares))
    assert max(prior) == PRIOR_SCALE
    assert [score == 0 for score in prior] == [share == 0 for share in shares]
    for one, share in zip(prior, shares, strict=True):
        assert abs(one - share / max(shares) * PRIOR_SCALE) <= 1


def layer_of(n_experts: int) -> st.SearchStrategy[tuple[int, int, int, list[float]]]:
    shares = st.lists(st.floats(1e-9, 1), min_size=n_experts, max_size=n_experts)
    return st.tuples(st.just(n_experts), st.integers(1, n_experts), st.integers(1, 300), shares)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    layers=st.lists(st.integers(1, 12).flatmap(layer_of), min_size=1, max_size=5),
    vram_bytes=st.integers(1, 20_000),
    n_ctx=st.integers(1, 4096),
    reserve=st.integers(0, 500),
)
def test_any_manifest_fits_its_budget(make: Any, layers: list[Any], vram_bytes: int, n_ctx: int, reserve: int) -> None:
    shape = make.shape([layer[:3] for layer in layers])
    profile = Profile(
        fingerprint=shape.fingerprint,
        workload="code",
        phase="decode",
        revision="0" * 64,
        n_calibration=1,
        n_held_out=0,
        tokens_calibration=1,
        tokens_held_out=0,
        layers=tuple(
            LayerFrequencies(block=block, shares=tuple(np.array(s) / sum(s)), selections=(0,) * n)
            for block, (n, _, _, s) in enumerate(layers, 1)
        ),
        curves=(),
        verdict=None,
        verdict_reason="",
    )
    budget = Budget(vram_bytes, n_ctx, reserve)
    needed = shape.core_bytes + 2 * n_ctx + reserve + floor_bytes(layer_sizes(shape))
    if vram_bytes < needed:
        with pytest.raises(RequestError) as caught:
            build_manifest(profile, shape, budget, ())
        assert (caught.value.code, caught.value.expected) == ("budget_too_small", f"at least {needed}")
        build_manifest(profile, shape, Budget(needed, n_ctx, reserve), ())
        if fix := re.search(r"n_ctx=(\d+)", caught.value.hint or ""):
            smaller = int(fix[1])
            build_manifest(profile, shape, Budget(vram_bytes, smaller, reserve), ())
            with pytest.raises(RequestError):
                build_manifest(profile, shape, Budget(vram_bytes, smaller + 1, reserve), ())
        return
    made = build_manifest(profile, shape, budget, ())
    assert made.bytes.vram_total <= vram_bytes
    assert made.bytes.vram_slots == sum(layer.slots * layer.expert_bytes for layer in made.layers)
    for layer, sizes in zip(made.layers, layer_sizes(shape), strict=True):
        assert sizes.floor_slots <= layer.slots <= sizes.n_experts
        assert layer.total_share == sum(layer.prior) / PRIOR_SCALE
    left = vram_bytes - made.bytes.vram_total
    assert all(layer.slots == layer.n_experts or layer.expert_bytes > left for layer in made.layers), (
        "room for one more expert was left unused"
    )
