"""Experts fetched early in many lanes at once: which are, and what leaves for them, as ``native/slots.cpp`` decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spark_runtime.simulator.guesses import Guesses

if TYPE_CHECKING:
    from spark_runtime.simulator.pools import Keys

__all__ = ["EarlyCopies", "EarlyTable", "Guessed", "turns"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Guessed:
    """What may be fetched early."""

    experts: int
    """At most so many a layer and token."""
    guesses: Guesses
    """At or above the threshold, for every token of the lanes."""


@dataclass(frozen=True, slots=True)
class EarlyCopies:
    """Experts fetched early, ``[token, layer]`` each; those that wait at the end were neither used nor wasted."""

    fetched: NDArray[np.uint32]
    """For this token, beside the layer before."""
    used: NDArray[np.uint32]
    """Selected by this token, the first one since they were fetched."""
    wasted: NDArray[np.uint32]
    """Gone at this token, before anything selected them."""

    @classmethod
    def zeros(cls, shape: tuple[int, int]) -> EarlyCopies:
        """None at all."""
        return cls(*(np.zeros(shape, np.uint32) for _ in range(3)))


def turns(lanes: IntArray) -> IntArray:
    """Of rising numbers of lanes, for each how many of its own lane stand before it."""
    counts = np.bincount(lanes)
    found: IntArray = np.arange(len(lanes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return found


class EarlyTable:
    """What is fetched early in a chunk's lanes."""

    def __init__(self, guessed: Guessed, begins: IntArray, shape: tuple[int, ...]) -> None:
        """``begins`` are those of the guesses; ``shape`` is ``[lane, entry]``."""
        self._most, self._guesses, self._begins = guessed.experts, guessed.guesses, begins
        # Fetched early and not selected since.
        self._waiting = np.zeros(shape, dtype=np.bool_)

    def begin(self, keys: Keys, rows: IntArray) -> None:
        """A call of some lanes, whose first tokens have these rows."""
        self._now = self._waiting[keys.lanes].reshape(-1)
        self._counts = self._guesses.counts[rows].astype(np.int64)
        self._places = self._begins[rows]
        self._fetched = np.zeros(self._counts.shape, dtype=np.uint32)
        self._wasted = np.zeros(self._counts.shape, dtype=np.uint32)

    def fetch(self, keys: Keys, layer: int) -> None:
        """After the layer before has its experts: those of ``layer`` that are guessed best and have no slot."""
        counts = self._counts[:, layer, None]
        place = np.arange(int(counts.max(initial=0)))
        if not len(place):
            return
        guessed = place < counts
        experts = self._guesses.experts[np.where(guessed, self._places[:, layer, None] + place, 0)]
        of_layer = experts.astype(np.int64) + layer * (keys.key.shape[1] // self._counts.shape[1])
        entries = of_layer + keys.first
        absent = guessed & ~keys.resident.reshape(-1)[entries]
        lanes, places = np.nonzero(absent)
        if not len(lanes):
            return
        turn = turns(lanes)
        within = turn < self._most
        lanes, places, turn = lanes[within], places[within], turn[within]
        keys.spare_guessed(layer, entries[guessed])
        wanted = of_layer[lanes, places]
        for number in range(int(turn.max()) + 1):
            at = turn == number
            keys.replace(layer, lanes[at], wanted[at], layer - 1)
        keys.release(layer, entries[guessed])

    def moved(self, lanes: IntArray, owner: IntArray, leaving: IntArray) -> None:
        """An expert left in each of these lanes."""
        gone = self._now[leaving]
        if gone.any():
            self._wasted[lanes, owner] += gone
            self._now[leaving] = False

    def arrived(self, lanes: IntArray, layer: int, entries: IntArray) -> None:
        """An expert was fetched early in each of these lanes."""
        self._fetched[lanes, layer] += np.uint32(1)
        self._now[entries] = True

    def count(self, keys: Keys, entries: IntArray, rows: IntArray, made: EarlyCopies) -> None:
        """After a token of the call; what was fetched and wasted stands with the first one."""
        at = entries + keys.first
        made.used[rows] = self._now[at].reshape(*self._fetched.shape, -1).sum(axis=2)
        self._now[at] = False
        made.fetched[rows], made.wasted[rows] = self._fetched, self._wasted
        self._fetched, self._wasted = np.zeros_like(self._fetched), np.zeros_like(self._wasted)
