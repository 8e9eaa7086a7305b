"""What a layer was guessed to select before its router chose, for every token of a trace. Pure.

Guesses follow from the selections alone, not from what is in slots, so one replay of the predictor serves every policy
and every number of slots. The native library makes them (:mod:`spark_runtime.guess_replay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from spark_runtime.simulator.traces import LayerClass, Trace

__all__ = ["EarlyStart", "Guesser", "Guesses", "Weights"]

IntArray = NDArray[np.int64]
Weights = Sequence[NDArray[np.int16]]
"""Of each layer of a class, ``[row, expert]``, as :class:`spark_runtime.native_tier.LayerGuesses` has them."""

EarlyStart = Literal["none", "calibrated", "given"]
"""What guesses start from: nothing, what all calibration sessions teach one after the other, or what was passed."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """The experts of a class's layers that were guessed at a threshold or above, per token, lane after lane."""

    counts: NDArray[np.uint16]
    """``[token, layer]``; 0 for the first layer, and for tokens of calls of several, of which nothing is guessed."""
    experts: NDArray[np.uint16]
    """Token by token and layer by layer, the best guess first, then the lower number."""

    @property
    def begins(self) -> IntArray:
        """``[token, layer]``: where they begin in :attr:`experts`."""
        ends = np.cumsum(self.counts.ravel(), dtype=np.int64)
        return (ends - self.counts.ravel()).reshape(self.counts.shape)


class Guesser(Protocol):
    """Guesses and learns as the runtime does."""

    def guess(
        self,
        trace: Trace,
        of: LayerClass,
        calls: Sequence[IntArray],
        threshold_units: int,
        start: Weights | None,
        *,
        learning: bool,
    ) -> Guesses:
        """Of every session, each from ``start`` (``None``: nothing), learning on the way."""
        ...

    def learn(self, trace: Trace, of: LayerClass, calls: Sequence[IntArray], start: Weights | None) -> Weights:
        """What the sessions teach, one after the other."""
        ...
