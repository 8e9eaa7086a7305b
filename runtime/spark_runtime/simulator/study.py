"""Policies judged on sessions that no profile was made from: by profile, by slots, by position in the session."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from spark_runtime.simulator.guesses import Guesser, Guesses, Weights
from spark_runtime.simulator.policies import Cache, Frequency, replay
from spark_runtime.simulator.pools import Replayed
from spark_runtime.simulator.traces import LayerClass, Trace

__all__ = [
    "PROFILES",
    "EarlyShare",
    "Judgement",
    "Part",
    "PhaseOf",
    "ProfileName",
    "Study",
    "TraceTooSmallError",
    "equal_slots",
    "placed_slots",
]

IntArray = NDArray[np.int64]
ProfileName = Literal["none", "mixed", "own", "foreign", "given"]
"""What a cache starts with: nothing, all workloads' calibration sessions, the session's own workload's, another
workload's (the others take turns over the sessions), or one that was passed."""
PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)
PhaseOf = Literal["decode", "prefill", "both"]


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
class EarlyShare:
    """What fetching early did on the judged sessions."""

    fetched: float
    """Experts fetched early for each selection, over all tokens."""
    used: float
    """Of them, those selected while they were there."""
    wasted: float
    """Of them, those gone before anything selected them; the rest still waited at the end of a session."""
    wasted_bytes_per_token: float | None
    """``None`` where nobody knows an expert's bytes."""
    layers_by_experts: tuple[float, ...]
    """Layers of a token for which one expert was fetched early, two, and so on."""


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
    early: EarlyShare | None = None
    """``None`` where nothing may be fetched early."""


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
        guesser: Guesser | None = None,
        given_guesses: Mapping[LayerClass, Weights] | None = None,
    ) -> None:
        """Split; sessions without a token of the phase are left out, and only workload ``judged`` judges.

        Caches that fetch early need a ``guesser``; ``given_guesses`` are what ``given`` guesses start from. Raises
        :class:`TraceTooSmallError`.
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
        self._guesser, self._given_guesses = guesser, given_guesses
        self._learned: dict[tuple[bytes, LayerClass], Weights] = {}
        self._guesses: dict[tuple[object, ...], Guesses] = {}
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
        return self.judge_among(cache, slots, profile, self.judging, self.calibrating, positions)

    def frequency(self, profile: ProfileName) -> Frequency | None:
        """What a profile says of one session that judges; of several workloads' own or foreign ones, all sessions'.

        ``None`` for no profile. Slots per layer are one number for all sessions. Raises :class:`TraceTooSmallError`.
        """
        if profile in {"own", "foreign"} and len({self.workloads[session] for session in self.judging}) > 1:
            profile = "mixed"
        workload = self.workloads[int(self.judging[0])] if len(self.judging) else ""
        return self._profile(profile, workload, 0, self.calibrating)

    def judge_among(
        self,
        cache: Cache,
        slots: Sequence[int],
        profile: ProfileName,
        judging: IntArray,
        calibrating: IntArray,
        positions: Sequence[int] = (),
    ) -> Judgement:
        """The same of these sessions, with profiles from those; both are numbers of sessions of :attr:`trace`."""
        key = judging.tobytes()
        if key not in self._judges:
            self._judges[key] = self.trace.select(judging)
        trace = self._judges[key]
        profiles = [
            self._profile(profile, self.workloads[session], number, calibrating)
            for number, session in enumerate(judging.tolist())
        ]
        calls = trace.calls(self.batch, self.prompt_batch)
        early: EarlyShare | None = None
        if cache.policy == "oracle":
            cold = moved = self._oracle(cache, trace, judging, slots)
        else:
            found = replay(
                cache, trace, slots, profiles, calls, lambda of: self._guessed(cache, of, judging, calibrating)
            )
            cold, moved, early = found.cold, found.loads, _early_share(trace, found)
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
            early,
        )

    def _guessed(self, cache: Cache, of: LayerClass, judging: IntArray, calibrating: IntArray) -> Guesses:
        """Of the judging sessions; they do not depend on the slots, so they are kept for other numbers of those."""
        if self._guesser is None:
            raise ValueError("nothing guesses, so nothing can be fetched early")
        threshold, learning = cache.early.threshold_units, cache.early.learning
        calibrated = calibrating.tobytes() if cache.early_from == "calibrated" else b""
        key = (threshold, learning, cache.early_from, calibrated, judging.tobytes(), of)
        if key not in self._guesses:
            start = self._guesses_from(cache, of, calibrating)
            trace = self._judges[judging.tobytes()]
            calls = trace.calls(self.batch, self.prompt_batch)
            self._guesses[key] = self._guesser.guess(trace, of, calls, threshold, start, learning=learning)
        return self._guesses[key]

    def _guesses_from(self, cache: Cache, of: LayerClass, calibrating: IntArray) -> Weights | None:
        if cache.early_from == "none":
            return None
        if cache.early_from == "given":
            if self._given_guesses is None or of not in self._given_guesses:
                raise TraceTooSmallError("no guesses were given for these layers")
            return self._given_guesses[of]
        key = (calibrating.tobytes(), of)
        if key not in self._learned:
            if self._guesser is None or not len(calibrating):
                raise TraceTooSmallError("no session is held out, so none may teach what is guessed")
            trace = self.trace.select(calibrating)
            calls = trace.calls(self.batch, self.prompt_batch)
            self._learned[key] = self._guesser.learn(trace, of, calls, None)
        return self._learned[key]

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


def _early_share(trace: Trace, found: Replayed) -> EarlyShare | None:
    if found.early is None:
        return None
    fetched, n_selections = found.early.fetched, trace.n_tokens * trace.selections_per_token
    by_experts = np.bincount(fetched.ravel())[1:] / trace.n_tokens
    wasted = found.early.wasted.sum(axis=0, dtype=np.int64)
    wasted_bytes = None if trace.expert_bytes is None else float(wasted @ np.array(trace.expert_bytes) / trace.n_tokens)
    return EarlyShare(
        float(fetched.sum(dtype=np.int64) / n_selections),
        float(found.early.used.sum(dtype=np.int64) / n_selections),
        float(wasted.sum() / n_selections),
        wasted_bytes,
        tuple(by_experts.tolist()),
    )


def _parts(trace: Trace, cold: IntArray, positions: Sequence[int]) -> Iterator[Part]:
    position = np.arange(trace.n_tokens) - np.repeat(trace.offsets[:-1], trace.lengths)
    edges: list[int | None] = [0, *positions, None]
    for first, end in itertools.pairwise(edges):
        start = first or 0
        inside = (position >= start) & (position < (trace.n_tokens if end is None else end))
        n_tokens = int(inside.sum())
        rate = float(cold[inside].sum() / (n_tokens * trace.selections_per_token)) if n_tokens else None
        yield Part(start, end, rate)
