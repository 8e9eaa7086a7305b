"""The one thread that computes. Several generations are in progress at once, and take turns step by step."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from spark_agent.server.engine_thread import EngineThread
from spark_agent.server.generation import AbandonedError, BusyError, Generation, GenerationReport
from spark_agent.server.running import Running
from spark_agent.server.scheduler import MAX_WAITING, MAX_WAITING_TOKENS, Scheduler
from spark_agent.server.sessions import LiveSessions
from spark_runtime.engine import Engine

__all__ = ["StepWatcher", "Worker", "WorkerLoad"]

_HOUSEKEEPING_S = 30.0
"""Between two times that what is not used any more is given back, however much there is to do."""
_POLL_S = 0.001
"""Between two looks whether a grammar has answered, while nothing else is to be done."""
_T = TypeVar("_T")
StepWatcher = Callable[[Running, bool], bool]
"""Hears on the computing thread which generation made a step, before the next one is made, and whether it was one of
its prompt; answers whether it wants to hear of more."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How much there is to do, at one moment."""

    running: int
    waiting: int
    sequences: int
    tokens_cached: int
    """Tokens that all sequences hold, of conversations that may go on."""


class Worker:
    """Owns the engine and the open sessions on one thread."""

    def __init__(
        self,
        engine: Engine,
        sessions: LiveSessions,
        on_error: Callable[[Exception], None],
        *,
        on_done: Callable[[GenerationReport], None] | None = None,
        thread: EngineThread | None = None,
    ) -> None:
        """``thread`` is the one that loaded the engine; without one, another is started."""
        self._engine = engine
        self._sessions = sessions
        self._on_error = on_error
        self._on_done = on_done
        self._scheduler: Scheduler[Running] = Scheduler(len(engine.conversations))
        self._counted: Running | None = None
        self._watcher: StepWatcher | None = None
        self._inbox: deque[Running] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._adding = threading.Lock()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Rung when there is something to do. Waking by a condition would take the first token longer."""
        self._stopping = threading.Event()
        self._ending = False
        self._tokens_waiting = 0
        self._next_tidy_s = self._next_engine_tidy_s = 0.0
        self._tidies = True
        self._thread = thread or EngineThread()

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return self._scheduler.waiting + len(self._inbox)

    @property
    def load(self) -> WorkerLoad:
        """What there is to do; may be read by any thread."""
        conversations = self._engine.conversations
        cached = sum(conversation.n_past for conversation in conversations)
        return WorkerLoad(len(self._scheduler.running), self.waiting, len(conversations), cached)

    def watch(self, watcher: StepWatcher) -> None:
        """Let one hear of every step but a generation's last; before :meth:`start`."""
        self._watcher = watcher

    def start(self) -> None:
        """Start computing."""
        self._thread.work(self._work)

    def submit(self, generation: Generation) -> None:
        """Put a request in line; raise :class:`BusyError` when the line is full."""
        running = Running(generation)
        with self._adding:
            waiting, tokens = self.waiting, self._tokens_waiting + len(generation.tokens)
            if waiting >= MAX_WAITING or (waiting and tokens > MAX_WAITING_TOKENS):
                raise BusyError
            self._tokens_waiting = tokens
            self._inbox.append(running)
        self._bell.put(None)

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function on the computing thread between two steps; raise ``RuntimeError`` once it has been stopped."""
        future: Future[_T] = Future()
        with self._adding:
            if self._ending:
                raise RuntimeError("the worker has stopped")
            self._calls.append((function, future))
        self._bell.put(None)
        return future

    def give_up(self) -> None:
        """End running generations and those in line with :class:`AbandonedError`."""
        self._stopping.set()
        self._bell.put(None)

    def stop(self) -> None:
        """Give up what runs and keep every session's counts; returns when the thread has ended."""
        with self._adding:
            self._ending = True
        self.give_up()
        self._thread.join()

    def _work(self) -> None:
        while True:
            self._take_in()
            self._run_calls()
            if self._stopping.is_set():
                self._abandon_all()
            while (started := self._scheduler.start()) is not None:
                self._start(started)
            running = self._scheduler.next(lambda job: job.blocked)
            if running is not None:
                self._turn(running)
                self._tidy()
            elif self._scheduler.running:
                # All that run wait for their grammars.
                self._rest(_POLL_S)
            elif not self._wait():
                break
        self._keep(self._sessions.close_all)
        with self._adding:
            left, self._calls = self._calls, deque()
        for _, future in left:
            future.cancel()

    def _wait(self) -> bool:
        """Until there is something to do; ``False`` when there never will be again."""
        with self._adding:
            if self._ending and not self._inbox and not self._calls:
                return False
        # Whatever was added by now has rung as well.
        if not self._rest(_HOUSEKEEPING_S):
            self._tidy()
        return True

    def _rest(self, limit_s: float) -> bool:
        """Until the bell rings, at most so long; whether it did."""
        try:
            self._bell.get(timeout=limit_s)
        except queue.Empty:
            return False
        return True

    def _take_in(self) -> None:
        # Silenced before looking: what is added from here on rings again.
        while not self._bell.empty():
            self._bell.get_nowait()
        # Counted by submit() meanwhile: what has left the one line must be in the other.
        with self._adding:
            while self._inbox:
                self._scheduler.submit(self._inbox.popleft())
        for gone in self._scheduler.drop(lambda job: job.generation.cancelled.is_set()):
            self._left_line(gone)
            self._tell(gone, AbandonedError())

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            # What a function does to slots must not be mixed into what a session counted before.
            self._count(None)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def _abandon_all(self) -> None:
        for running in self._scheduler.running:
            self._finish(running, AbandonedError())
        for waiting in self._scheduler.drop(lambda _: True):
            self._left_line(waiting)
            self._tell(waiting, AbandonedError())

    def _left_line(self, running: Running) -> None:
        with self._adding:
            self._tokens_waiting -= len(running.generation.tokens)

    def _start(self, running: Running) -> None:
        self._left_line(running)
        busy = [other.conversation for other in self._scheduler.running if other.conversation is not None]
        try:
            running.start(self._engine, self._engine.conversation_for(running.generation.tokens, busy))
        except Exception as error:
            self._finish(running, error)

    def _turn(self, running: Running) -> None:
        """Steps of one generation until its slice is over; a prompt's batch is a slice of its own."""
        began = time.monotonic()
        try:
            self._count(running)
            while True:
                running.check_wanted()
                if self._stopping.is_set():
                    raise AbandonedError
                in_prompt = running.in_prompt
                if not running.step():
                    self._finish(running, None)
                    return
                if self._watcher is not None and not self._watcher(running, in_prompt):
                    self._watcher = None
                spent_s = time.monotonic() - began
                if in_prompt or running.in_wait or self._calls or spent_s >= self._scheduler.slice_s:
                    break
        except Exception as error:
            self._finish(running, error)
        else:
            self._scheduler.charge(running, spent_s)

    def _count(self, running: Running | None) -> None:
        """Count for a generation's session from now on; what does not add up is the fault of who was counted before."""
        before, self._counted = self._counted, running
        counts = None
        if running is not None:
            generation = running.generation
            counts = self._sessions.counts_of(generation.lineage, generation.workload)
        began = time.monotonic()
        try:
            self._engine.count_into(counts)
        except Exception as error:
            self._engine.count_into(counts)
            if before is None or before is running or before not in self._scheduler.running:
                raise
            self._finish(before, error, counted=True)
        if before is not None and before is not running:
            self._scheduler.note_switch(time.monotonic() - began)

    def _finish(self, running: Running, error: Exception | None, *, counted: bool = False) -> None:
        running.close()
        self._scheduler.finish(running)
        if not counted and self._counted is running:
            self._counted = None
            try:
                self._engine.count_into(None)
            except Exception as fault:
                error = error or fault
        self._tell(running, error)

    def _tell(self, running: Running, error: Exception | None) -> None:
        # Reported first: whoever has an answer finds it in the numbers.
        if self._on_done is not None:
            report = running.report(error)
            self._keep(lambda on_done=self._on_done: on_done(report))  # type: ignore[misc]
        # The request is answered with the error, whatever it was; the thread serves the others.
        if error is not None:
            running.generation.events.tell(error)
        elif running.finished is not None:
            running.generation.events.tell(running.finished)

    def _tidy(self) -> None:
        # Where nobody waits for it; but now and then, however much there is to do. And one at a time as new
        # conversations come, so that they neither pile up nor are all handed over while somebody waits.
        idle = not self._scheduler.running and not self._inbox
        piles_up = self._tidies and self._sessions.too_many
        if idle or piles_up or time.monotonic() >= self._next_tidy_s:
            self._next_tidy_s = time.monotonic() + _HOUSEKEEPING_S
            self._tidies = self._keep(self._sessions.tidy)
        if time.monotonic() >= self._next_engine_tidy_s:
            self._next_engine_tidy_s = time.monotonic() + _HOUSEKEEPING_S
            self._engine.tidy()

    def _keep(self, close: Callable[[], None]) -> bool:
        # A full disk must not end the thread that answers requests: counts stay in memory and are tried again.
        try:
            close()
        except Exception as error:
            self._on_error(error)
            return False
        return True
