"""Which known workload is nearest to traffic that has no profile of its own. Pure.

Near is what is measured: the cold-hit rate that a profile's hot set has on counts it was not made from. Profiles are
compared at one share of the experts' bytes, placed once and never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import LayerSizes, cold_hit_rates, greedy_slots, hot_set, residency_budget, shares
from spark_service.sessions import IntArray, Session, stack_counts

__all__ = ["NEAREST_RESIDENCY", "Judged", "MostGeneral", "most_general", "rank_profiles"]

FloatArray = NDArray[np.float64]

NEAREST_RESIDENCY = 0.6


@dataclass(frozen=True, slots=True)
class Judged:
    """A workload's frequencies ``[layer][expert]`` and the held-out sessions that judge others' by."""

    frequency: Sequence[FloatArray]
    held_out: Sequence[Session]


@dataclass(frozen=True, slots=True)
class MostGeneral:
    """The workload whose profile serves the others' held-out sessions best, and what it was measured on."""

    workload: str
    cold_hit_rate: float
    """Mean over the other workloads of the mean over their sessions: a busy workload is not worth more."""
    n_workloads: int
    n_sessions: int


def most_general(layers: Sequence[LayerSizes], known: Mapping[str, Judged]) -> MostGeneral | None:
    """Find the profile with the lowest cold-hit rate on the other workloads' held-out sessions; ties by name.

    ``None`` where no workload has held-out sessions of another to be measured on.
    """
    budget = residency_budget(layers, NEAREST_RESIDENCY)
    counts = {name: stack_counts(judged.held_out) for name, judged in known.items() if judged.held_out}
    found: MostGeneral | None = None
    for name in sorted(known):
        frequency = known[name].frequency
        resident = hot_set(frequency, greedy_slots(frequency, layers, budget))
        others = [other for other in sorted(counts) if other != name]
        if not others:
            continue
        rate = float(np.mean([cold_hit_rates(counts[other], resident).mean() for other in others]))
        if found is None or rate < found.cold_hit_rate:
            found = MostGeneral(name, rate, len(others), sum(len(known[other].held_out) for other in others))
    return found


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
