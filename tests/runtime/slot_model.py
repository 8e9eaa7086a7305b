"""The slot policy once more, as plainly as it can be said: what the native one is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from spark_runtime.recency import RecencyOrder
from spark_runtime.tier_start import LayerStart, TierStart

__all__ = ["LayerModel", "PoolModel"]

_STEP = 256


@dataclass
class LayerModel:
    start: LayerStart
    slot_of: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    """Number of the layer's selections up to and with an expert's last one."""
    score: dict[int, np.float32] = field(default_factory=dict)
    clock: int = 0
    touched: set[int] = field(default_factory=set)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    distances: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = RecencyOrder(self.n_experts)
        self.selections = {phase: [0] * self.n_experts for phase in ("prefill", "decode")}
        self.counts = {phase: {"tokens": 0, "cold": 0, "loads": 0} for phase in ("prefill", "decode")}
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

    def __init__(self, start: TierStart) -> None:
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
            ranked = [
                (
                    leaving in other.touched,
                    self.worth(other, leaving, to_come=place > index),
                    other.last.get(leaving, 0),
                    place,
                    leaving,
                )
                for place, other in enumerate(self.layers)
                if other is layer or len(other.slot_of) > other.floor
                for leaving in other.slot_of
                if leaving not in other.pinned and not (other is layer and leaving in layer.touched)
            ]
            *_, place, leaving = min(ranked)
            slot = self.layers[place].slot_of.pop(leaving)
            layer.slot_of[expert] = slot
            moves.append((expert, slot))
        layer.counts[phase]["loads"] += len(moves)
        return moves

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
                layer.selections[phase][expert] += 1
                age = (layer.clock - layer.last.get(expert, 0)) // layer.start.top_k
                old = layer.score.get(expert, np.float32(0))
                layer.score[expert] = old * self.weight(age) + np.float32(1)
                layer.last[expert] = layer.clock - rank

    def end_step(self) -> None:
        for layer in self.layers:
            layer.touched.clear()
