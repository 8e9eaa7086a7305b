"""What lucebox published of Laguna-XS.2, beside the same tables of the models and the routing that are at hand.

Published: one RTX 3090, 256 experts in each of 40 layers, top-8, sessions of a coding agent, held out by session;
decode. A miss is computed on the CPU there, where we copy the expert. Slots of the ring are compared as a share of a
layer's experts: 16 of 256 are 2 of 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from published_routing import Sessions
from report import row

from spark_agent.simulation.machines import machine_of
from spark_runtime.placement import frequencies
from spark_runtime.simulator.cost import Machine, MeasuredRun
from spark_runtime.simulator.policies import Cache, PolicyName
from spark_runtime.simulator.study import Judgement, ProfileName, Study, equal_slots

EXPERTS, SELECTIONS = 256, 320
"""Of a layer, and of a token: 40 layers, top-8."""
ALL_GPU_TOK_S = 111.0
BUDGETS: tuple[tuple[float, ProfileName | None, float | None, float | None], ...] = (
    (0.6, None, 0.36, 66.0),
    (0.6, "own", 0.066, 81.0),
    (0.7, "own", None, 85.0),
    (0.8, "own", None, 87.0),
)
"""Residency, profile (``None``: the first experts), cold-hit rate, tokens a second."""
MISMATCH: tuple[tuple[ProfileName, float], ...] = (("own", 0.066), ("foreign", 0.16))
"""The second: a prompt of code alone on a profile of conversations."""
RING = ((0, 39.7, 74.5), (16, 5.6, 80.2), (32, 0.8, 85.0), (48, 0.4, 88.2))
"""Ring slots a layer beside 60% pinned, cold hits a token, tokens a second, in one long generation of code."""
CALIBRATED = {"prefill": 81.0, "decode": 81.0}
"""Tokens a second with profiles of prompts alone and of generated tokens too: "~81 both"."""
BENCH_SELECTIONS = 384
"""Of a token of the model that the bench ran: 48 layers, top-8."""


class LagunaTables:
    """The tables of one source after another, with the machines that tokens a second are predicted for."""

    def __init__(self, bench: Path | None) -> None:
        """``bench`` is a result of ``spark-agent bench --json``."""
        runs = [
            MeasuredRun(tok_s, rate * SELECTIONS)
            for _, _, rate, tok_s in BUDGETS
            if rate is not None and tok_s is not None
        ]
        self.published_machine = Machine.fitted(1 / ALL_GPU_TOK_S, runs)
        figures = None if bench is None else machine_of(bench, 0, 0, None)
        self.own_machine = None if figures is None else figures.machine

    def rows(self, study: Study, source: Sessions) -> Iterator[dict[str, Any]]:
        """All tables of one source."""
        yield from self._budgets(study, source.name)
        yield from self._mismatch(study, source.name)
        yield from self._ring(study, source.name)
        yield from self._phases(study, source)

    def _budgets(self, study: Study, name: str) -> Iterator[dict[str, Any]]:
        for residency, profile, rate, tok_s in BUDGETS:
            policy: PolicyName = "uniform" if profile is None else "static"
            found = study.judge(Cache(policy), equal_slots(study.trace, residency), profile or "own")
            about = {"profile": profile or "first experts", "residency": residency}
            yield self._row("budget sweep", name, found, rate, tok_s, **about)

    def _mismatch(self, study: Study, name: str) -> Iterator[dict[str, Any]]:
        slots = equal_slots(study.trace, 0.6)
        for profile, rate in MISMATCH:
            found = study.judge(Cache("static"), slots, profile)
            yield self._row("mismatch", name, found, rate, None, profile=profile, residency=0.6)

    def _ring(self, study: Study, name: str) -> Iterator[dict[str, Any]]:
        """After 256 tokens, where the published generation is long; with another workload's profile, as there."""
        hot = equal_slots(study.trace, 0.6)
        selections = study.trace.selections_per_token
        for ring, cold, tok_s in RING:
            counts = study.trace.n_experts
            slots = [min(h + round(ring / EXPERTS * n), n) for h, n in zip(hot, counts, strict=True)]
            cache = Cache("lru_pinned", pinned_share=hot[0] / slots[0]) if ring else Cache("static")
            found = study.judge(cache, slots, "foreign", (256,))
            last = found.parts[-1].cold_hit_rate
            yield row("ring sweep", name, last, cold / SELECTIONS, ring_of_256=ring, ring=slots[0] - hot[0],
                      cold_hits_per_token=None if last is None else round(last * selections, 2),
                      published_cold_hits_per_token=cold, **self._tok_s(last, tok_s))  # fmt: skip

    def _phases(self, study: Study, source: Sessions) -> Iterator[dict[str, Any]]:
        """Calibrated on prompts or on what was generated, judged on what was generated."""
        if source.trace.decode is None:
            return
        calibrating = [index for index, held_out in enumerate(source.held_out) if not held_out]
        slots = equal_slots(study.trace, 0.6)
        for phase, tok_s in CALIBRATED.items():
            counts = [source.trace.counts(session, decode=phase == "decode") for session in calibrating]
            tokens = [int(session[0].sum()) for session in counts]
            judged = Study(source.trace, source.workloads, source.held_out, given=frequencies(counts, tokens))
            found = judged.judge(Cache("static"), slots, "given")
            yield self._row("calibrated on", source.name, found, None, tok_s, phase=phase, residency=0.6)

    def _row(
        self, table: str, name: str, found: Judgement, rate: float | None, tok_s: float | None, **about: Any
    ) -> dict[str, Any]:
        interval = found.cold_hit_rate
        about |= {"low": interval.low, "high": interval.high}
        return row(table, name, interval.mean, rate, **about, **self._tok_s(interval.mean, tok_s))

    def _tok_s(self, rate: float | None, published: float | None) -> dict[str, float | None]:
        """Predicted: Laguna on the published machine, and the bench's model on its own, both with this rate."""
        if rate is None:
            return {"published_tok_s": published}
        told = {
            "predicted_tok_s_published_machine": round(self.published_machine.decode_tok_s(rate * SELECTIONS), 1),
            "published_tok_s": published,
        }
        if self.own_machine is not None:
            own = self.own_machine
            told["predicted_tok_s_bench_machine"] = round(own.decode_tok_s(rate * BENCH_SELECTIONS), 1)
            told["predicted_share_of_all_resident"] = round(own.decode_tok_s(rate * BENCH_SELECTIONS) * own.token_s, 3)
        return told
