"""Whether a placement manifest is for the model at hand."""

from __future__ import annotations

from spark_runtime.errors import ModelMismatchError
from spark_schemas.manifest import PlacementManifest
from spark_schemas.model import ModelShape

__all__ = ["check_manifest"]


def check_manifest(manifest: PlacementManifest, shape: ModelShape) -> None:
    """Refuse a manifest of another model; raise :class:`ModelMismatchError` naming both sides."""
    if manifest.fingerprint == shape.fingerprint:
        _check_layers(manifest, shape)
        return
    if manifest.sibling == shape.sibling:
        raise ModelMismatchError(
            f"the manifest is for another quantisation of this model: it is for {manifest.fingerprint}, "
            f"this file is {shape.fingerprint}",
            f"pull one for this file: spark pull-profile {manifest.workload} --model FILE",
        )
    raise ModelMismatchError(
        f"the manifest is for another model: {manifest.fingerprint}, this file is {shape.fingerprint}",
        f"pull one for this model: spark pull-profile {manifest.workload} --model FILE",
    )


def _check_layers(manifest: PlacementManifest, shape: ModelShape) -> None:
    for placed, layer in zip(manifest.layers, shape.layers, strict=False):
        found = (placed.block, placed.n_experts, placed.top_k, placed.expert_bytes)
        expected = (layer.block, layer.n_experts, layer.top_k, layer.expert_bytes)
        if found != expected:
            raise ModelMismatchError(
                f"the manifest's layer (block, experts, top-k, bytes) is {found}, the model's is {expected}",
                "the manifest was altered or damaged: pull it again",
            )
    if len(manifest.layers) != len(shape.layers):
        raise ModelMismatchError(
            f"the manifest has {len(manifest.layers)} layers with experts, the model {len(shape.layers)}",
            "the manifest was altered or damaged: pull it again",
        )
