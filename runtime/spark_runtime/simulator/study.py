"""Policies judged on sessions that no profile was made from: by profile, by slots, by position in the session."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import (
    Interval,
    LayerSizes,
    bootstrap_interval,
    frequencies,
    greedy_slots,
    residency_budget,
    uniform_slots,
)
from spark_runtime.simulator.policies import Cache, Frequency, replay
from spark_runtime.simulator.traces import Trace

__all__ = [
    "PROFILES",
    "Judgement",
    "Part",
    "PhaseOf",
    "ProfileName",
    "Study",
    "TraceTooSmallError",
    "Tuned",
    "equal_slots",
    "placed_slots",
]

IntArray = NDArray[np.int64]
ProfileName = Literal["none", "mixed", "own", "foreign", "given"]
"""What a cache starts with: nothing, all workloads' calibration sessions, the session's own workload's, another
workload's (the others take turns over the sessions), or one that was passed."""
PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)
PhaseOf = Literal["decode", "prefill", "both"]

_DECAYS = (0.0, 0.3, 0.6, 0.8, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
_PRIOR_TOKENS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)


class TraceTooSmallError(ValueError):
    """Too few sessions for what was asked: nothing to calibrate on, or nothing to judge."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of all sessions from one position on up to another (exclusive; ``None``: to the end)."""

    first: int
    end: int | None
    cold_hit_rate: float | None
    """``None`` where no session is that long."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one policy did on the judged sessions."""

    cold_hit_rate: Interval
    """Mean over sessions of cold hits / selections, with its 95% bootstrap interval over sessions."""
    cold_hits_per_token: float
    """Over all tokens."""
    loads_per_token: float
    """Experts copied a token; fewer than cold hits where a call has several tokens."""
    parts: tuple[Part, ...]
    n_sessions: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best numbers found for ``scored``, and what they gave where they were looked for."""

    decay: float
    prior_tokens: float
    cold_hit_rate: float
    default_cold_hit_rate: float
    """Of the runtime's own numbers, on the same sessions."""
    tried: int


def equal_slots(trace: Trace, residency: float) -> list[int]:
    """The same share of every layer's experts, never less than ``2 * top_k``, by bytes where they are known."""
    layers = _sizes(trace)
    return uniform_slots(layers, residency_budget(layers, residency))


def placed_slots(trace: Trace, residency: float, frequency: Frequency) -> list[int]:
    """Slots per layer by a profile's frequency per byte, as in manifests, in the bytes of :func:`equal_slots`."""
    layers = _sizes(trace)
    return greedy_slots(frequency, layers, residency_budget(layers, residency))


def _sizes(trace: Trace) -> list[LayerSizes]:
    sizes = trace.expert_bytes or (1,) * len(trace.ids)
    return [
        LayerSizes(n_experts, ids.shape[1], size)
        for ids, n_experts, size in zip(trace.ids, trace.n_experts, sizes, strict=True)
    ]


class Study:
    """Sessions with their workloads, split into those that calibrate and those that judge."""

    def __init__(
        self,
        trace: Trace,
        workloads: Sequence[str],
        held_out: Sequence[bool],
        *,
        phase: PhaseOf = "decode",
        batch: int = 1,
        prompt_batch: int = 512,
        given: Frequency | None = None,
        judged: str | None = None,
    ) -> None:
        """Split; sessions without a token of the phase are left out, and only workload ``judged`` judges.

        Raises :class:`TraceTooSmallError`.
        """
        if trace.decode is None and phase != "decode":
            raise TraceTooSmallError("the trace holds decoded tokens only")
        decode = None if phase == "both" else phase == "decode"
        whole = trace.select(range(trace.n_sessions), decode=decode)
        used: list[int] = np.flatnonzero(whole.lengths > 0).tolist()
        self.trace = whole.select(used)
        self.workloads = [workloads[session] for session in used]
        self.held_out: NDArray[np.bool_] = np.array([held_out[session] for session in used], dtype=np.bool_)
        if not len(used):
            raise TraceTooSmallError(f"no session with a token of {'any phase' if phase == 'both' else phase}")
        self.phase, self.batch, self.prompt_batch, self.given = phase, batch, prompt_batch, given
        self._judged = judged
        if not len(self.judging):
            raise TraceTooSmallError(f"no held-out session of {judged}")
        self._frequency: dict[tuple[str, bytes], Frequency] = {}
        self._judges: dict[bytes, Trace] = {}

    @property
    def judging(self) -> IntArray:
        """Sessions that judge: the held-out ones, or all where no session is held out."""
        wanted = self.held_out if self.held_out.any() else np.ones(self.trace.n_sessions, dtype=bool)
        if self._judged is not None:
            wanted = wanted & np.array([workload == self._judged for workload in self.workloads])
        return np.flatnonzero(wanted)

    @property
    def calibrating(self) -> IntArray:
        """Sessions that profiles are made from; none where all judge."""
        return np.flatnonzero(~self.held_out) if self.held_out.any() else np.empty(0, dtype=np.int64)

    def judge(
        self, cache: Cache, slots: Sequence[int], profile: ProfileName = "own", positions: Sequence[int] = ()
    ) -> Judgement:
        """Replay the judging sessions, each from a fresh start; ``positions`` are inner edges of parts, tokens."""
        return self._judge(cache, slots, profile, self.judging, self.calibrating, positions)

    def frequency(self, profile: ProfileName) -> Frequency | None:
        """What a profile says of one session that judges; of several workloads' own or foreign ones, all sessions'.

        ``None`` for no profile. Slots per layer are one number for all sessions. Raises :class:`TraceTooSmallError`.
        """
        if profile in {"own", "foreign"} and len({self.workloads[session] for session in self.judging}) > 1:
            profile = "mixed"
        workload = self.workloads[int(self.judging[0])] if len(self.judging) else ""
        return self._profile(profile, workload, 0, self.calibrating)

    def tune(self, cache: Cache, slots: Sequence[int], profile: ProfileName = "own") -> Tuned:
        """Look for the decay and the prior's weight with the fewest cold hits, without the judging sessions.

        One half of the calibration sessions calibrates and the other judges, and the other way round. One number is
        searched while the other stays, until nothing gets better. Raises :class:`TraceTooSmallError`.
        """
        halves = _halves(self.calibrating, [self.workloads[session] for session in self.calibrating])
        rates: dict[tuple[float, float], float] = {}

        def rate(decay: float, prior_tokens: float) -> float:
            key = (decay, prior_tokens)
            if key not in rates:
                tried = replace(cache, decay=decay, prior_tokens=prior_tokens)
                found = [
                    self._judge(tried, slots, profile, judging, calibrating, ()).cold_hit_rate.mean
                    for judging, calibrating in (halves, halves[::-1])
                ]
                rates[key] = float(np.mean(found))
            return rates[key]

        start = rate(cache.decay, cache.prior_tokens)
        best = _descend(rate, cache.decay, cache.prior_tokens, search_prior=profile != "none")
        return Tuned(*best, rates[best], start, len(rates))

    def _judge(
        self,
        cache: Cache,
        slots: Sequence[int],
        profile: ProfileName,
        judging: IntArray,
        calibrating: IntArray,
        positions: Sequence[int],
    ) -> Judgement:
        key = judging.tobytes()
        if key not in self._judges:
            self._judges[key] = self.trace.select(judging)
        trace = self._judges[key]
        profiles = [
            self._profile(profile, self.workloads[session], number, calibrating)
            for number, session in enumerate(judging.tolist())
        ]
        calls = trace.calls(self.batch, self.prompt_batch)
        if cache.policy == "oracle":
            cold = moved = self._oracle(cache, trace, judging, slots)
        else:
            found = replay(cache, trace, slots, profiles, calls)
            cold, moved = found.cold, found.loads
        per_token = cold.sum(axis=1, dtype=np.int64)
        per_session = np.add.reduceat(per_token, trace.offsets[:-1])
        shares = per_session / (trace.lengths * trace.selections_per_token)
        return Judgement(
            bootstrap_interval(shares.tolist()),
            float(per_token.sum() / trace.n_tokens),
            float(moved.sum(dtype=np.int64) / trace.n_tokens),
            tuple(_parts(trace, per_token, positions)),
            trace.n_sessions,
            trace.n_tokens,
        )

    def _oracle(self, cache: Cache, trace: Trace, judging: IntArray, slots: Sequence[int]) -> NDArray[np.uint32]:
        """Each workload's judging sessions with their own counts."""
        result = np.zeros((trace.n_tokens, len(trace.ids)), dtype=np.uint32)
        workloads = np.array([self.workloads[session] for session in judging])
        for workload in sorted(set(workloads.tolist())):
            own = np.flatnonzero(workloads == workload)
            rows = np.concatenate([np.arange(trace.offsets[place], trace.offsets[place + 1]) for place in own])
            result[rows] = replay(cache, trace.select(own), slots, [None] * len(own)).cold
        return result

    def _profile(self, name: ProfileName, workload: str, number: int, calibrating: IntArray) -> Frequency | None:
        if name == "none":
            return None
        if name == "given":
            if self.given is None:
                raise TraceTooSmallError("no profile was given")
            return self.given
        others = sorted({self.workloads[session] for session in calibrating} - {workload})
        if name == "foreign":
            if not others:
                raise TraceTooSmallError(f"no workload but {workload} has sessions to calibrate on")
            return self._calibrated(others[number % len(others)], calibrating)
        return self._calibrated("" if name == "mixed" else workload, calibrating)

    def _calibrated(self, workload: str, calibrating: IntArray) -> Frequency:
        """The profile of a workload, or of all (``""``), from these sessions."""
        key = (workload, calibrating.tobytes())
        if key not in self._frequency:
            sessions = [session for session in calibrating.tolist() if workload in {"", self.workloads[session]}]
            if not sessions:
                raise TraceTooSmallError(
                    f"no session of {workload or 'any workload'} is left to calibrate on"
                    if self.held_out.any()
                    else "no session is held out, so none may calibrate"
                )
            counts = [self._counts(session) for session in sessions]
            self._frequency[key] = frequencies(counts, [int(self.trace.lengths[session]) for session in sessions])
        return self._frequency[key]

    def _counts(self, session: int) -> list[IntArray]:
        if self.phase != "both":
            return self.trace.counts(session, decode=self.phase == "decode")
        both = [self.trace.counts(session, decode=decode) for decode in (False, True)]
        return [prefill + decode for prefill, decode in zip(*both, strict=True)]


def _halves(sessions: IntArray, workloads: Sequence[str]) -> tuple[IntArray, IntArray]:
    """Two halves with as many sessions of each workload, up to one."""
    sides: tuple[list[int], list[int]] = ([], [])
    seen: dict[str, int] = {}
    for session, workload in zip(sessions.tolist(), workloads, strict=True):
        seen[workload] = seen.get(workload, 0) + 1
        sides[seen[workload] % 2].append(session)
    if not sides[0] or not sides[1]:
        raise TraceTooSmallError(f"{len(sessions)} sessions to tune on, expected at least 2 of one workload")
    known = {workload for workload, count in seen.items() if count > 1}
    first, second = (
        np.array([s for s in side if workloads[int(np.flatnonzero(sessions == s)[0])] in known], dtype=np.int64)
        for side in sides
    )
    return first, second


def _descend(
    rate: Callable[[float, float], float], decay: float, prior_tokens: float, *, search_prior: bool
) -> tuple[float, float]:
    best = (decay, prior_tokens)
    while True:
        before = best
        best = min(((tried, best[1]) for tried in sorted({*_DECAYS, best[0]})), key=lambda pair: rate(*pair))
        if search_prior:
            best = min(((best[0], tried) for tried in sorted({*_PRIOR_TOKENS, best[1]})), key=lambda pair: rate(*pair))
        if rate(*best) >= rate(*before):
            return best if rate(*best) < rate(*before) else before


def _parts(trace: Trace, cold: IntArray, positions: Sequence[int]) -> Iterator[Part]:
    position = np.arange(trace.n_tokens) - np.repeat(trace.offsets[:-1], trace.lengths)
    edges: list[int | None] = [0, *positions, None]
    for first, end in itertools.pairwise(edges):
        start = first or 0
        inside = (position >= start) & (position < (trace.n_tokens if end is None else end))
        n_tokens = int(inside.sum())
        rate = float(cold[inside].sum() / (n_tokens * trace.selections_per_token)) if n_tokens else None
        yield Part(start, end, rate)
