"""Recency order of a layer's experts: reuse distances, and through them every LRU cache size at once. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["RecencyOrder"]

IntArray = NDArray[np.int64]


class RecencyOrder:
    """Recency order of one layer's experts.

    This is the stack of Mattson et al. 1970, "Evaluation techniques for storage hierarchies". The reuse distance of a
    selection is the number of experts used more recently than it. An LRU cache of C slots, C at least top-k, holds
    exactly the C most recent experts, so it misses a selection when its distance is at least C.
    """

    def __init__(self, n_experts: int, initial: IntArray | None = None) -> None:
        """Start empty, or as if ``initial`` (all ids, hottest first) had been used from last to first."""
        self.n_experts = n_experts
        # Distinct values: larger is more recent; negative means never used.
        self._used = np.full(n_experts, -1, dtype=np.int64)
        self._clock = 0
        if initial is not None:
            self._used[initial[::-1]] = np.arange(len(initial))
            self._clock = len(initial)

    @property
    def stamps(self) -> NDArray[np.uint32]:
        """The order as numbers from 1 on, later ones larger; 0 for experts never used."""
        stamps = np.zeros(self.n_experts, dtype=np.uint32)
        if not self._clock:
            return stamps  # a new session, whose first token waits for this of every layer
        used = np.flatnonzero(self._used >= 0)
        stamps[used[np.argsort(self._used[used])]] = np.arange(1, len(used) + 1)
        return stamps

    @stamps.setter
    def stamps(self, stamps: NDArray[np.uint32]) -> None:
        self._used = stamps.astype(np.int64) - 1
        self._clock = int(stamps.max(initial=0))

    def observe(self, ids: IntArray) -> IntArray:
        """Take selections ``ids[token, k]`` in order; return their distances, ``n_experts`` for a first use.

        The selections of one token happen at once: they are all measured before any of them moves to the front.
        """
        distances = np.empty(ids.shape, dtype=np.int64)
        used = self._used
        top_k = ids.shape[1]
        # The router's first choice becomes the most recent of its token.
        offsets = np.arange(top_k - 1, -1, -1)
        for token, row in enumerate(ids):
            last = used[row]
            distances[token] = (used[None, :] > last[:, None]).sum(axis=1)
            distances[token][last < 0] = self.n_experts
            used[row] = self._clock + offsets
            self._clock += top_k
        return distances
