from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_runtime.errors import ModelMismatchError
from spark_runtime.manifest_check import check_manifest
from spark_runtime.model_shape import read_model_shape
from spark_schemas.manifest import LayerPlacement, PlacementManifest, TierBytes
from spark_schemas.model import ModelShape


@pytest.fixture
def shape(demo_model: Path) -> ModelShape:
    return read_model_shape(demo_model)


@pytest.fixture
def manifest(shape: ModelShape) -> PlacementManifest:
    slots = sum(16 * layer.expert_bytes for layer in shape.layers)
    return PlacementManifest(
        fingerprint=shape.fingerprint,
        sibling=shape.sibling,
        workload="code-heavy",
        phase="decode",
        profile_revision="0" * 64,
        vram_budget_bytes=slots,
        n_ctx=256,
        layers=tuple(
            LayerPlacement(
                block=layer.block,
                n_experts=layer.n_experts,
                top_k=layer.top_k,
                slots=16,
                expert_bytes=layer.expert_bytes,
                prior=tuple(range(layer.n_experts)),
                total_share=1.0,
            )
            for layer in shape.layers
        ),
        bytes=TierBytes(
            vram_core=0, vram_kv=0, vram_slots=slots, vram_reserve=0, vram_total=slots, host_experts=0, disk=0
        ),
        expected=None,
        verdict=None,
        verdict_reason="",
        n_calibration=1,
        n_held_out=0,
    )


def test_manifest_of_this_model_is_accepted(shape: ModelShape, manifest: PlacementManifest) -> None:
    check_manifest(manifest, shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.model_copy(update={"fingerprint": "mf1-" + "0" * 32}), "another quantisation of this model"),
        (
            lambda m: m.model_copy(update={"fingerprint": "mf1-" + "0" * 32, "sibling": "ms1-" + "0" * 32}),
            "for another model",
        ),
        (lambda m: m.model_copy(update={"layers": m.layers[:-1]}), "has 3 layers with experts, the model 4"),
        (
            lambda m: m.model_copy(
                update={"layers": (m.layers[0].model_copy(update={"expert_bytes": 1}), *m.layers[1:])}
            ),
            "the manifest's layer",
        ),
    ],
)
def test_manifest_of_anything_else_is_refused(
    shape: ModelShape,
    manifest: PlacementManifest,
    change: Callable[[PlacementManifest], PlacementManifest],
    message: str,
) -> None:
    with pytest.raises(ModelMismatchError, match=message) as caught:
        check_manifest(change(manifest), shape)
    assert caught.value.exit_code == 3
    assert caught.value.hint
