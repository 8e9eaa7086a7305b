"""LRU caches of every size at once, over many lanes: the stack of Mattson et al. 1970, kept as positions."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spark_runtime.simulator.lanes import Lanes

__all__ = ["Unit", "reuse_distances"]

IntArray = NDArray[np.int64]

Unit = Literal["token", "selection"]
"""What happens at once: all selections of a token, or each by itself."""


def reuse_distances(
    lanes: Lanes, n_experts: int, initial: IntArray | None = None, *, unit: Unit = "token"
) -> NDArray[np.uint16]:
    """How many experts were used more recently than each selection's: ``[token, k]``, lane after lane.

    ``n_experts`` for a first use. An LRU cache of C slots misses a selection when its distance is at least C. With
    ``unit="token"`` that is a cache which never evicts what the current token selected (C at least top-k, as in
    :class:`~spark_runtime.recency.RecencyOrder`); with ``"selection"`` one that takes the selections one by one and may
    evict what the same token is about to use. Caches start empty, or filled from ``initial[lane, expert]`` (all ids,
    hottest first). Lanes have one layer and calls of one token.
    """
    top_k = lanes.ids.shape[2]
    result = np.zeros((int(lanes.lengths.sum()), top_k), dtype=np.uint16)
    for chunk in lanes.chunks(n_experts):
        # Place of each expert in its lane's stack, 0 on top; of those never used the order does not matter.
        position = np.tile(np.arange(n_experts), (len(chunk), 1))
        used = np.full(position.shape, initial is not None)
        if initial is not None:
            position = np.argsort(initial[chunk], axis=1, kind="stable")
        for run in lanes.runs(chunk):
            ids = run.ids[:, 0, 0]
            at, seen = position[run.lanes], used[run.lanes]
            groups = [ids] if unit == "token" else [ids[:, place : place + 1] for place in range(top_k)]
            found = [_use(at, seen, group, n_experts) for group in groups]
            result[run.rows[:, 0]] = np.concatenate(found, axis=1)
    return result


def _use(position: IntArray, used: NDArray[np.bool_], ids: IntArray, n_experts: int) -> IntArray:
    """Move ``ids[lane, i]`` to the top, the first of them highest; return where they were."""
    before = np.take_along_axis(position, ids, axis=1)
    distances = np.where(np.take_along_axis(used, ids, axis=1), before, n_experts)
    # Everything moves down by the number of those that were below it.
    marks = np.zeros(position.shape, dtype=np.int64)
    np.put_along_axis(marks, before, 1, axis=1)
    below = ids.shape[1] - marks.cumsum(axis=1)
    position += np.take_along_axis(below, position, axis=1)
    np.put_along_axis(position, ids, np.arange(ids.shape[1])[None, :], axis=1)
    np.put_along_axis(used, ids, True, axis=1)
    return distances
