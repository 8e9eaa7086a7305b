"""Which known workload is nearest to traffic that has no profile of its own. Pure.

Near is what is measured: the cold-hit rate that a profile's hot set has on counts it was not made from. Profiles are
compared at one share of the experts' bytes, placed once and never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.calibration.sessions import IntArray
from spark_runtime.placement import LayerSizes, cold_hit_rates, greedy_slots, hot_set, residency_budget, shares
from spark_schemas.profile import Profile

__all__ = ["NEAREST_RESIDENCY", "MostGeneral", "most_general", "rank_profiles"]

FloatArray = NDArray[np.float64]

NEAREST_RESIDENCY = 0.6
"""One of the residencies that profiles are evaluated at."""


@dataclass(frozen=True, slots=True)
class MostGeneral:
    """The workload whose profile serves the others' held-out sessions best, and what it was measured on."""

    workload: str
    cold_hit_rate: float
    """Mean over the other workloads of the mean over their sessions: a busy workload is not worth more."""
    n_workloads: int
    n_sessions: int


def most_general(known: Mapping[str, Profile]) -> MostGeneral | None:
    """Find the profile with the lowest cold-hit rate on the other workloads' held-out sessions; ties by name.

    Each profile says how the others would do on its held-out sessions. ``None`` where none has any to say it of.
    """
    rates: dict[str, list[float]] = {}
    for profile in known.values():
        for row in profile.mismatch:
            if row.residency == NEAREST_RESIDENCY and row.workload in known:
                rates.setdefault(row.workload, []).append(row.cold_hit_rate)
    if not rates:
        return None
    name = min(sorted(rates), key=lambda one: float(np.mean(rates[one])))
    judges = [profile for profile in known.values() if any(row.workload == name for row in profile.mismatch)]
    return MostGeneral(name, float(np.mean(rates[name])), len(judges), sum(one.n_held_out for one in judges))


def rank_profiles(
    layers: Sequence[LayerSizes], frequencies: Mapping[str, Sequence[FloatArray]], counts: Sequence[IntArray]
) -> tuple[list[tuple[str, float]], float]:
    """Cold-hit rate of every profile on one session's ``counts[layer][expert]``, lowest first, ties by name.

    The second value is the rate of the best static placement for exactly these counts. Raises ``ValueError`` for counts
    without a selection.
    """
    if not any(layer.any() for layer in counts):
        raise ValueError("no selections, expected at least one")
    budget = residency_budget(layers, NEAREST_RESIDENCY)
    stacked = [layer[np.newaxis, :] for layer in counts]

    def rate(frequency: Sequence[FloatArray]) -> float:
        return float(cold_hit_rates(stacked, hot_set(frequency, greedy_slots(frequency, layers, budget)))[0])

    ranked = sorted(((name, rate(frequency)) for name, frequency in frequencies.items()), key=lambda one: one[::-1])
    return ranked, rate(shares(counts))
