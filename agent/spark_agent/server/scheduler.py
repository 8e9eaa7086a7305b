"""Whose turn it is: requests wait in line for a free sequence, and those that have one take turns. Pure.

Turns follow time, not steps: whoever has had least goes on, so that a prompt's long batches and others' short tokens
share the machine evenly, and what comes new gets through at once. Nobody waits longer than one batch of each of the
others. Sequences go to those that wait in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from spark_agent.server.generation import BusyError

__all__ = ["Scheduler"]

MAX_WAITING = 64
MAX_WAITING_TOKENS = 2**20
"""Of the prompts of all that wait, which take 36 bytes each; a single longer prompt may wait all the same."""
MIN_SLICE_S = 0.05
MAX_SLICE_S = 1.0
SWITCHES_PER_SLICE = 50
"""A slice lasts so many times what it took to switch to another session: then switching costs 2% at most."""
_T = TypeVar("_T")


@dataclass(slots=True)
class _Turn(Generic[_T]):
    job: _T
    used_s: float


class Scheduler(Generic[_T]):
    """The waiting line and the turns of what runs. Not thread-safe."""

    def __init__(self, n_sequences: int, max_waiting: int = MAX_WAITING) -> None:
        self._n_sequences = n_sequences
        self._max_waiting = max_waiting
        self._waiting: deque[_T] = deque()
        self._running: list[_Turn[_T]] = []
        self._switch_s = 0.0

    @property
    def waiting(self) -> int:
        """Jobs in line."""
        return len(self._waiting)

    @property
    def running(self) -> list[_T]:
        """Jobs that have a sequence."""
        return [turn.job for turn in self._running]

    @property
    def slice_s(self) -> float:
        """How long a turn lasts; it ends with the step that exceeds it."""
        return min(MAX_SLICE_S, max(MIN_SLICE_S, SWITCHES_PER_SLICE * self._switch_s))

    def submit(self, job: _T) -> None:
        """Put a job in line; raise :class:`BusyError` when the line is full."""
        if len(self._waiting) >= self._max_waiting:
            raise BusyError
        self._waiting.append(job)

    def drop(self, unwanted: Callable[[_T], bool]) -> list[_T]:
        """Take jobs out of the line."""
        dropped = [job for job in self._waiting if unwanted(job)]
        for job in dropped:
            self._waiting.remove(job)
        return dropped

    def start(self) -> _T | None:
        """Move the first in line to those that run, while a sequence is free; ``None`` when there is nothing to do."""
        if not self._waiting or len(self._running) >= self._n_sequences:
            return None
        job = self._waiting.popleft()
        # As if it had had what the others had: it neither waits for them nor do they wait for it to catch up.
        least = min((turn.used_s for turn in self._running), default=0.0)
        self._running.append(_Turn(job, least))
        return job

    def next(self, blocked: Callable[[_T], bool] = lambda _: False) -> _T | None:
        """Whose turn it is: who has had least; of equal ones, who came first. ``None`` when all are blocked."""
        able = (turn for turn in self._running if not blocked(turn.job))
        least = min(able, key=lambda turn: turn.used_s, default=None)
        return None if least is None else least.job

    def charge(self, job: _T, seconds: float) -> None:
        """Note how long a job's turn took."""
        turn = self._turn(job)
        turn.used_s += max(seconds, 0.0)
        # Those that are equal take turns in order.
        self._running.remove(turn)
        self._running.append(turn)

    def finish(self, job: _T) -> None:
        """A job is done, its sequence is free."""
        self._running.remove(self._turn(job))

    def note_switch(self, seconds: float) -> None:
        """Note what it took to count for another session."""
        self._switch_s += (seconds - self._switch_s) / 4

    def _turn(self, job: _T) -> _Turn[_T]:
        return next(turn for turn in self._running if turn.job is job)
