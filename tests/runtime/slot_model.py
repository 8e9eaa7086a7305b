"""The slot policy once more, as plainly as it can be said: what the native one is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.recency import RecencyOrder
from spark_runtime.tier_start import LayerStart, TierStart

__all__ = ["LayerModel", "PoolModel"]

_STEP = 256
_COUNTS = ("tokens", "cold", "loads", "early", "early_used", "early_wasted")


@dataclass
class LayerModel:
    start: LayerStart
    slot_of: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    """Number of the layer's selections up to and with an expert's last one."""
    score: dict[int, np.float32] = field(default_factory=dict)
    clock: int = 0
    touched: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    """Fetched early and not selected since."""
    single: list[int] = field(default_factory=list)
    """What the step selected, if it is of one token."""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    distances: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = RecencyOrder(self.n_experts)
        self.selections = {phase: [0] * self.n_experts for phase in ("prefill", "decode")}
        self.counts = {phase: dict.fromkeys(_COUNTS, 0) for phase in ("prefill", "decode")}
        self.distances = [0] * (self.n_experts + 1)

    @property
    def n_experts(self) -> int:
        return len(self.start.order)

    @property
    def floor(self) -> int:
        return min(2 * self.start.top_k, self.n_experts)

    @property
    def pinned(self) -> set[int]:
        return {int(expert) for expert in self.start.order[: self.start.pinned]}


class PoolModel:
    """Decides expert by expert; scores have the 32 bits that the native ones have."""

    def __init__(self, start: TierStart, early: EarlyFetch = NO_EARLY_FETCH) -> None:
        self.early = early
        sizes = [len(layer.order) for layer in start.layers]
        self.weights = [
            np.zeros((sum(sizes[max(0, index - 2) : index]) + 1, size), dtype=np.int16)
            for index, size in enumerate(sizes)
        ]
        self.decay = float(np.float32(start.decay))
        self.layers = [LayerModel(layer) for layer in start.layers]
        free = iter(range(start.slots))
        for layer in self.layers:
            for expert in sorted(layer.start.order[: layer.start.slots].tolist()):
                layer.slot_of[expert] = next(free)

    def weight(self, age: int) -> np.float32:
        low, high = age % _STEP, min(age // _STEP, _STEP - 1)
        return np.float32(self.decay**low) * np.float32(self.decay ** (high * _STEP))

    def worth(self, layer: LayerModel, expert: int, *, to_come: bool) -> float:
        last = layer.last.get(expert, 0)
        age = (layer.clock + layer.start.top_k - last) // layer.start.top_k
        decayed = layer.score.get(expert, np.float32(0)) * self.weight(age)
        score = np.float32(layer.start.prior[expert]) + decayed
        return float(score) * (2 if to_come else 1)

    def ensure(self, index: int, ids: list[list[int]], phase: str) -> list[tuple[int, int]]:
        layer = self.layers[index]
        wanted = [expert for token in ids for expert in token]
        layer.counts[phase]["cold"] += sum(expert not in layer.slot_of for expert in wanted)
        layer.touched |= set(wanted)
        moves = []
        for expert in wanted:
            if expert in layer.slot_of:
                continue
            ranked = self.leaving(index, index)
            *_, place, leaving = min(each for each in ranked if not (each[3] == index and each[0]))
            moves.append((expert, self.hand_over(index, expert, place, leaving, phase)))
        layer.counts[phase]["loads"] += len(moves)
        return moves

    def leaving(self, index: int, current: int) -> list[tuple[bool, float, int, int, int]]:
        """What may leave for an expert of a layer, after a call has come to ``current``."""
        return [
            (
                leaving in other.touched,
                self.worth(other, leaving, to_come=place > current),
                other.last.get(leaving, 0),
                place,
                leaving,
            )
            for place, other in enumerate(self.layers)
            if place == index or len(other.slot_of) > other.floor
            for leaving in other.slot_of
            if leaving not in other.pinned
        ]

    def hand_over(self, index: int, expert: int, place: int, leaving: int, phase: str) -> int:
        owner = self.layers[place]
        slot = owner.slot_of.pop(leaving)
        self.layers[index].slot_of[expert] = slot
        owner.counts[phase]["early_wasted"] += leaving in owner.waiting
        owner.waiting.discard(leaving)
        return slot

    def guess(self, index: int) -> list[int]:
        return [sum(int(row[expert]) for row in self.rows(index)) for expert in range(self.layers[index].n_experts)]

    def rows(self, index: int) -> list[np.ndarray]:
        """Of a layer's weights, those that add up to its guess now."""
        found, start = [], 0
        for source in range(index - 1, max(-1, index - 3), -1):
            found += [self.weights[index][start + expert] for expert in self.layers[source].single]
            start += self.layers[source].n_experts
        return [*found, self.weights[index][start]]

    def fetch_early(self, index: int, ids: list[list[int]], phase: str) -> list[tuple[int, int]]:
        """For the layer after ``index``."""
        self.layers[index].single = ids[0] if len(ids) == 1 else []
        if len(ids) != 1 or index + 1 == len(self.layers):
            return []
        layer, scores = self.layers[index + 1], self.guess(index + 1)
        guessed = {expert for expert, score in enumerate(scores) if score >= self.early.threshold_units}
        moves = []
        for expert in sorted(guessed - layer.slot_of.keys(), key=lambda expert: (-scores[expert], expert)):
            ranked = [
                each
                for each in self.leaving(index + 1, index)
                if not each[0] and not (each[3] == index + 1 and each[4] in guessed)
            ]
            if not ranked or len(moves) == self.early.experts:
                break
            *_, place, leaving = min(ranked)
            moves.append((expert, self.hand_over(index + 1, expert, place, leaving, phase)))
            layer.waiting.add(expert)
        layer.counts[phase]["early"] += len(moves)
        return moves

    def learn(self) -> None:
        for index in range(1, len(self.layers)):
            layer = self.layers[index]
            if not layer.single or not self.layers[index - 1].single or not self.early.learning:
                continue
            share = 64
            while share < 2 * (2 * layer.start.top_k + 1):
                share *= 2
            for expert, score in enumerate(self.guess(index)):
                error = max(0, 2**14 - score) if expert in layer.single else min(0, -score)
                for row in self.rows(index):
                    row[expert] = max(-(2**15), min(2**15 - 1, int(row[expert]) + (error + share // 2) // share))

    def pass_by(self, index: int, ids: list[list[int]], phase: str) -> None:
        layer = self.layers[index]
        missing = [expert for token in ids for expert in token if expert not in layer.slot_of]
        layer.counts[phase]["cold"] += len(missing)
        layer.counts[phase]["loads"] += len(set(missing))

    def observe(self, index: int, ids: list[list[int]], phase: str) -> None:
        layer = self.layers[index]
        layer.counts[phase]["tokens"] += len(ids)
        if phase == "decode":
            for distance in layer.order.observe(np.array(ids)).ravel().tolist():
                layer.distances[distance] += 1
        for token in ids:
            layer.clock += len(token)
            for rank, expert in enumerate(token):
                layer.counts[phase]["early_used"] += expert in layer.waiting
                layer.waiting.discard(expert)
                layer.selections[phase][expert] += 1
                age = (layer.clock - layer.last.get(expert, 0)) // layer.start.top_k
                old = layer.score.get(expert, np.float32(0))
                layer.score[expert] = old * self.weight(age) + np.float32(1)
                layer.last[expert] = layer.clock - rank

    def end_step(self) -> None:
        for layer in self.layers:
            layer.touched.clear()
            layer.single = []
