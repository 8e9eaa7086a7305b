"""Many caches with a trace each, stepped together: what all replays share.

A cache decides one call after the other, so a single trace leaves little for numpy to do at once. Sessions, layers and
settings are independent of each other: each combination is a *lane*, and all lanes take their next call together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lanes", "Run"]

IntArray = NDArray[np.int64]
_ENTRIES_AT_ONCE = 131072
"""Entries of the tables that are worked on together: few enough for a core's cache, many enough for numpy to pay."""


@dataclass(frozen=True, slots=True)
class Run:
    """Calls of the same size of neighbouring lanes, made together."""

    lanes: slice
    """Into the tables, whose lanes are in the order of :attr:`Lanes.order`."""
    ids: IntArray
    """``[lane, token, layer, k]``"""
    rows: IntArray
    """``[lane, token]``: where the results of these tokens go."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What each lane reads: ``ids[row, layer, k]``, from ``first_row[lane]`` on, in calls of ``calls[lane]`` tokens."""

    ids: NDArray[np.integer]
    first_row: IntArray
    calls: Sequence[IntArray]

    def __len__(self) -> int:
        return len(self.first_row)

    @property
    def lengths(self) -> IntArray:
        """Tokens of every lane."""
        return np.array([int(calls.sum()) for calls in self.calls], dtype=np.int64)

    @property
    def order(self) -> IntArray:
        """Lanes by their number of calls, most first, so that those still at work are neighbours."""
        return np.argsort([-len(calls) for calls in self.calls], kind="stable")

    def chunks(self, entries_per_lane: int) -> Iterator[IntArray]:
        """Lanes in :attr:`order`, so many at once that their tables stay in a core's cache."""
        size = max(64, _ENTRIES_AT_ONCE // entries_per_lane)
        order = self.order
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def runs(self, chunk: IntArray) -> Iterator[Run]:
        """All calls of a chunk's lanes, in the order of every lane; ``Run.lanes`` are places in the chunk."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])[:-1][chunk]
        first = self.first_row[chunk]
        n_calls = np.array([len(self.calls[lane]) for lane in chunk])
        done = np.zeros(len(chunk), dtype=np.int64)
        table = np.zeros((len(chunk), max(n_calls, default=0)), dtype=np.int64)
        for place, lane in enumerate(chunk):
            table[place, : n_calls[place]] = self.calls[lane]
        for step in range(table.shape[1]):
            active = int(np.searchsorted(-n_calls, -step, side="left"))
            sizes = table[:active, step]
            edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), active]
            for start, end in itertools.pairwise(edges):
                tokens = done[start:end, None] + np.arange(sizes[start])
                ids = self.ids[first[start:end, None] + tokens].astype(np.int64)
                yield Run(slice(start, end), ids, offsets[start:end, None] + tokens)
                done[start:end] += sizes[start]
