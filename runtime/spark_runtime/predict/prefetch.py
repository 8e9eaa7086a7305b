"""What fetching early saves: the slot policy's moving average with the best predictions fetched before the router runs.

Layers have slots of their own here. As in the closed loop nothing depends on a prediction but the time of a copy: what
was predicted wrongly took a slot from the lowest score, and what was missed is fetched as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.simulator.traces import Trace
from spark_runtime.tier_start import DECAY, PRIOR_TOKENS

__all__ = ["Prefetched", "replay_prefetch"]

IntArray = NDArray[np.int64]
_NEVER = np.float32(np.inf)


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Counts over all tokens and layers."""

    selections: int
    cold_hits: int
    """Selections that were neither in slots nor fetched early."""
    fetched_early: int

    @property
    def cold_hit_rate(self) -> float:
        """Of all selections."""
        return self.cold_hits / self.selections

    @property
    def moved_per_selection(self) -> float:
        """Experts copied, early or not, for each selection."""
        return (self.cold_hits + self.fetched_early) / self.selections


@dataclass(slots=True)
class _Slots:
    """One layer's slots in all sessions: ``[session, expert]`` each."""

    resident: NDArray[np.bool_]
    score: NDArray[np.float32]
    prior: NDArray[np.float32]

    def fetch(self, sessions: IntArray, experts: IntArray, stays: NDArray[np.bool_]) -> None:
        """One expert of each session takes the slot of the lowest score that neither :obj:`stays` nor is new."""
        value = self.score[sessions] + self.prior
        value[~self.resident[sessions] | stays[sessions]] = _NEVER
        self.resident[sessions, value.argmin(axis=1)] = False
        self.resident[sessions, experts] = True
        stays[sessions, experts] = True


def replay_prefetch(
    trace: Trace,
    slots: Sequence[int],
    frequency: Sequence[NDArray[np.float64]],
    predictions: Sequence[NDArray[np.floating] | None],
    n_early: int,
    *,
    decay: float = DECAY,
    prior_tokens: float = PRIOR_TOKENS,
) -> Prefetched:
    """Replay every session from a fresh start, ``n_early`` experts a layer and token at most fetched early.

    Of the ``2 * top_k`` best of ``predictions[layer][token, expert]`` those without a slot are fetched, best first;
    none of these leaves for another. ``None`` predicts nothing. Slots start with the profile's most frequent experts.
    Raises ``ValueError`` for fewer slots than ``2 * top_k`` (or all experts) in a layer.
    """
    cold = early = selections = 0
    for layer, count in enumerate(slots):
        needed = min(2 * trace.ids[layer].shape[1], trace.n_experts[layer])
        if not needed <= count <= trace.n_experts[layer]:
            raise ValueError(f"layer {layer}: {count} slots, expected {needed} to {trace.n_experts[layer]}")
        found = _replay_layer(trace, layer, count, frequency[layer], predictions[layer], n_early, decay, prior_tokens)
        cold, early = cold + found[0], early + found[1]
        selections += trace.ids[layer].size
    return Prefetched(selections, cold, early)


def _replay_layer(
    trace: Trace,
    layer: int,
    count: int,
    frequency: NDArray[np.float64],
    prediction: NDArray[np.floating] | None,
    n_early: int,
    decay: float,
    prior_tokens: float,
) -> tuple[int, int]:
    ids, n_experts = trace.ids[layer].astype(np.int64), trace.n_experts[layer]
    top_k = ids.shape[1]
    by_length = np.argsort(-trace.lengths, kind="stable")
    first, lengths = trace.offsets[:-1][by_length], trace.lengths[by_length]
    resident = np.zeros((len(first), n_experts), dtype=bool)
    resident[:, np.argsort(-frequency, kind="stable")[:count]] = True
    prior = (frequency * (top_k * prior_tokens)).astype(np.float32)
    table = _Slots(resident, np.zeros((len(first), n_experts), np.float32), prior)
    cold = early = 0
    n_candidates = min(2 * top_k, n_experts)
    for position in range(int(lengths.max(initial=0))):
        active = int(np.searchsorted(-lengths, -position, side="left"))
        rows = first[:active] + position
        if prediction is not None and n_early and count < n_experts:
            ranked = np.argsort(-prediction[rows], axis=1, kind="stable")[:, :n_candidates]
            early += _fetch_absent(table, ranked, n_early)
        selected = ids[rows]
        cold += _fetch_absent(table, selected, top_k)
        score = table.score[:active]
        score *= np.float32(decay)
        np.put_along_axis(score, selected, np.take_along_axis(score, selected, axis=1) + np.float32(1), axis=1)
    return cold, early


def _fetch_absent(table: _Slots, wanted: IntArray, most: int) -> int:
    """Fetch the first ``most`` of ``wanted[session, …]`` that have no slot; none of ``wanted`` leaves. How many."""
    absent = ~np.take_along_axis(table.resident[: len(wanted)], wanted, axis=1)
    absent &= np.cumsum(absent, axis=1) <= most
    if not absent.any():
        return 0
    stays = np.zeros((len(wanted), table.resident.shape[1]), dtype=bool)
    np.put_along_axis(stays, wanted, True, axis=1)
    for place in np.flatnonzero(absent.any(axis=0)):
        sessions = np.flatnonzero(absent[:, place])
        table.fetch(sessions, wanted[sessions, place], stays)
    return int(absent.sum())
