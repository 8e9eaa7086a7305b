"""The one thread that computes. Requests wait in line; one whose client has left stops at its next step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeVar

from spark_agent.server.generation import AbandonedError, BusyError, Finished, Generation, GenerationReport, Piece
from spark_agent.server.sessions import LiveSessions
from spark_runtime.chat import TextStream
from spark_runtime.engine import Engine
from spark_runtime.errors import ContextFullError

__all__ = ["Worker", "WorkerLoad"]

MAX_WAITING = 64
_HOUSEKEEPING_S = 30.0
_T = TypeVar("_T")


class Worker:
    """Owns the engine and the open sessions on one thread."""

    def __init__(
        self,
        engine: Engine,
        sessions: LiveSessions,
        on_error: Callable[[Exception], None],
        *,
        on_done: Callable[[GenerationReport], None] | None = None,
    ) -> None:
        """``on_done`` is called on the computing thread after every generation."""
        self._on_done = on_done
        self._running = False
        self._submitted: dict[int, float] = {}
        self._engine = engine
        self._sessions = sessions
        self._on_error = on_error
        self._waiting: queue.Queue[Generation | Callable[[], None] | None] = queue.Queue()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-engine")

    @property
    def load(self) -> WorkerLoad:
        """What it has to do."""
        return WorkerLoad(int(self._running), self._waiting.qsize(), 1, self._engine.n_past)

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return self._waiting.qsize()

    def start(self) -> None:
        """Start computing."""
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Put a request in line; raise :class:`BusyError` when the line is full."""
        if self._waiting.qsize() >= MAX_WAITING:
            raise BusyError
        self._submitted[id(generation)] = time.monotonic()
        self._waiting.put(generation)

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function on the computing thread between two steps; also while nothing is computed."""
        if self._stopping.is_set():
            raise AbandonedError
        future: Future[_T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    # Whoever waits for the result decides what it means.
                    future.set_exception(error)

        self._calls.put(run)
        self._waiting.put(self._run_calls)
        return future

    def _run_calls(self) -> None:
        while not self._calls.empty():
            self._calls.get()()

    def give_up(self) -> None:
        """End the running generation and those in line with :class:`AbandonedError`."""
        self._stopping.set()

    def stop(self) -> None:
        """Give up what runs and keep every session's counts; returns when the thread has ended."""
        self.give_up()
        self._waiting.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                generation = self._waiting.get(timeout=_HOUSEKEEPING_S)
            except queue.Empty:
                self._keep(self._sessions.tidy)
                continue
            if generation is None:
                self._run_calls()
                self._keep(self._sessions.close_all)
                return
            if not isinstance(generation, Generation):
                generation()
                continue
            self._serve(generation)
            self._keep(self._sessions.tidy)

    def _keep(self, close: Callable[[], None]) -> None:
        # A full disk must not end the thread that answers requests: counts stay in memory and are tried again.
        try:
            close()
        except Exception as error:
            self._on_error(error)

    def _serve(self, generation: Generation) -> None:
        timing = _Timing(self._submitted.pop(id(generation)), time.monotonic())
        outcome: Literal["stop", "length", "cancelled", "error"] = "error"
        self._running = True
        try:
            finished = self._generate(generation, timing)
            outcome = finished.reason
            generation.emit(finished)
        except Exception as error:
            # The request is answered with the error, whatever it was; the thread serves the next one.
            outcome = "cancelled" if isinstance(error, AbandonedError) else "error"
            generation.emit(error)
        finally:
            self._running = False
            if self._on_done is not None:
                self._on_done(timing.report(outcome, generation))

    def _generate(self, generation: Generation, timing: _Timing) -> Finished:
        engine = self._engine
        if len(generation.tokens) >= engine.n_ctx:
            raise ContextFullError(
                f"a prompt of {len(generation.tokens)} tokens leaves no room in a context of {engine.n_ctx}",
                "shorten the conversation or start the agent with a larger --ctx",
            )
        self._check_wanted(generation)
        stream = TextStream(generation.stops)
        reason: Literal["stop", "length"] = "length"
        room = engine.n_ctx - len(generation.tokens)
        limit = min(generation.max_tokens or room, room)
        sessions = self._sessions
        with (
            sessions.held(generation.lineage, generation.workload) as counts,
            engine.counting(counts),
        ):
            timing.reused = engine.prompt(generation.tokens, before_step=lambda: self._check_wanted(generation))
            for token in engine.generate(generation.sampling, limit):
                timing.token()
                ends = engine.is_end(token)
                text = stream.push(b"" if ends else engine.piece(token))
                if text:
                    generation.emit(Piece(text))
                if ends or stream.stopped:
                    reason = "stop"
                    break
                self._check_wanted(generation)
        rest = stream.push(b"", final=True)
        if rest:
            generation.emit(Piece(rest))
        return Finished(reason, len(generation.tokens), timing.reused, timing.produced)

    def _check_wanted(self, generation: Generation) -> None:
        self._run_calls()
        if generation.cancelled.is_set() or self._stopping.is_set():
            raise AbandonedError


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the worker has to do."""

    running: int
    waiting: int
    sequences: int
    tokens_cached: int


@dataclass(slots=True)
class _Timing:
    submitted: float
    began: float
    first: float | None = None
    reused: int = 0
    produced: int = 0

    def token(self) -> None:
        self.produced += 1
        self.first = self.first or time.monotonic()

    def report(
        self, outcome: Literal["stop", "length", "cancelled", "error"], generation: Generation
    ) -> GenerationReport:
        now = time.monotonic()
        return GenerationReport(
            outcome,
            generation.workload,
            queued_s=self.began - self.submitted,
            prompt_s=(self.first or now) - self.began,
            decode_s=0.0 if self.first is None else now - self.first,
            first_token_s=None if self.first is None else self.first - self.submitted,
            prompt_tokens=len(generation.tokens),
            reused_tokens=self.reused,
            completion_tokens=self.produced,
        )
