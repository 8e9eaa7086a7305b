"""Manifests that contradict themselves are not manifests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spark_schemas.manifest import LayerPlacement, PlacementManifest, TierBytes


def body() -> dict[str, Any]:
    layer = {
        "block": 0,
        "n_experts": 8,
        "top_k": 2,
        "slots": 4,
        "expert_bytes": 10,
        "prior": [0, 9, 65535, 9, 0, 0, 0, 1],
        "total_share": 1.0,
    }
    return {
        "schema_version": 1,
        "fingerprint": "mf1-" + "a" * 32,
        "sibling": "ms1-" + "b" * 32,
        "workload": "chat",
        "phase": "decode",
        "profile_revision": "0" * 64,
        "vram_budget_bytes": 200,
        "n_ctx": 16,
        "layers": [layer],
        "bytes": {
            "vram_core": 100,
            "vram_kv": 32,
            "vram_slots": 40,
            "vram_reserve": 0,
            "vram_total": 172,
            "host_experts": 80,
            "disk": 0,
        },
        "expected": None,
        "verdict": None,
        "verdict_reason": "no held-out sessions yet",
        "n_calibration": 3,
        "n_held_out": 0,
    }


def test_hot_set_is_the_order_of_the_prior() -> None:
    manifest = PlacementManifest.model_validate_json(json.dumps(body()))
    assert manifest.layers[0].hot_set == (2, 1, 3, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["layers"][0].update(slots=3), "expected at least 2 \\* top_k = 4"),
        (lambda b: b["layers"][0].update(slots=9), "expected at most n_experts = 8"),
        (lambda b: b["layers"][0].update(prior=[1] * 7), "7 prior scores"),
        (lambda b: b["layers"][0].update(prior=[65536, *[1] * 7]), "65535"),
        (lambda b: b["bytes"].update(vram_slots=50, vram_total=182), "expected the layers' sum 40"),
        (lambda b: b["bytes"].update(vram_total=171), "expected the sum of its parts, 172"),
        (lambda b: b.update(vram_budget_bytes=171), "over the budget of 171"),
        (lambda b: b.update(signature="x"), "signature"),
        (lambda b: b.update(expected={"policy": "static", "cold_hit_rate": 2.0}), "cold_hit_rate"),
        (lambda b: b.update(verdict="great"), "verdict"),
    ],
)
def test_contradictions_are_named(change: Callable[[dict[str, Any]], object], message: str) -> None:
    value = body()
    change(value)
    with pytest.raises(ValidationError, match=message):
        PlacementManifest.model_validate_json(json.dumps(value))


@given(st.lists(st.integers(0, 65535), min_size=4, max_size=12), st.integers(1, 2))
def test_hot_set_has_the_highest_scores(prior: list[int], top_k: int) -> None:
    slots = min(2 * top_k, len(prior))
    layer = LayerPlacement(
        block=0, n_experts=len(prior), top_k=top_k, slots=slots, expert_bytes=1, prior=tuple(prior), total_share=1.0
    )
    cold = set(range(len(prior))) - set(layer.hot_set)
    assert len(layer.hot_set) == slots
    assert all(prior[hot] >= prior[rest] for hot in layer.hot_set for rest in cold)


def test_tiers_add_up() -> None:
    with pytest.raises(ValidationError):
        TierBytes(vram_core=1, vram_kv=1, vram_slots=1, vram_reserve=1, vram_total=5, host_experts=0, disk=0)
