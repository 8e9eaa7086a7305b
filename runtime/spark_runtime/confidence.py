"""How sure it is that an expert will be used: a profile's coverage curve, and tiers sized by it. Pure: numpy alone.

Experts of all layers are ranked by the selections that one byte of them covers; the curve is the share of all expected
selections that the first so many cover. Memory for the steep part buys much, memory for the flat part almost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import FloatArray, LayerSizes, expert_order, greedy_slots

__all__ = ["BANDS", "Band", "bands", "covering_slots", "slots_coverage"]

IntArray = NDArray[np.int64]
BANDS = (0.5, 0.8, 0.95, 0.99, 1.0)
"""Where one band of the curve ends and the next begins: shares of all expected selections."""


@dataclass(frozen=True, slots=True)
class Band:
    """Experts that are about as sure to be used as each other."""

    coverage: float
    """Share of the expected selections that this band and those above it cover, at most."""
    experts: int
    bytes: int
    in_slots: int
    """Of the experts, those that start in video memory."""
    least_per_token: float
    """The least expected selections of one of its experts for a token; 0 for an empty band."""


def _expected(frequency: Sequence[FloatArray], layers: Sequence[LayerSizes]) -> list[FloatArray]:
    """Selections of each expert for a token: frequencies sum to one in a layer, a token selects its top-k."""
    return [freq * layer.top_k for freq, layer in zip(frequency, layers, strict=True)]


def slots_coverage(frequency: Sequence[FloatArray], layers: Sequence[LayerSizes], slots: Sequence[int]) -> float:
    """Share of the expected selections whose expert is among so many of each layer's hottest."""
    expected = _expected(frequency, layers)
    kept = sum(float(np.sort(layer)[::-1][:count].sum()) for layer, count in zip(expected, slots, strict=True))
    total = sum(float(layer.sum()) for layer in expected)
    return kept / total if total else 1.0


def covering_slots(frequency: Sequence[FloatArray], layers: Sequence[LayerSizes], coverage: float) -> list[int]:
    """The fewest slots, a layer at least ``2 * top_k``, whose experts cover this share of the expected selections.

    Raises ``ValueError`` for a share outside of 0 to 1.
    """
    if not 0 <= coverage <= 1:
        raise ValueError(f"a coverage of {coverage:g}, expected 0 to 1")
    low, high = 0, sum(layer.n_experts * layer.expert_bytes for layer in layers)
    floor = sum(layer.floor_slots * layer.expert_bytes for layer in layers)

    def slots_of(budget: int) -> list[int]:
        return greedy_slots(frequency, layers, max(budget, floor))

    step = max(1, min(layer.expert_bytes for layer in layers))
    while high - low > step:
        middle = (low + high) // 2
        # Sums of shares may end a rounding below 1.
        if slots_coverage(frequency, layers, slots_of(middle)) >= coverage - 1e-12:
            high = middle
        else:
            low = middle
    return slots_of(high)


def bands(frequency: Sequence[FloatArray], layers: Sequence[LayerSizes], slots: Sequence[int]) -> list[Band]:
    """The coverage curve in :data:`BANDS`, the surest first; the first ``slots`` of each layer are in video memory."""
    expected = _expected(frequency, layers)
    value = np.concatenate(expected)
    size = np.concatenate([np.full(layer.n_experts, layer.expert_bytes) for layer in layers])
    rank = [np.argsort(expert_order(freq), kind="stable") for freq in frequency]
    resident = np.concatenate([places < count for places, count in zip(rank, slots, strict=True)])
    order = np.argsort(-value / size, kind="stable")
    total = float(value.sum())
    # What is covered before an expert decides its band, so that every band but an empty one reaches its end.
    before = (np.cumsum(value[order]) - value[order]) / total if total else np.zeros(len(order))
    found, last = [], 0
    for end in BANDS:
        first, last = last, len(order) if end == BANDS[-1] else int(np.searchsorted(before, end, side="left"))
        chosen = order[first:last]
        found.append(
            Band(
                coverage=end,
                experts=len(chosen),
                bytes=int(size[chosen].sum()),
                in_slots=int(resident[chosen].sum()),
                least_per_token=float(value[chosen].min()) if len(chosen) else 0.0,
            )
        )
    return found
