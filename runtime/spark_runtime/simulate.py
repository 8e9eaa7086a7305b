"""Cache policies replayed over local token-level traces. Pure: numpy alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spark_runtime.recency import RecencyOrder

__all__ = ["lru_cold_hits"]

IntArray = NDArray[np.int64]


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
