"""Placements tried on held-out sessions, all in one pass over them. Pure.

A trial is a placement at a memory budget. Its cold-hit rate on a session is a matter of adding up counts, so a pass
over a batch of sessions gives every trial's rates at once, and batches can be judged anywhere in any order: counts are
whole numbers below 2^53, which floats add exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.calibration.sessions import Sessions
from spark_runtime.placement import LayerSizes, greedy_slots, hot_set

__all__ = ["FloatArray", "Rates", "Trials", "first_experts", "joined", "placed_by"]

FloatArray = NDArray[np.float64]
Placement = Sequence[NDArray[np.int64]]
"""Resident expert ids of each layer."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Cold-hit rates of some sessions, ``[session, trial]`` each."""

    hashes: tuple[str, ...]
    static: FloatArray
    lru: FloatArray | None
    """``None`` in a phase without reuse distances."""
    spared: FloatArray
    """Share of a session's selections that are the first of an expert resident in each of the fresh placements."""


@dataclass(frozen=True, slots=True)
class Trials:
    """What is tried, as arrays that a worker needs and no more."""

    n_experts: tuple[int, ...]
    static: FloatArray
    """``[experts of all layers, placement]``: 1 where resident."""
    lru: FloatArray
    """``[distances of all layers, cache]``: 1 where a selection at that distance misses."""
    fresh: FloatArray
    """As ``static``: where a cache that starts with these experts would have been spared their first selections."""

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerSizes],
        static: Sequence[Placement],
        caches: Sequence[Sequence[int]],
        fresh: Sequence[Placement],
    ) -> Trials:
        """Trials of placements, and of caches with so many slots a layer."""
        n_experts = tuple(layer.n_experts for layer in layers)
        return cls(n_experts, _masks(n_experts, static), _tails(n_experts, caches), _masks(n_experts, fresh))

    def judge(self, sessions: Sessions) -> Rates:
        """Rates of every trial on every session."""
        counts = sessions.counts.astype(np.float64)
        totals = counts.sum(axis=1)[:, None]
        return Rates(
            sessions.hashes,
            1.0 - counts @ self.static / totals,
            None if sessions.reuse is None else sessions.reuse.astype(np.float64) @ self.lru / totals,
            (counts > 0).astype(np.float64) @ self.fresh / totals,
        )


def first_experts(slots: Sequence[int]) -> list[NDArray[np.int64]]:
    """The uniform placement: the first ids of each layer."""
    return [np.arange(count) for count in slots]


def placed_by(frequency: Sequence[FloatArray], layers: Sequence[LayerSizes], budget_bytes: int) -> Placement:
    """The hot set that a profile gives a budget."""
    return hot_set(frequency, greedy_slots(frequency, layers, budget_bytes))


def joined(several: Sequence[Rates]) -> Rates:
    """All rates of at least one batch, sorted by session hash, so that batches may come in any order."""
    hashes = [session_hash for rates in several for session_hash in rates.hashes]
    order = np.array(sorted(range(len(hashes)), key=hashes.__getitem__), dtype=np.intp)
    columns: Mapping[str, list[FloatArray | None]] = {
        name: [getattr(rates, name) for rates in several] for name in ("static", "lru", "spared")
    }

    def column(name: str) -> FloatArray | None:
        known = [part for part in columns[name] if part is not None]
        # A rate for some of the sessions would be a rate of other sessions.
        return np.concatenate(known)[order] if len(known) == len(several) else None

    static, spared = column("static"), column("spared")
    assert static is not None and spared is not None  # noqa: S101, PT018  every batch has them
    return Rates(tuple(hashes[index] for index in order), static, column("lru"), spared)


def _masks(n_experts: Sequence[int], placements: Sequence[Placement]) -> FloatArray:
    masks = np.zeros((len(placements), sum(n_experts)))
    for mask, placement in zip(masks, placements, strict=True):
        for layer, ids in zip(_views(mask, n_experts), placement, strict=True):
            layer[ids] = 1.0
    return np.ascontiguousarray(masks.T)


def _tails(n_experts: Sequence[int], caches: Sequence[Sequence[int]]) -> FloatArray:
    sizes = [size + 1 for size in n_experts]
    tails = np.zeros((len(caches), sum(sizes)))
    for tail, slots in zip(tails, caches, strict=True):
        for layer, count in zip(_views(tail, sizes), slots, strict=True):
            layer[count:] = 1.0
    return np.ascontiguousarray(tails.T)


def _views(values: FloatArray, sizes: Sequence[int]) -> list[FloatArray]:
    return np.split(values, np.cumsum(sizes)[:-1])
