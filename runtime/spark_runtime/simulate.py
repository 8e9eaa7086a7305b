"""Cache policies replayed over local token-level traces. Pure: numpy alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import expert_order
from spark_runtime.recency import RecencyOrder

__all__ = ["lru_cold_hits", "scored_cold_hits"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def lru_cold_hits(
    ids: IntArray, n_experts: int, slots: Sequence[int], hottest_first: IntArray | None = None
) -> list[int]:
    """Cold hits of one layer under LRU for every slot count in ``slots``, from one pass over ``ids[token, k]``.

    The cache starts empty, or filled with the first ``slots`` of ``hottest_first`` (all expert ids). Slot counts below
    top-k are refused with ``ValueError``: such a cache cannot hold one token's experts.
    """
    top_k = ids.shape[1]
    if min(slots) < top_k:
        raise ValueError(f"{min(slots)} slots, expected at least top_k = {top_k}")
    distances = RecencyOrder(n_experts, hottest_first).observe(ids)
    # distances[d] selections at distance d; all beyond the cache are misses.
    histogram = np.bincount(distances.ravel(), minlength=n_experts + 1)
    beyond = histogram[::-1].cumsum()[::-1]
    return [int(beyond[min(count, n_experts)]) for count in slots]


def scored_cold_hits(
    ids: IntArray,
    n_experts: int,
    slots: int,
    frequency: FloatArray | None = None,
    *,
    decay: float = 0.97,
    prior_tokens: float = 2.0,
) -> int:
    """Cold hits of one layer, ``ids[token, k]``, when the lowest score leaves a full cache.

    An expert's score is its selections, each worth ``decay ** age`` (age in tokens), plus what ``prior_tokens`` tokens
    of a workload with this ``frequency`` (a share per expert) would have selected. The cache starts with the most
    frequent experts, or without a profile with the first. Towards ``decay`` 0 this is LRU. An expert that the current
    token selects never leaves. Raises ``ValueError`` for fewer slots than top-k.
    """
    top_k = ids.shape[1]
    if slots < top_k:
        raise ValueError(f"{slots} slots, expected at least top_k = {top_k}")
    prior = np.zeros(n_experts) if frequency is None else frequency * (top_k * prior_tokens)
    resident = np.zeros(n_experts, dtype=bool)
    resident[(np.arange(n_experts) if frequency is None else expert_order(frequency))[:slots]] = True
    score = np.zeros(n_experts)
    cold = 0
    for row in ids:
        score *= decay
        missing = row[~resident[row]]
        if len(missing):
            cold += len(missing)
            ranked = np.where(resident, score + prior, np.inf)
            ranked[row] = np.inf
            resident[np.argsort(ranked, kind="stable")[: len(missing)]] = False
            resident[missing] = True
        score[row] += 1.0
    return cold
