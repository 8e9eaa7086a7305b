"""Cache policies replayed over local token-level traces. Pure: numpy alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import expert_order
from spark_runtime.recency import RecencyOrder
from spark_runtime.simulator.lanes import Lanes
from spark_runtime.simulator.pools import PoolStarts, replay_pools

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
    frequent experts, or without a profile with the first. With ``decay`` 0 this is LRU. An expert that the current
    token selects never leaves. It decides as the runtime does for a layer with slots of its own, to the last bit.
    Raises ``ValueError`` for fewer slots than top-k.
    """
    top_k = ids.shape[1]
    prior = np.zeros(n_experts) if frequency is None else frequency * (top_k * prior_tokens)
    order = np.arange(n_experts) if frequency is None else expert_order(frequency)
    starts = PoolStarts(order[None, None], prior[None, None], np.array([[slots]]), np.array([[0]]))
    lanes = Lanes(ids[:, None], np.array([0]), [np.ones(len(ids), dtype=np.int64)])
    return int(replay_pools(lanes, starts, decay).cold.sum())
