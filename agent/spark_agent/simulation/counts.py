"""Rows from counts and reuse distances: what can be said without the order of selections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spark_agent.errors import SparkError
from spark_agent.simulation.rows import Report, Row
from spark_agent.simulation.sources import Source, read_profile
from spark_runtime.placement import bootstrap_interval, frequencies, residency_budget, uniform_slots
from spark_runtime.simulator.histograms import SessionCounts, count_rates, lru_rates
from spark_schemas.ids import Phase

if TYPE_CHECKING:
    from spark_agent.simulation.runs import Plan

__all__ = ["count_rows", "given_profile"]

Frequency = Sequence[NDArray[np.float64]]
_STATIC = ("uniform", "static", "oracle")


def given_profile(path: str, source: Source, kept: Sequence[int]) -> Frequency:
    """A profile from a file, for some of the source's layers; raises :class:`SparkError` for another model's."""
    frequency = read_profile(path)
    if [len(layer) for layer in frequency] != [layer.n_experts for layer in source.layers]:
        raise SparkError(f"{path} is a profile of other layers than the input's", "take a profile of the same model")
    return [frequency[index] for index in kept]


def count_rows(plan: Plan, source: Source, workload: str | None, report: Report) -> None:
    """Add the rows of static placement, and of LRU where there are reuse distances."""
    left_out = [policy for policy in plan.policies if policy not in {*_STATIC, "lru"}]
    if left_out and plan.asked:
        report.notes.append(f"{', '.join(left_out)}: they need the order of selections, so a trace")
    if plan.phase == "both":
        raise SparkError("counts keep prefill and decode apart", "pass --phase decode or --phase prefill")
    given = None if plan.given is None else given_profile(plan.given, source, range(len(source.layers)))
    if source.imported is not None:
        _imported_rows(plan, source, given, report)
        return
    phase: Phase = plan.phase
    counted = [source.counts(session, phase) for session in range(len(source.histograms))]
    there = [index for index, counts in enumerate(counted) if counts is not None]
    any_held_out = any(source.held_out[index] for index in there)
    judging = [
        index
        for index in there
        if (source.held_out[index] or not any_held_out) and workload in {None, source.workloads[index]}
    ]
    if not judging:
        raise SparkError(f"no session has {phase} counts to judge", "record more, or another --workload or --phase")
    if not any_held_out:
        report.notes.append("no session is on the held-out side: all of them judge, and none may calibrate")
    calibrating = [index for index in there if not source.held_out[index]] if any_held_out else []
    report.n_sessions, report.n_calibration = len(judging), len(calibrating)
    study = _CountStudy(source, counted, judging, calibrating, given, report)
    for residency in plan.residencies:
        slots = uniform_slots(source.layers, residency_budget(source.layers, residency))
        for policy in plan.policies:
            study.add(policy, plan, residency, slots)


class _CountStudy:
    def __init__(
        self,
        source: Source,
        counted: Sequence[SessionCounts | None],
        judging: list[int],
        calibrating: list[int],
        given: Frequency | None,
        report: Report,
    ) -> None:
        self._source, self._counted, self._report = source, counted, report
        self._judging, self._calibrating, self._given = judging, calibrating, given
        self._sessions = [counts for index in judging if (counts := counted[index]) is not None]

    def add(self, policy: str, plan: Plan, residency: float, slots: list[int]) -> None:
        if policy == "uniform":
            self._row(
                policy, "none", residency, slots, count_rates(self._sessions, slots, [None] * len(self._sessions)), plan
            )
        elif policy == "oracle":
            profiles = [self._frequency(self._same(index, self._judging)) for index in self._judging]
            self._row(policy, "held-out", residency, slots, count_rates(self._sessions, slots, profiles), plan)
        elif policy == "static":
            for profile in plan.profiles:
                if profile == "none":
                    continue
                found = [self._profile(profile, number, index) for number, index in enumerate(self._judging)]
                if any(frequency is None for frequency in found):
                    note = f"{profile} profiles are left out: too few sessions to calibrate on"
                    if note not in self._report.notes:
                        self._report.notes.append(note)
                    continue
                self._row(policy, profile, residency, slots, count_rates(self._sessions, slots, found), plan)
        elif policy == "lru" and plan.phase == "decode":
            self._row(policy, "none", residency, slots, lru_rates(self._sessions, slots), plan, sharing="layer")

    def _row(
        self,
        policy: str,
        profile: str,
        residency: float,
        slots: list[int],
        rates: NDArray[np.float64],
        plan: Plan,
        sharing: str | None = None,
    ) -> None:
        interval = bootstrap_interval(rates.tolist())
        tokens = np.array([session.tokens for session in self._sessions])
        selections = sum(layer.top_k for layer in self._source.layers)
        per_token = float((rates * tokens).sum() / tokens.sum() * selections)
        layers = self._source.layers
        self._report.rows.append(
            Row(
                policy=policy,
                sharing=sharing,
                profile=profile,
                residency=residency,
                slots=sum(slots),
                cold_hit_rate=interval.mean,
                low=interval.low,
                high=interval.high,
                cold_hits_per_token=per_token,
                loads_per_token=per_token,
                predicted_tok_s=None,
                phase=plan.phase,
                n_sessions=len(self._sessions),
                slot_bytes=sum(count * layer.expert_bytes for count, layer in zip(slots, layers, strict=True)),
            )
        )

    def _same(self, index: int, among: Sequence[int]) -> list[int]:
        return [other for other in among if self._source.workloads[other] == self._source.workloads[index]]

    def _profile(self, name: str, number: int, index: int) -> Frequency | None:
        if name == "given":
            return self._given
        own = self._same(index, self._calibrating)
        if name == "own":
            return self._frequency(own)
        if name == "mixed":
            return self._frequency(self._calibrating)
        others = sorted(
            {self._source.workloads[other] for other in self._calibrating} - {self._source.workloads[index]}
        )
        if not others:
            return None
        chosen = others[number % len(others)]
        return self._frequency([other for other in self._calibrating if self._source.workloads[other] == chosen])

    def _frequency(self, sessions: Sequence[int]) -> Frequency | None:
        found = [counts for index in sessions if (counts := self._counted[index]) is not None]
        return frequencies([counts.counts for counts in found], [counts.tokens for counts in found]) if found else None


def _imported_rows(plan: Plan, source: Source, given: Frequency | None, report: Report) -> None:
    """Counts of another tool, as if they were one session."""
    if source.imported is None or not source.imported.has_counts:
        raise SparkError(
            "the imported profile has an order and no counts", "simulate with it: --profile FILE on a trace"
        )
    counts = [np.array(layer.counts, dtype=np.int64) for layer in source.imported.histograms]
    session = SessionCounts(counts, None, source.imported.tokens or 0)
    profiles: dict[str, tuple[str, Frequency | None]] = {
        "uniform": ("none", None),
        "oracle": ("itself", [layer.astype(np.float64) for layer in counts]),
    }
    if given is not None:
        profiles["static"] = ("given", given)
    for residency in plan.residencies:
        slots = uniform_slots(source.layers, residency_budget(source.layers, residency))
        for policy, (name, frequency) in profiles.items():
            if policy not in plan.policies:
                continue
            [rate] = count_rates([session], slots, [frequency]).tolist()
            report.rows.append(
                Row(
                    policy=policy,
                    sharing=None,
                    profile=name,
                    residency=residency,
                    slots=sum(slots),
                    cold_hit_rate=rate,
                    low=None,
                    high=None,
                    cold_hits_per_token=None,
                    loads_per_token=None,
                    predicted_tok_s=None,
                    phase=source.imported.phase or "unknown",
                    n_sessions=0,
                    imported=True,
                )
            )
