"""The one thread that computes. Requests wait in line; one whose client has left stops at its next step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Literal

from spark_agent.server.generation import AbandonedError, BusyError, Finished, Generation, Piece
from spark_agent.server.sessions import LiveSessions
from spark_runtime.chat import TextStream
from spark_runtime.engine import Engine
from spark_runtime.errors import ContextFullError

__all__ = ["Worker"]

MAX_WAITING = 64
_HOUSEKEEPING_S = 30.0


class Worker:
    """Owns the engine and the open sessions on one thread."""

    def __init__(self, engine: Engine, sessions: LiveSessions, on_error: Callable[[Exception], None]) -> None:
        self._engine = engine
        self._sessions = sessions
        self._on_error = on_error
        self._waiting: queue.Queue[Generation | None] = queue.Queue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-engine")

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
        self._waiting.put(generation)

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
                self._keep(self._sessions.close_all)
                return
            self._serve(generation)
            self._keep(self._sessions.tidy)

    def _keep(self, close: Callable[[], None]) -> None:
        # A full disk must not end the thread that answers requests: counts stay in memory and are tried again.
        try:
            close()
        except Exception as error:
            self._on_error(error)

    def _serve(self, generation: Generation) -> None:
        try:
            generation.emit(self._generate(generation))
        except Exception as error:
            # The request is answered with the error, whatever it was; the thread serves the next one.
            generation.emit(error)

    def _generate(self, generation: Generation) -> Finished:
        engine = self._engine
        if len(generation.tokens) >= engine.n_ctx:
            raise ContextFullError(
                f"a prompt of {len(generation.tokens)} tokens leaves no room in a context of {engine.n_ctx}",
                "shorten the conversation or start the agent with a larger --ctx",
            )
        self._check_wanted(generation)
        stream = TextStream(generation.stops)
        produced = 0
        reason: Literal["stop", "length"] = "length"
        room = engine.n_ctx - len(generation.tokens)
        limit = min(generation.max_tokens or room, room)
        with engine.counting(self._sessions.counts_of(generation.lineage)):
            reused = engine.prompt(generation.tokens, before_step=lambda: self._check_wanted(generation))
            for token in engine.generate(generation.sampling, limit):
                produced += 1
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
        return Finished(reason, len(generation.tokens), reused, produced, stream.stop)

    def _check_wanted(self, generation: Generation) -> None:
        if generation.cancelled.is_set() or self._stopping.is_set():
            raise AbandonedError
