"""How experts are fetched early: what the tiered runtime is told before it runs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spark_runtime.errors import TierError

__all__ = ["MAX_EARLY", "NO_EARLY_FETCH", "PREDICTED_ONE", "EarlyFetch"]

MAX_EARLY = 16
"""Experts of a layer and token (``native/slots.h``)."""
PREDICTED_ONE = 1 << 14
"""The native library's unit of a guess (``native/predictor.h``)."""
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class EarlyFetch:
    """What may be fetched before a layer's router has chosen, by what the layers before selected."""

    experts: int = 1
    """At most so many a layer and token: the budget of the link. 0 fetches, guesses and learns nothing. One fits beside
    a layer's computation on the cards that were measured."""
    threshold: float = 0.3
    """The least guess, about the chance of being selected, that is worth a copy."""
    learning: bool = True
    """Whether guesses are corrected by what was selected."""

    def __post_init__(self) -> None:
        """Raise :class:`TierError` for what makes no sense."""
        if not 0 <= self.experts <= MAX_EARLY:
            raise TierError(f"{self.experts} experts fetched early for a layer, expected 0 to {MAX_EARLY}")
        if math.isnan(self.threshold):
            raise TierError("the least guess to fetch by is no number")

    @property
    def threshold_units(self) -> int:
        """In the native library's units."""
        scaled = max(-_INT32_MAX, min(_INT32_MAX, self.threshold * PREDICTED_ONE))
        return round(scaled)


NO_EARLY_FETCH = EarlyFetch(experts=0)
