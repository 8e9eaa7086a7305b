"""The offline optimum: what no cache can beat that must hold every expert it uses.

Of the experts that a call does not select, the one whose next use is farthest leaves (Belady 1966). All selections of
a token of a layer are needed at once; each keeps its slot until its own next use or not at all, which is a packing of
intervals under a constant capacity, so the farthest next use stays optimal. A test compares it with every choice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spark_runtime.simulator.lanes import Lanes

__all__ = ["optimal_cold_hits"]

IntArray = NDArray[np.int64]
_NEVER = np.iinfo(np.int32).max


def optimal_cold_hits(lanes: Lanes, resident: NDArray[np.bool_], n_experts: int) -> NDArray[np.uint32]:
    """Cold hits per token and layer, ``[token, layer]``, lane after lane.

    ``resident[lane, layer, expert]`` are the experts that start in slots; a lane's slots are as many, shared by its
    layers without a floor. Calls have one token. Raises ``ValueError`` for a lane of fewer slots than top-k.
    """
    n_layers, top_k = lanes.ids.shape[1:]
    slots = resident.sum(axis=(1, 2))
    if len(slots) and slots.min() < top_k:
        raise ValueError(f"{slots.min()} slots, expected at least top_k = {top_k}")
    n_entries = n_layers * n_experts
    result = np.zeros((int(lanes.lengths.sum()), n_layers), dtype=np.uint32)
    first = np.arange(n_layers) * n_experts
    for chunk in lanes.chunks(n_entries):
        runs = list(lanes.runs(chunk))
        later = _next_uses(lanes, chunk, n_experts)
        # Of a resident expert the step of its next use, of others -1: the largest leaves.
        upcoming = np.full((len(chunk), n_entries), _NEVER, dtype=np.int32)
        for place, lane in enumerate(chunk):
            _first_uses(upcoming[place], lanes, int(lane), first)
        here = resident[chunk].reshape(len(chunk), n_entries)
        keys = np.where(here, upcoming, -1)
        for step, run in enumerate(runs):
            part = keys[run.lanes]
            for layer in range(n_layers):
                entries = run.ids[:, 0, layer] + first[layer]
                missing = np.take_along_axis(part, entries, axis=1) < 0
                result[run.rows[:, 0], layer] = missing.sum(axis=1)
                np.put_along_axis(part, entries, -1, axis=1)
                _evict(part, missing.sum(axis=1))
                np.put_along_axis(part, entries, later[run.lanes, step, layer], axis=1)
    return result


def _evict(keys: NDArray[np.int32], counts: IntArray) -> None:
    for number in range(int(counts.max(initial=0))):
        lanes = np.flatnonzero(counts > number)
        keys[lanes, keys[lanes].argmax(axis=1)] = -1


def _next_uses(lanes: Lanes, chunk: IntArray, n_experts: int) -> NDArray[np.int32]:
    """``[lane, token, layer, k]``: the step, counted in layers, in which a selection's expert is used again."""
    n_layers, top_k = lanes.ids.shape[1:]
    longest = max((int(lanes.calls[lane].sum()) for lane in chunk), default=0)
    result = np.full((len(chunk), longest, n_layers, top_k), _NEVER, dtype=np.int32)
    for place, lane in enumerate(chunk):
        length = int(lanes.calls[lane].sum())
        start = int(lanes.first_row[lane])
        ids = lanes.ids[start : start + length].astype(np.int64) + (np.arange(n_layers) * n_experts)[:, None]
        flat = ids.ravel()
        order = np.argsort(flat, kind="stable")
        step = order // top_k
        same = flat[order[1:]] == flat[order[:-1]]
        uses = np.full(len(flat), _NEVER, dtype=np.int64)
        uses[order[:-1][same]] = step[1:][same]
        result[place, :length] = uses.reshape(length, n_layers, top_k)
    return result


def _first_uses(upcoming: NDArray[np.int32], lanes: Lanes, lane: int, first: IntArray) -> None:
    start, length = int(lanes.first_row[lane]), int(lanes.calls[lane].sum())
    _n_layers, top_k = lanes.ids.shape[1:]
    flat = (lanes.ids[start : start + length].astype(np.int64) + first[:, None]).ravel()
    entries, where = np.unique(flat, return_index=True)
    upcoming[entries] = where // top_k
