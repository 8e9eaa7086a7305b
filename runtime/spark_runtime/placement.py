"""From counts to frequencies to slots to an expected cold-hit rate. Pure: numpy alone.

Everything that the agent and the service both compute lives here once. Values per (layer, expert) are a list with one
1-D array per MoE layer, in block order, because layers may differ in their number of experts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spark_runtime.votes import Votes

if TYPE_CHECKING:
    from spark_schemas.model import ModelShape

__all__ = [
    "BudgetTooSmallError",
    "Interval",
    "LayerSizes",
    "bootstrap_interval",
    "bootstrap_intervals",
    "cold_hit_rates",
    "expert_order",
    "floor_bytes",
    "frequencies",
    "greedy_slots",
    "hot_set",
    "layer_sizes",
    "residency_budget",
    "session_totals",
    "shares",
    "stratified_intervals",
    "uniform_slots",
    "weighted_mean",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_RESAMPLED_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What placement needs to know of one MoE layer."""

    n_experts: int
    top_k: int
    expert_bytes: int

    @property
    def floor_slots(self) -> int:
        """Fewest slots: twice the selections of a token, so that a safe victim always exists."""
        return min(2 * self.top_k, self.n_experts)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the ends of its 95% interval."""

    mean: float
    low: float
    high: float


class BudgetTooSmallError(ValueError):
    """The budget does not hold the floor of ``2 * top_k`` slots in every layer."""

    def __init__(self, budget_bytes: int, needed_bytes: int) -> None:
        super().__init__(
            f"{budget_bytes} bytes for experts, expected at least {needed_bytes} (2 * top_k slots in every layer)"
        )
        self.budget_bytes = budget_bytes
        self.needed_bytes = needed_bytes


def layer_sizes(shape: ModelShape) -> tuple[LayerSizes, ...]:
    """The MoE layers of a model as placement sees them."""
    return tuple(LayerSizes(layer.n_experts, layer.top_k, layer.expert_bytes) for layer in shape.layers)


def shares(counts: Sequence[IntArray]) -> list[FloatArray]:
    """Each layer's counts as shares of its selections; a layer without selections gives zeros."""
    result: list[FloatArray] = []
    for layer in counts:
        total = int(layer.sum())
        result.append(layer / total if total else np.zeros(len(layer)))
    return result


def frequencies(sessions: Sequence[Sequence[IntArray]], tokens: Sequence[int]) -> list[FloatArray]:
    """A workload's expert frequencies: the mean of its sessions' shares plus a small uniform prior.

    ``sessions[s][l][e]`` are counts and ``tokens[s]`` the routed tokens behind them. Each session is one vote, smaller
    for short ones (:mod:`spark_runtime.votes`), so that one long session does not decide for a team. Every layer of the
    result is positive and sums to one. The order of sessions changes no bit. Raises ``ValueError`` without sessions.
    """
    if not sessions:
        raise ValueError("no sessions, expected at least one")
    counts = np.stack([np.concatenate(session) for session in sessions])
    sizes = [len(layer) for layer in sessions[0]]
    return Votes.of(sizes, counts, np.asarray(tokens, dtype=np.int64)).frequencies()


def expert_order(frequency: FloatArray) -> IntArray:
    """Expert ids of one layer from hottest to coldest; equal frequencies by lower id."""
    return np.argsort(-frequency, kind="stable")


def hot_set(frequency: Sequence[FloatArray], slots: Sequence[int]) -> list[IntArray]:
    """The ids resident in each layer, hottest first."""
    return [expert_order(layer)[:count] for layer, count in zip(frequency, slots, strict=True)]


def floor_bytes(layers: Sequence[LayerSizes]) -> int:
    """Bytes of the smallest placement."""
    return sum(layer.floor_slots * layer.expert_bytes for layer in layers)


def residency_budget(layers: Sequence[LayerSizes], residency: float) -> int:
    """Bytes of a share of all experts, but never less than the floor."""
    total = sum(layer.n_experts * layer.expert_bytes for layer in layers)
    return max(int(residency * total), floor_bytes(layers))


def greedy_slots(frequency: Sequence[FloatArray], layers: Sequence[LayerSizes], budget_bytes: int) -> list[int]:
    """Slots per layer that cover the most expected selections within the budget.

    The floor of every layer comes first; the rest goes to the largest frequency per byte. Within a layer that is the
    order of frequencies, so this is the greedy of the fractional knapsack: optimal up to one expert. A selection
    counts the same in every layer, weighted by the layer's top-k. Raises :class:`BudgetTooSmallError` under the floor.
    """
    slots = [layer.floor_slots for layer in layers]
    left = budget_bytes - floor_bytes(layers)
    if left < 0:
        raise BudgetTooSmallError(budget_bytes, budget_bytes - left)
    gains, owners = [], []
    for index, (layer, freq) in enumerate(zip(layers, frequency, strict=True)):
        ranked = np.sort(freq)[::-1][layer.floor_slots :]
        gains.append(ranked * (layer.top_k / layer.expert_bytes))
        owners.append(np.full(len(ranked), index))
    order = np.argsort(-np.concatenate(gains), kind="stable")
    for index in np.concatenate(owners)[order]:
        expert_bytes = layers[index].expert_bytes
        if expert_bytes <= left:
            slots[index] += 1
            left -= expert_bytes
    return slots


def uniform_slots(layers: Sequence[LayerSizes], budget_bytes: int) -> list[int]:
    """The same share of every layer within the budget, floors respected, what is left to the first layers."""
    slots = [layer.floor_slots for layer in layers]
    left = budget_bytes - floor_bytes(layers)
    if left < 0:
        raise BudgetTooSmallError(budget_bytes, budget_bytes - left)
    # One expert at a time to the layer with the smallest resident share: exact for any mix of sizes.
    open_layers = [
        (count / layer.n_experts, index) for index, (count, layer) in enumerate(zip(slots, layers, strict=True))
    ]
    heapq.heapify(open_layers)
    while open_layers:
        _, index = open_layers[0]
        layer = layers[index]
        if slots[index] == layer.n_experts or layer.expert_bytes > left:
            heapq.heappop(open_layers)
            continue
        slots[index] += 1
        left -= layer.expert_bytes
        heapq.heapreplace(open_layers, (slots[index] / layer.n_experts, index))
    return slots


def cold_hit_rates(counts: Sequence[IntArray], resident: Sequence[IntArray]) -> FloatArray:
    """Share of each session's selections whose expert is not resident in a placement that never changes.

    ``counts[layer][session, expert]`` are all sessions', ``resident[layer]`` expert ids; ``nan`` for a session without
    selections. Layers are added as Python integers, because legal counts may need more than 64 bits in sum.
    """
    covered = session_totals([layer[:, ids] for layer, ids in zip(counts, resident, strict=True)])
    return np.array(
        [1.0 - hits / total if total else np.nan for hits, total in zip(covered, session_totals(counts), strict=True)]
    )


def session_totals(counts: Sequence[IntArray]) -> list[int]:
    """Sum over layers and experts of ``counts[layer][session, expert]``, per session."""
    return [sum(of_layers) for of_layers in zip(*(layer.sum(axis=1).tolist() for layer in counts), strict=True)]


def bootstrap_interval(values: Sequence[float], *, seed: int = 0, resamples: int = 2000) -> Interval:
    """Mean of per-session values with a 95% percentile bootstrap interval over sessions: one column of the next."""
    return bootstrap_intervals(np.asarray(values, dtype=np.float64)[:, None], seed=seed, resamples=resamples)[0]


def bootstrap_intervals(values: FloatArray, *, seed: int = 0, resamples: int = 2000) -> list[Interval]:
    """Means of the columns of ``values[session, column]`` with 95% percentile bootstrap intervals (Efron 1979).

    Sessions are the unit, not tokens: tokens of one session are not independent. All columns share the resamples. One
    session gives no interval, so its ends are 0 and 1. Raises ``ValueError`` without sessions.
    """
    return stratified_intervals([values], [1], seed=seed, resamples=resamples)


def stratified_intervals(
    strata: Sequence[FloatArray], weights: Sequence[int], *, seed: int = 0, resamples: int = 2000
) -> list[Interval]:
    """:func:`bootstrap_intervals` of the weighted mean of the strata's means; of one stratum the same to the bit.

    Each stratum's sessions are averaged and resampled among themselves: how many each happens to have says nothing
    about its weight. Ends are 0 and 1 where any stratum has a single session. Raises ``ValueError`` where one has none.
    """
    if not all(len(values) for values in strata):
        raise ValueError("no values, expected at least one session")
    mean = weighted_mean([values.mean(axis=0) for values in strata], weights)
    if any(len(values) == 1 for values in strata):
        return [Interval(value, 0.0, 1.0) for value in mean.tolist()]
    rng = np.random.default_rng(seed)
    drawn_means = weighted_mean([_resampled_means(values, rng, resamples) for values in strata], weights)
    low, high = np.quantile(drawn_means, [0.025, 0.975], axis=0)
    return [Interval(*ends) for ends in zip(mean.tolist(), low.tolist(), high.tolist(), strict=True)]


def weighted_mean(values: Sequence[FloatArray], weights: Sequence[int]) -> FloatArray:
    """Mean of arrays of one shape, each worth its positive weight; of one alone with weight 1 the same to the bit."""
    first, *others = (weight * value for value, weight in zip(values, weights, strict=True))
    return np.asarray(sum(others, start=first) / sum(weights))


def _resampled_means(values: FloatArray, rng: np.random.Generator, resamples: int) -> FloatArray:
    """``[resample, column]``: means over as many sessions as there are, drawn with replacement."""
    n_sessions = len(values)
    # In blocks, so that many sessions need no more memory than few.
    block = max(1, _RESAMPLED_AT_ONCE // n_sessions)
    means = []
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        drawn = rng.integers(0, n_sessions, size=(size, n_sessions)) + n_sessions * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * n_sessions).reshape(size, n_sessions)
        means.append(times @ values / n_sessions)
    # Rounding must not put a mean of rates outside of them.
    return np.clip(np.concatenate(means), values.min(axis=0), values.max(axis=0))
