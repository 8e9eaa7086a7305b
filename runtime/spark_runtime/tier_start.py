"""Where a model's experts start and how they move: what the tiered runtime is told before it runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import (
    expert_order,
    layer_sizes,
    residency_budget,
    uniform_slots,
)

if TYPE_CHECKING:
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.model import ModelShape

__all__ = [
    "LayerStart",
    "TierStart",
    "keeping",
    "manifest_frequency",
    "manifest_start",
    "profile_start",
    "slots_start",
    "uniform_start",
]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

DECAY = 0.97
"""Per token. 0.95 to 0.98 had the fewest cold hits on traces of three models."""
PRIOR_TOKENS = 2.0
"""Worth of a profile, in tokens; 1 to 3 had the fewest cold hits."""


@dataclass(frozen=True, slots=True)
class LayerStart:
    """One layer's start; the layers whose experts have the same tensors share their slots from then on."""

    block: int
    top_k: int
    slots: int
    order: IntArray
    """All expert ids, hottest first; the first ``slots`` start in video memory."""
    prior: FloatArray
    """The part of each expert's score that never changes, in selections, ``[n_experts]``."""
    pinned: int = 0
    """So many of the first of ``order`` never leave."""


@dataclass(frozen=True, slots=True)
class TierStart:
    """The whole model's start."""

    layers: tuple[LayerStart, ...]
    decay: float = DECAY
    """What a selection is worth one token later; 0 makes the policy LRU, 1 a count."""

    @property
    def slots(self) -> int:
        """Slots of all layers."""
        return sum(layer.slots for layer in self.layers)

    @property
    def is_usual_policy(self) -> bool:
        """Whether scores alone decide, with the usual decay, and nothing is pinned."""
        return self.decay == DECAY and not any(layer.pinned for layer in self.layers)


def profile_start(
    shape: ModelShape,
    frequency: Sequence[FloatArray],
    slots: Sequence[int],
    *,
    prior_tokens: float = PRIOR_TOKENS,
    decay: float = DECAY,
    pinned_share: float = 0.0,
) -> TierStart:
    """Start from expert frequencies, one array per MoE layer that sums to one.

    ``pinned_share`` of each layer's slots, as many as leave ``2 * top_k`` to the rest, hold its hottest experts for
    good.
    """
    layers = []
    for layer, freq, count in zip(shape.layers, frequency, slots, strict=True):
        layers.append(
            LayerStart(
                block=layer.block,
                top_k=layer.top_k,
                slots=count,
                order=expert_order(freq),
                prior=freq * (layer.top_k * prior_tokens),
                pinned=min(int(pinned_share * count), _movable(count, layer.n_experts, layer.top_k)),
            )
        )
    return TierStart(tuple(layers), decay)


def manifest_frequency(manifest: PlacementManifest) -> list[FloatArray]:
    """Expert frequencies behind a manifest's prior scores, one array per MoE layer that sums to one."""
    result = []
    for layer in manifest.layers:
        scores = np.asarray(layer.prior, dtype=np.float64)
        total = scores.sum()
        result.append(scores / total if total else np.full(len(scores), 1 / len(scores)))
    return result


def manifest_start(
    manifest: PlacementManifest,
    *,
    prior_tokens: float = PRIOR_TOKENS,
    decay: float = DECAY,
    pinned_share: float = 0.0,
) -> TierStart:
    """Start as a placement manifest says; check first that it is for this model (``manifest_check``)."""
    layers = []
    for layer in manifest.layers:
        scores = np.asarray(layer.prior, dtype=np.float64)
        total = scores.sum()
        freq = scores / total if total else scores
        layers.append(
            LayerStart(
                block=layer.block,
                top_k=layer.top_k,
                slots=layer.slots,
                order=expert_order(scores),
                prior=freq * (layer.top_k * prior_tokens),
                pinned=min(int(pinned_share * layer.slots), _movable(layer.slots, layer.n_experts, layer.top_k)),
            )
        )
    return TierStart(tuple(layers), decay)


def keeping(start: TierStart, resident: Sequence[IntArray]) -> TierStart:
    """The same priors with exactly what is resident now, hottest first: nothing is copied when it is placed.

    ``resident`` are the expert ids in slots, one array per MoE layer. As many stay pinned as ``start`` says, the
    hottest of those that are resident, and no more than leave ``2 * top_k`` slots to the rest.
    """
    layers = []
    for layer, here in zip(start.layers, resident, strict=True):
        is_here = np.zeros(len(layer.order), dtype=bool)
        is_here[here] = True
        order = np.concatenate([layer.order[is_here[layer.order]], layer.order[~is_here[layer.order]]])
        pinned = min(layer.pinned, _movable(len(here), len(order), layer.top_k))
        layers.append(LayerStart(layer.block, layer.top_k, len(here), order, layer.prior, pinned))
    return TierStart(tuple(layers), start.decay)


def _movable(slots: int, n_experts: int, top_k: int) -> int:
    """Slots of a layer beyond those that experts must be able to move through: so many may be pinned.

    A layer of which everything is resident has nothing to pin.
    """
    return slots - min(2 * top_k, slots) if slots < n_experts else 0


def slots_start(shape: ModelShape, slots: Sequence[int], *, decay: float = DECAY) -> TierStart:
    """Start without a profile: the first experts of every layer, no prior."""
    layers = tuple(
        LayerStart(layer.block, layer.top_k, count, np.arange(layer.n_experts), np.zeros(layer.n_experts))
        for layer, count in zip(shape.layers, slots, strict=True)
    )
    return TierStart(layers, decay)


def uniform_start(shape: ModelShape, residency: float, *, decay: float = DECAY) -> TierStart:
    """The same share of every layer's experts, never less than ``2 * top_k``, without a profile."""
    sizes = layer_sizes(shape)
    return slots_start(shape, uniform_slots(sizes, residency_budget(sizes, residency)), decay=decay)
