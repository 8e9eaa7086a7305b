from __future__ import annotations

import base64
import gzip
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spark_runtime.placement import greedy_slots, hot_set, layer_sizes, residency_budget
from spark_schemas.profile import LayerFrequencies, Profile
from spark_service.dashboard.heat_map import LEVELS, RANGE_OCTAVES, heat_map, layer_rows, layer_view, shares_of


def profile_of(make: Any, shares: list[np.ndarray], shape: Any) -> Profile:
    return Profile(
        fingerprint=make.fingerprint,
        workload="code",
        phase="decode",
        revision="0" * 64,
        n_calibration=3,
        n_held_out=0,
        tokens_calibration=1,
        tokens_held_out=0,
        layers=tuple(
            LayerFrequencies(block=layer.block, shares=tuple(share.tolist()), selections=(1,) * len(share))
            for layer, share in zip(shape.layers, shares, strict=True)
        ),
        curves=(),
        verdict=None,
        verdict_reason="",
    )


def decoded(map_: Any) -> np.ndarray:
    """Times the even share, as the canvas reads it; nan below the range."""
    levels = np.frombuffer(base64.b64decode(map_.levels), dtype=np.uint8).astype(float)
    step = (map_.high_log2 - map_.low_log2) / (LEVELS - 1)
    return np.where(levels > 0, 2.0 ** (map_.low_log2 + (levels - 1) * step), np.nan)


weights = hnp.arrays(
    np.float64, 12, elements=st.one_of(st.just(0.0), st.floats(1e-9, 1.0, allow_nan=False, allow_subnormal=False))
)


@given(found=weights.filter(lambda found: found.sum() > 0))
def test_levels_tell_every_share_within_the_range_to_a_few_percent(make: Any, found: np.ndarray) -> None:
    shape = make.shape([(12, 2, 100)])
    share = found / found.sum()
    map_ = heat_map(profile_of(make, [share], shape), shape)
    told, times = decoded(map_), share * 12
    inside = np.isfinite(told)
    # Half of the largest step that the range allows.
    most = 2.0 ** (RANGE_OCTAVES / (LEVELS - 1) / 2) + 1e-9
    assert (told[inside] / times[inside] <= most).all()
    assert (times[inside] / told[inside] <= most).all()
    assert (times[~inside] <= times.max() / 2.0 ** (RANGE_OCTAVES - 0.1)).all()
    # Never the wrong way round.
    order = np.argsort(times, kind="stable")
    assert (np.diff(np.nan_to_num(told)[order]) >= -1e-12).all()


def test_alike_experts_have_one_level(make: Any) -> None:
    shape = make.shape([(12, 2, 100)])
    map_ = heat_map(profile_of(make, [np.full(12, 1 / 12)], shape), shape)
    assert decoded(map_) == pytest.approx(np.ones(12))


@pytest.mark.parametrize("seed", range(5))
def test_the_hot_set_is_that_of_a_manifest(make: Any, seed: int) -> None:
    shape = make.shape()
    rng = np.random.default_rng(seed)
    shares = [rng.dirichlet(np.full(layer.n_experts, 0.3)) for layer in shape.layers]
    map_ = heat_map(profile_of(make, shares, shape), shape)
    bits = np.unpackbits(np.frombuffer(base64.b64decode(map_.resident), dtype=np.uint8))[: sum(map_.n_experts)]
    sizes = layer_sizes(shape)
    expected = hot_set(shares, greedy_slots(shares, sizes, residency_budget(sizes, map_.residency)))
    start = 0
    for size, ids in zip(map_.n_experts, expected, strict=True):
        assert np.flatnonzero(bits[start : start + size]).tolist() == sorted(ids.tolist())
        start += size


def test_a_large_model_is_small_on_the_wire(make: Any) -> None:
    shape = make.shape([(512, 10, 1000)] * 60)
    rng = np.random.default_rng(0)
    shares = [rng.dirichlet(np.full(512, 0.5)) for _ in range(60)]
    profile = profile_of(make, shares, shape)
    body = heat_map(profile, shape).model_dump_json().encode()
    assert len(gzip.compress(body, 5)) < 45_000
    assert len(body) < 60_000
    assert len(layer_rows(profile, shape)) == 60


def test_rows_and_a_layer_say_what_the_profile_says(make: Any, built: Callable[..., Profile]) -> None:
    shape, profile = make.shape(), built(make.sessions(make.shape()))
    rows = layer_rows(profile, shape)
    assert [row.block for row in rows] == [1, 2, 3]
    for row, share in zip(rows, shares_of(profile), strict=True):
        hottest = np.sort(share)[::-1]
        assert row.covered == pytest.approx(hottest[: row.slots].sum())
        assert hottest[: row.for_half].sum() >= 0.5 > hottest[: row.for_half - 1].sum()
    view = layer_view(profile, shape, 2)
    assert view is not None
    assert view.layer == rows[1]
    assert [one.expert for one in view.experts if one.resident] == [one.expert for one in view.experts[: rows[1].slots]]
    assert sum(one.share for one in view.experts) == pytest.approx(1.0)
    assert {one.expert: one.selections for one in view.experts} == dict(enumerate(profile.layers[1].selections))
    assert all(one.times_even == pytest.approx(one.share * 16) for one in view.experts)


def test_a_dense_block_has_no_layer(make: Any, built: Callable[..., Profile]) -> None:
    assert layer_view(built(make.sessions(make.shape())), make.shape(), 0) is None
