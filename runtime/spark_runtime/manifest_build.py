"""From expert frequencies and slots to a placement manifest with its exact bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_schemas.ids import Phase, Verdict
from spark_schemas.manifest import PRIOR_SCALE, Expectation, LayerPlacement, PlacementManifest, TierBytes
from spark_schemas.model import ModelShape

__all__ = ["Basis", "assemble_manifest", "place_layers", "quantised_prior"]


@dataclass(frozen=True, slots=True)
class Basis:
    """What a manifest is made from: whose sessions, how many, and what they say of it."""

    workload: str
    phase: Phase
    revision: str
    n_calibration: int
    n_held_out: int
    verdict: Verdict | None
    verdict_reason: str


def quantised_prior(share: NDArray[np.float64]) -> tuple[int, ...]:
    """One layer's shares in steps of 1/65535 of the largest; only a share of zero becomes 0."""
    scaled = np.rint(share / share.max() * PRIOR_SCALE).astype(np.int64)
    return tuple(np.where(share > 0, np.maximum(scaled, 1), 0).tolist())


def place_layers(
    shape: ModelShape, frequency: Sequence[NDArray[np.float64]], slots: Sequence[int]
) -> tuple[LayerPlacement, ...]:
    """Every layer's slots and prior scores."""
    return tuple(
        LayerPlacement(
            block=layer.block,
            n_experts=layer.n_experts,
            top_k=layer.top_k,
            slots=count,
            expert_bytes=layer.expert_bytes,
            prior=prior,
            total_share=sum(prior) / PRIOR_SCALE,
        )
        for layer, count, prior in zip(shape.layers, slots, map(quantised_prior, frequency), strict=True)
    )


def assemble_manifest(
    shape: ModelShape,
    basis: Basis,
    layers: tuple[LayerPlacement, ...],
    expected: Expectation | None,
    *,
    n_ctx: int,
    reserve_bytes: int = 0,
    vram_bytes: int | None = None,
) -> PlacementManifest:
    """The manifest of placed layers; without ``vram_bytes`` its budget is exactly what it takes.

    Raises ``ValueError`` for layers that do not fit the budget.
    """
    kv_bytes = shape.context_bytes(n_ctx)
    slot_bytes = sum(layer.slots * layer.expert_bytes for layer in layers)
    total = shape.core_bytes + kv_bytes + reserve_bytes + slot_bytes
    return PlacementManifest(
        fingerprint=shape.fingerprint,
        sibling=shape.sibling,
        workload=basis.workload,
        phase=basis.phase,
        profile_revision=basis.revision,
        vram_budget_bytes=total if vram_bytes is None else vram_bytes,
        n_ctx=n_ctx,
        layers=layers,
        bytes=TierBytes(
            vram_core=shape.core_bytes,
            vram_kv=kv_bytes,
            vram_slots=slot_bytes,
            vram_reserve=reserve_bytes,
            vram_total=total,
            host_experts=shape.expert_bytes_total,
            disk=0,
        ),
        expected=expected,
        verdict=basis.verdict,
        verdict_reason=basis.verdict_reason,
        n_calibration=basis.n_calibration,
        n_held_out=basis.n_held_out,
    )
