"""A profile's frequencies as a picture of layers and experts, small enough to be fetched, and one layer in full. Pure.

A share is told as how many times the even share of its layer it is. On a scale of ratios one byte keeps it to a few
percent over the whole range, from the hottest expert to those that were never seen.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from spark_runtime.calibration.evaluation import VERDICT_RESIDENCY
from spark_runtime.placement import FloatArray, greedy_slots, hot_set, layer_sizes, residency_budget
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile

__all__ = ["LEVELS", "Expert", "HeatMap", "LayerRow", "LayerView", "heat_map", "layer_rows", "layer_view", "shares_of"]

LEVELS = 255
"""The highest level; 0 is everything below the range."""
RANGE_OCTAVES = 16
"""From the hottest expert down; what is colder than that is level 0."""


class HeatMap(BaseModel):
    """Levels of all experts, one layer after the other: what the canvas draws."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    revision: str
    blocks: tuple[int, ...]
    n_experts: tuple[int, ...]
    low_log2: float
    """Of a share over its layer's even share, at level 1."""
    high_log2: float
    """At level 255; levels between are evenly spaced."""
    levels: str
    """Base64 of one byte an expert."""
    residency: float
    """Share of the experts' bytes that the hot set is of."""
    resident: str
    """Base64 of one bit an expert, the first in the highest bit: whether it is in the hot set."""


class LayerRow(BaseModel):
    """One layer in a line."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    block: int
    n_experts: int
    top_k: int
    expert_bytes: int
    slots: int
    """Experts in video memory with the residency of the heat map."""
    covered: float
    """Expected share of the layer's selections that those are."""
    for_half: int
    """Hottest experts that half of the selections go to."""


class Expert(BaseModel):
    """One expert of a layer."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    expert: int
    share: float
    """Expected share of the layer's selections."""
    times_even: float
    """How many times the share that every expert would have were all alike."""
    selections: int
    """Counted over the calibration sessions, however long each was."""
    resident: bool


class LayerView(BaseModel):
    """One layer in full, hottest expert first."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    fingerprint: str
    model_name: str | None
    workload: str
    phase: str
    revision: str
    n_calibration: int
    residency: float
    layer: LayerRow
    blocks: tuple[int, ...]
    """All layers that there are."""
    experts: tuple[Expert, ...]


def shares_of(profile: Profile) -> list[FloatArray]:
    """Expected shares, one array a layer."""
    return [np.array(layer.shares, dtype=np.float64) for layer in profile.layers]


def heat_map(profile: Profile, shape: ModelShape) -> HeatMap:
    """The picture of a profile, which must be of this model."""
    shares = shares_of(profile)
    even = np.concatenate([layer * len(layer) for layer in shares])
    levels, low, high = _levels(even)
    resident = np.concatenate([_mask(len(layer), ids) for layer, ids in zip(shares, _hot(shares, shape), strict=True)])
    return HeatMap(
        revision=profile.revision,
        blocks=tuple(layer.block for layer in profile.layers),
        n_experts=tuple(len(layer) for layer in shares),
        low_log2=low,
        high_log2=high,
        levels=base64.b64encode(levels.tobytes()).decode(),
        residency=VERDICT_RESIDENCY,
        resident=base64.b64encode(np.packbits(resident).tobytes()).decode(),
    )


def layer_rows(profile: Profile, shape: ModelShape) -> tuple[LayerRow, ...]:
    """Every layer in a line."""
    shares = shares_of(profile)
    return tuple(
        LayerRow(
            block=layer.block,
            n_experts=layer.n_experts,
            top_k=layer.top_k,
            expert_bytes=layer.expert_bytes,
            slots=len(ids),
            covered=min(1.0, float(share[ids].sum())),
            for_half=min(len(share), int(np.searchsorted(np.sort(share)[::-1].cumsum(), 0.5 * share.sum())) + 1),
        )
        for layer, share, ids in zip(shape.layers, shares, _hot(shares, shape), strict=True)
    )


def layer_view(profile: Profile, shape: ModelShape, block: int) -> LayerView | None:
    """One layer in full; ``None`` for a block without experts."""
    blocks = tuple(layer.block for layer in profile.layers)
    if block not in blocks:
        return None
    index = blocks.index(block)
    shares = shares_of(profile)
    share, selections = shares[index], profile.layers[index].selections
    row = layer_rows(profile, shape)[index]
    resident = set(_hot(shares, shape)[index].tolist())
    order = np.argsort(-share, kind="stable").tolist()
    return LayerView(
        fingerprint=profile.fingerprint,
        model_name=shape.name,
        workload=profile.workload,
        phase=profile.phase,
        revision=profile.revision,
        n_calibration=profile.n_calibration,
        residency=VERDICT_RESIDENCY,
        layer=row,
        blocks=blocks,
        experts=tuple(
            Expert(
                expert=expert,
                share=float(share[expert]),
                times_even=float(share[expert]) * len(share),
                selections=selections[expert],
                resident=expert in resident,
            )
            for expert in order
        ),
    )


def _hot(shares: Sequence[FloatArray], shape: ModelShape) -> list[NDArray[np.int64]]:
    sizes = layer_sizes(shape)
    return hot_set(shares, greedy_slots(shares, sizes, residency_budget(sizes, VERDICT_RESIDENCY)))


def _mask(length: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(length, dtype=bool)
    mask[ids] = True
    return mask


def _levels(even: FloatArray) -> tuple[NDArray[np.uint8], float, float]:
    """Levels of ratios from 0 on, and the base-2 logarithms of the ratios at levels 1 and 255."""
    seen = even[even > 0]
    if not len(seen):
        return np.zeros(len(even), dtype=np.uint8), 0.0, 0.0
    high = float(np.log2(seen.max()))
    low = max(float(np.log2(seen.min())), high - RANGE_OCTAVES)
    step = (high - low) / (LEVELS - 1)
    with np.errstate(divide="ignore"):
        logs = np.log2(even)
    levels = np.rint((logs - low) / step) + 1 if step else np.full(len(even), float(LEVELS))
    levels = np.where(logs < low - step / 2, 0.0, np.clip(levels, 1, LEVELS))
    return np.where(even > 0, levels, 0.0).astype(np.uint8), low, high
