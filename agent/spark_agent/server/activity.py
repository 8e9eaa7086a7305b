"""What the agent did since it started: told by the threads that do it, read by whoever wants to know.

Numbers only, by outcome, route and workload: nothing of a request's text, of a session's identity or of a place.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from spark_agent.server.nearest import MINIMUM_DECODE_TOKENS, KnownWorkloads, Suggestion
from spark_agent.server.workloads import WorkloadNames

if TYPE_CHECKING:
    from spark_agent.server.generation import GenerationReport
    from spark_agent.server.sessions import LiveSessions
    from spark_runtime.session_counts import SessionCounts

__all__ = ["Activity", "ClosedSession", "Distribution", "Numbers", "Promise"]

CLOSED_KEPT = 20
SPEED_REPORTS = 32
"""Generations that the current speed is taken over."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_GROWTH = 2
"""A session is compared again when it has so many times the tokens."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What the placement's manifest expects to miss in decode if it is never adapted."""

    cold_hit_rate: float
    low: float
    high: float
    workload: str


@dataclass(frozen=True, slots=True)
class ClosedSession:
    """A session that was handed over; nothing in it tells which one."""

    workload: str
    prefill_tokens: int
    decode_tokens: int
    cold_hit_rate: float | None
    """Of its decode selections; ``None`` where slots did not count all of them after one start."""
    promised_cold_hit_rate: float | None
    placement: str
    """The workload whose manifest placed the experts, or ``none``."""


class Distribution:
    """How many values lay at or under each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, each value in one; the last is beyond all bounds."""
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[next((index for index, bound in enumerate(self.bounds) if value <= bound), -1)] += 1
        self.total += value

    def copy(self) -> Distribution:
        """One that does not change any more."""
        copied = Distribution(self.bounds)
        copied.counts, copied.total = list(self.counts), self.total
        return copied

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs of a bound, as Prometheus writes it, and how many values do not exceed it."""
        found, total = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


@dataclass(frozen=True)
class Numbers:
    """The counters at one moment."""

    started: float
    """Monotonic, seconds."""
    requests: Counter[tuple[str, str]]
    """By route and status."""
    generations: Counter[tuple[str, str]]
    """By outcome and workload."""
    prompt_tokens: Counter[str]
    reused_tokens: Counter[str]
    completion_tokens: Counter[str]
    queue_s: Distribution
    first_token_s: Distribution
    token_s: Distribution
    closed: Counter[str]
    """Sessions handed over, by workload."""
    last_closed: tuple[ClosedSession, ...]
    """Newest first."""
    decode_tok_s: float | None
    """Over the latest generations that decoded anything."""
    suggestion: Suggestion | None
    uploads_ok: int
    uploads_failed: int
    uploaded_histograms: int


class Activity:
    """Takes reports from any thread; :meth:`numbers` gives them as of one moment."""

    def __init__(
        self,
        default_workload: str,
        known: Callable[[], KnownWorkloads] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``known`` gives the workloads that sessions of the default one are compared with; ``None``: they are not."""
        self.names = WorkloadNames(default_workload)
        self._known = known
        self._suggesting = threading.Lock()
        self._to_compare: tuple[list[NDArray[np.int64]], int] | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._compared: WeakKeyDictionary[SessionCounts, int] = WeakKeyDictionary()
        self._numbers = Numbers(
            started=clock(),
            requests=Counter(),
            generations=Counter(),
            prompt_tokens=Counter(),
            reused_tokens=Counter(),
            completion_tokens=Counter(),
            queue_s=Distribution(SECONDS),
            first_token_s=Distribution(SECONDS),
            token_s=Distribution(TOKEN_SECONDS),
            closed=Counter(),
            last_closed=(),
            decode_tok_s=None,
            suggestion=None,
            uploads_ok=0,
            uploads_failed=0,
            uploaded_histograms=0,
        )
        self._speeds: deque[tuple[int, float]] = deque(maxlen=SPEED_REPORTS)

    @property
    def uptime_s(self) -> float:
        """Since this began, whatever the wall clock did."""
        return self._clock() - self._numbers.started

    def request(self, route: str, status: str) -> None:
        """Note an answered request."""
        with self._lock:
            self._numbers.requests[route, status] += 1

    def generation(self, report: GenerationReport) -> None:
        """Note a generation that ended."""
        name = self.names.label(report.workload)
        with self._lock:
            numbers = self._numbers
            numbers.generations[report.outcome, name] += 1
            numbers.prompt_tokens[name] += report.prompt_tokens
            numbers.reused_tokens[name] += report.reused_tokens
            numbers.completion_tokens[name] += report.completion_tokens
            numbers.queue_s.add(report.queued_s)
            if report.first_token_s is not None:
                numbers.first_token_s.add(report.first_token_s)
            # The first token comes of the prompt; the others each took a step.
            if report.completion_tokens > 1 and report.decode_s > 0.0:
                numbers.token_s.add(report.decode_s / (report.completion_tokens - 1))
                self._speeds.append((report.completion_tokens - 1, report.decode_s))

    def closed(self, workload: str | None, session: ClosedSession) -> None:
        """Note a session that was handed over."""
        label = self.names.label(workload)
        with self._lock:
            self._numbers.closed[label] += 1
            last = (replace(session, workload=label), *self._numbers.last_closed)[:CLOSED_KEPT]
            self._numbers = replace(self._numbers, last_closed=last)

    def upload(self, *, ok: bool, histograms: int = 0) -> None:
        """Note an attempt to send what the spool holds, and how many histograms the service took."""
        with self._lock:
            numbers = self._numbers
            self._numbers = replace(
                numbers,
                uploads_ok=numbers.uploads_ok + ok,
                uploads_failed=numbers.uploads_failed + (not ok),
                uploaded_histograms=numbers.uploaded_histograms + histograms,
            )

    def compare(self, sessions: LiveSessions) -> None:
        """Take the counts of the session used last, if nobody said what it is; on the thread that computes.

        Costs nothing unless the session has grown twofold since. What it looks like is found out when somebody asks.
        """
        latest = sessions.latest()
        if self._known is None or latest is None or latest[0] is not None:
            return
        self._compare(latest[1])

    def _compare(self, counts: SessionCounts) -> None:
        tokens = counts.tokens["decode"]
        enough = max(_GROWTH * self._compared.get(counts, 0), MINIMUM_DECODE_TOKENS)
        if tokens < enough or self._known is None:
            return
        self._compared[counts] = tokens
        with self._lock:
            self._to_compare = [layer.copy() for layer in counts.counts["decode"]], tokens

    def _suggest(self) -> None:
        with self._suggesting:
            with self._lock:
                taken, self._to_compare = self._to_compare, None
            found = None if taken is None or self._known is None else self._known().nearest(*taken)
            if found is not None:
                with self._lock:
                    self._numbers = replace(self._numbers, suggestion=found)

    def numbers(self) -> Numbers:
        """The counters as of now; not on the thread that computes, as it may have a session to compare first."""
        self._suggest()
        with self._lock:
            tokens, seconds = sum(count for count, _ in self._speeds), sum(taken for _, taken in self._speeds)
            numbers = self._numbers
            return replace(
                numbers,
                requests=Counter(numbers.requests),
                generations=Counter(numbers.generations),
                prompt_tokens=Counter(numbers.prompt_tokens),
                reused_tokens=Counter(numbers.reused_tokens),
                completion_tokens=Counter(numbers.completion_tokens),
                queue_s=numbers.queue_s.copy(),
                first_token_s=numbers.first_token_s.copy(),
                token_s=numbers.token_s.copy(),
                closed=Counter(numbers.closed),
                decode_tok_s=tokens / seconds if tokens else None,
            )
