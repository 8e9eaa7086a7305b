"""A profile from a model's own counts on random tokens, and what the policy should give on other ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from measure import Plan

from spark_runtime.bench import UNTIMED_TOKENS, counts_of, random_tokens
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.placement import (
    frequencies,
    greedy_slots,
    layer_sizes,
    residency_budget,
    uniform_slots,
)
from spark_runtime.simulate import scored_cold_hits
from spark_runtime.tier_start import PRIOR_TOKENS, TierStart, profile_start
from spark_schemas.model import ModelShape

CALIBRATION_SEED = 101


@dataclass(slots=True)
class Calibration:
    """Routing of other tokens than the measured ones, and the measured tokens' own trace for a prediction."""

    shape: ModelShape
    frequency: list[np.ndarray]
    trace: list[np.ndarray]

    @classmethod
    def run(cls, plan: Plan, n_vocab: int, n_tokens: int) -> Calibration:
        """Count both through the callback of a plain engine, which is known to be right."""
        length = len(plan.prompt) + max(n_tokens, len(plan.tokens))
        options = EngineOptions(n_ctx=length + 64, n_batch=len(plan.prompt), n_threads=plan.threads)
        with Engine.load(plan.model, options) as engine:
            tokens = random_tokens(len(plan.prompt) + n_tokens, n_vocab, CALIBRATION_SEED)
            calibration = counts_of(engine, tokens[: len(plan.prompt)], tokens[len(plan.prompt) :])
            measured = counts_of(engine, plan.prompt, plan.tokens, keep_trace=True)
            frequency = frequencies([calibration.counts["decode"]], [calibration.tokens["decode"]])
            return cls(engine.shape, frequency, measured.trace())

    def slots(self, residency: float) -> list[int]:
        """Slots per layer as a manifest would give them."""
        sizes = layer_sizes(self.shape)
        return greedy_slots(self.frequency, sizes, residency_budget(sizes, residency))

    def start(self, residency: float) -> TierStart:
        """Hot set and prior from the counts."""
        return profile_start(self.shape, self.frequency, self.slots(residency), prior_tokens=PRIOR_TOKENS)

    def predictions(self, residencies: Sequence[float]) -> dict[str, float]:
        """Cold hits per measured token in a simulation of the policy, by the names of tier_speed.py's configurations.

        The simulation gives each layer slots of its own; the runtime shares them between layers of one class.
        """
        result = {}
        sizes = layer_sizes(self.shape)
        for residency in residencies:
            hot = self._cold_hits(self.slots(residency), calibrated=True)
            result[f"calibrated_{residency:.0%}"] = hot
            result[f"calibrated_{residency:.0%}_not_counting"] = hot
            even = uniform_slots(sizes, residency_budget(sizes, residency))
            result[f"uniform_{residency:.0%}"] = self._cold_hits(even, calibrated=False)
        return result

    def _cold_hits(self, slots: Sequence[int], *, calibrated: bool) -> float:
        cold = 0
        for ids, layer, count, frequency in zip(self.trace, self.shape.layers, slots, self.frequency, strict=True):
            prior = frequency if calibrated else None
            # Those of the tokens that are not timed happen and are not counted.
            all_hits, first = (
                scored_cold_hits(part, layer.n_experts, count, prior, prior_tokens=PRIOR_TOKENS)
                for part in (ids, ids[:UNTIMED_TOKENS])
            )
            cold += all_hits - first
        return round(cold / (len(self.trace[0]) - UNTIMED_TOKENS), 3)
