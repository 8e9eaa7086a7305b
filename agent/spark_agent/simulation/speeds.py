"""Tokens a second of a simulation's rows, from a machine's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spark_agent.errors import SparkError, UsageError
from spark_runtime.simulator.pools import MAX_SLOT_TOKENS

if TYPE_CHECKING:
    from spark_agent.simulation.machines import MachineFigures
    from spark_agent.simulation.rows import Report, Row
    from spark_agent.simulation.runs import Plan
    from spark_agent.simulation.sources import Source
    from spark_runtime.simulator.cost import Machine
    from spark_runtime.simulator.study import Judgement

__all__ = ["Speeds"]


@dataclass(frozen=True, slots=True)
class Speeds:
    """What predicts them, checked."""

    machine: Machine
    expert_bytes: float
    """Mean of a selected expert; 0 where a miss was measured as a whole."""
    pageable_share: float
    ubatch: int
    experts_by_layer: Sequence[int]

    @classmethod
    def of(cls, figures: MachineFigures | None, source: Source, plan: Plan, report: Report) -> Speeds | None:
        """``None`` without figures. Notes what they cannot say; raises where they say too little."""
        if figures is None:
            if plan.pageable_share:
                raise UsageError("--pageable needs a machine's figures", "pass --machine BENCH.json")
            return None
        machine, measured = figures.machine, figures.expert_bytes
        if plan.pageable_share and (machine.pageable_bytes_per_s is None or machine.link_bytes_per_s is None):
            raise UsageError(
                "nothing says what a copy from memory that is not locked takes",
                "pass --link and --pageable-link, or the --machine of a newer spark-agent bench",
            )
        own = source.mean_expert_bytes
        if machine.link_bytes_per_s is not None and own is None:
            raise SparkError(
                "a link's rate tells nothing where the bytes of an expert are not known", "use a recorded trace"
            )
        if machine.link_bytes_per_s is None and own and measured and not 0.9 < own / measured < 1.1:
            report.notes.append(
                f"a miss was measured with experts of {measured:.0f} bytes, these have {own:.0f}: pass --link and "
                "--miss-us"
            )
        if figures.fingerprint is not None and figures.fingerprint != source.fingerprint:
            report.notes.append("a token's time was measured with another model: pass --token-ms for this one's")
        layers = [layer.n_experts for layer in source.layers]
        known = machine if machine.n_layers else replace(machine, n_layers=len(layers))
        return cls(known, own or 0.0, plan.pageable_share, plan.ubatch, layers)

    def tok_s(self, row: Row) -> float | None:
        """Of prompts only where experts are fetched layer by layer, and everything is known."""
        if row.phase != "prefill":
            if row.loads_per_token is None:
                return None
            return round(self._decode_tok_s(row.loads_per_token, row.early_layers_per_token), 2)
        if (
            self.machine.prompt_token_s is None
            or self.machine.link_bytes_per_s is None
            or self.ubatch <= MAX_SLOT_TOKENS
        ):
            return None
        n_layers = len(self.experts_by_layer)
        absent = sum(self.experts_by_layer) * (1 - row.residency) / n_layers
        fetched = [absent] * n_layers
        return round(self.machine.prefill_tok_s(self.ubatch, fetched, self.expert_bytes, self.pageable_share), 2)

    def judged_tok_s(self, judged: Judgement) -> float:
        """Decoded tokens."""
        return self._decode_tok_s(
            judged.loads_per_token, None if judged.early is None else judged.early.layers_by_experts
        )

    def _decode_tok_s(self, loads_per_token: float, early_layers: Sequence[float] | None) -> float:
        return self.machine.decode_tok_s(loads_per_token, self.expert_bytes, self.pageable_share, early_layers)
