"""What changes for an agent when one placement manifest takes the place of another. Pure."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from spark_schemas.base import Schema
from spark_schemas.ids import MAX_COUNT, Fingerprint, Phase, Revision, Verdict
from spark_schemas.manifest import Expectation, LayerPlacement, PlacementManifest, TierBytes
from spark_schemas.mix import ProfileName

__all__ = ["LayerDiff", "ManifestDiff", "ManifestSide", "diff_manifests"]

_Rate = Annotated[float, Field(ge=0.0, le=1.0)]
_Change = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]


class ManifestSide(Schema):
    """One of the two manifests, without its layers."""

    workload: ProfileName
    phase: Phase
    profile_revision: Revision
    vram_budget_bytes: int
    n_ctx: int
    bytes: TierBytes
    expected: Expectation | None
    verdict: Verdict | None
    n_calibration: int
    n_held_out: int


class LayerDiff(Schema):
    """What changes in one block. Shares are of the block's selections, as the later manifest expects them."""

    block: Annotated[int, Field(ge=0)]
    slots_before: int
    slots_after: int
    entering: tuple[int, ...]
    """Expert ids that join the hot set, hottest first."""
    leaving: tuple[int, ...]
    """Expert ids that leave it, hottest first."""
    entering_share: _Rate
    leaving_share: _Rate
    frequency_shift: _Rate
    """Half the sum of absolute differences between the expected shares: 0 for the same, 1 for nothing in common."""


class ManifestDiff(Schema):
    """The difference between two manifests of one model. Totals weight each block by its selections per token."""

    fingerprint: Fingerprint
    before: ManifestSide
    after: ManifestSide
    layers: tuple[LayerDiff, ...]
    slots_change: int
    vram_bytes_change: _Change
    experts_entering: int
    experts_leaving: int
    entering_share: _Rate
    leaving_share: _Rate
    frequency_shift: _Rate
    expected_change: Annotated[float, Field(ge=-1.0, le=1.0)] | None
    """Expected cold-hit rate after minus before; ``None`` where either promises none. Below zero is better."""


def diff_manifests(before: PlacementManifest, after: PlacementManifest) -> ManifestDiff:
    """Compare two manifests of one model. Raises ``ValueError`` naming what makes them incomparable."""
    if before.fingerprint != after.fingerprint:
        raise ValueError(f"fingerprint: found {after.fingerprint}, expected {before.fingerprint} as in the first")
    shapes = [
        [(layer.block, layer.n_experts, layer.top_k, layer.expert_bytes) for layer in side.layers]
        for side in (before, after)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "layers: found other blocks, experts, top-k or bytes per expert, expected those of the first manifest"
        )
    layers = tuple(_layer_diff(*pair) for pair in zip(before.layers, after.layers, strict=True))
    weights = [layer.top_k for layer in after.layers]

    def overall(values: list[float]) -> float:
        weighted = math.fsum(value * weight for value, weight in zip(values, weights, strict=True))
        return _bounded(weighted / sum(weights))

    expected = None
    if before.expected is not None and after.expected is not None:
        expected = after.expected.cold_hit_rate - before.expected.cold_hit_rate
    return ManifestDiff(
        fingerprint=after.fingerprint,
        before=_side(before),
        after=_side(after),
        layers=layers,
        slots_change=sum(layer.slots_after - layer.slots_before for layer in layers),
        vram_bytes_change=after.bytes.vram_total - before.bytes.vram_total,
        experts_entering=sum(len(layer.entering) for layer in layers),
        experts_leaving=sum(len(layer.leaving) for layer in layers),
        entering_share=overall([layer.entering_share for layer in layers]),
        leaving_share=overall([layer.leaving_share for layer in layers]),
        frequency_shift=overall([layer.frequency_shift for layer in layers]),
        expected_change=expected,
    )


def _layer_diff(before: LayerPlacement, after: LayerPlacement) -> LayerDiff:
    old, new = _frequencies(before), _frequencies(after)
    was, now = before.hot_set, after.hot_set
    before_set, after_set = frozenset(was), frozenset(now)
    entering = tuple(expert for expert in now if expert not in before_set)
    leaving = tuple(expert for expert in was if expert not in after_set)
    return LayerDiff(
        block=after.block,
        slots_before=before.slots,
        slots_after=after.slots,
        entering=entering,
        leaving=leaving,
        entering_share=_bounded(math.fsum(new[expert] for expert in entering)),
        leaving_share=_bounded(math.fsum(new[expert] for expert in leaving)),
        frequency_shift=_bounded(math.fsum(abs(a - b) for a, b in zip(old, new, strict=True)) / 2),
    )


def _frequencies(layer: LayerPlacement) -> list[float]:
    """Shares that sum to one, from the prior alone; an equal share each where it says nothing."""
    total = sum(layer.prior)
    if not total:
        return [1 / layer.n_experts] * layer.n_experts
    return [score / total for score in layer.prior]


def _bounded(rate: float) -> float:
    return min(max(rate, 0.0), 1.0)


def _side(manifest: PlacementManifest) -> ManifestSide:
    return ManifestSide.model_validate({name: getattr(manifest, name) for name in ManifestSide.model_fields})
