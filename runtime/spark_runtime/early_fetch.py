"""How experts are fetched early: what the tiered runtime is told before it runs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spark_runtime.errors import TierError

__all__ = ["MAX_EARLY", "NO_EARLY_FETCH", "PREDICTED_ONE", "EarlyFetch", "LinkBudget"]

MAX_EARLY = 16
"""Experts of a layer and token (``native/slots.h``)."""
PREDICTED_ONE = 1 << 14
"""The native library's unit of a guess (``native/predictor.h``)."""
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class EarlyFetch:
    """What may be fetched before a layer's router has chosen, by what the layers before selected."""

    experts: int = 1
    """At most so many a layer and token, see :class:`LinkBudget`. 0 fetches, guesses and learns nothing."""
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


@dataclass(frozen=True, slots=True)
class LinkBudget:
    """What the link to host memory carries while one layer of a token computes: copies beyond it are waited for."""

    expert_bytes: float
    """Mean bytes of a selected expert."""
    link_bytes_per_s: float
    """Of large copies from locked memory."""
    computing_s: float
    """From a layer having its experts to the next one needing its own."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for figures that no machine has."""
        if not all(0 < value < math.inf for value in (self.expert_bytes, self.link_bytes_per_s, self.computing_s)):
            raise ValueError(f"{self}: expected numbers above 0")

    @property
    def bytes(self) -> float:
        """Most bytes that are copied for nothing: those of one layer's computation."""
        return self.link_bytes_per_s * self.computing_s

    @property
    def copy_s(self) -> float:
        """Of one expert."""
        return self.expert_bytes / self.link_bytes_per_s

    @property
    def experts(self) -> int:
        """Whole experts within it, at most :data:`MAX_EARLY`."""
        return min(MAX_EARLY, math.floor(min(self.bytes / self.expert_bytes, MAX_EARLY)))
