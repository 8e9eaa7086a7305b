"""Policies judged from counts and reuse distances alone: exact for static placement and, started empty, for LRU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import cold_hit_rates, expert_order, session_totals
from spark_runtime.simulator.policies import Frequency

__all__ = ["SessionCounts", "count_rates", "lru_rates"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """One session's counts in one phase."""

    counts: list[IntArray]
    """Per layer a number of selections for every expert."""
    distances: list[IntArray] | None
    """Per layer ``n_experts + 1`` counts: selections by reuse distance, the last first uses; decode only."""
    tokens: int


def count_rates(
    sessions: Sequence[SessionCounts], slots: Sequence[int], profiles: Sequence[Frequency | None]
) -> FloatArray:
    """Cold-hit rate of each session with its profile's hottest experts resident for good, ``[session]``.

    ``None`` keeps the first experts.
    """
    rates = []
    for session, profile in zip(sessions, profiles, strict=True):
        resident = [
            np.arange(count) if profile is None else expert_order(profile[layer])[:count]
            for layer, count in enumerate(slots)
        ]
        rates.append(float(cold_hit_rates([counts[None] for counts in session.counts], resident)[0]))
    return np.array(rates)


def lru_rates(sessions: Sequence[SessionCounts], slots: Sequence[int]) -> FloatArray:
    """Cold-hit rate of each session under LRU with slots of each layer's own, started empty, ``[session]``.

    Raises ``ValueError`` for a session without distances.
    """
    rates = []
    for session in sessions:
        if session.distances is None:
            raise ValueError("a session without reuse distances")
        cold = sum(int(layer[count:].sum()) for layer, count in zip(session.distances, slots, strict=True))
        [total] = session_totals([layer[None] for layer in session.distances])
        rates.append(cold / total if total else np.nan)
    return np.array(rates)
