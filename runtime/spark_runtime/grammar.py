"""Following grammars that are not trusted: in other processes, which may hang or die in place of this one.

Each grammar that is followed has a process to itself, so that one that hangs or dies takes no other with it, and nobody
waits here for an answer: what follows a grammar is a generator that yields while the process computes.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import IO, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from spark_runtime import grammar_process as wire
from spark_runtime.errors import GrammarError

__all__ = ["Grammar", "GrammarHost"]

MAX_GRAMMAR_BYTES = 256 * 1024
STEP_S = 2.0
"""A sensible grammar's slowest step over a large vocabulary takes a few hundredths of a second."""
START_S = 60.0
"""Loading a vocabulary, on a busy machine."""
PATIENCE_S = 0.005
"""An answer that comes so soon is waited for: letting others compute meanwhile takes longer."""
MAX_IDLE = 1
"""Processes that are kept for the next grammar; each holds the vocabulary."""
IDLE_S = 600.0
"""For how long: one that a small model's grammars need takes 35 MB."""
_T = TypeVar("_T")
_Waits = Generator[None, None, _T]


class _LostError(Exception):
    """The process died or took too long."""


class _Process:
    """Answers in the order in which it is asked; it loads its vocabulary first. Nothing here blocks."""

    def __init__(self, model: Path, spelled: Iterable[int]) -> None:
        command = [sys.executable, "-m", "spark_runtime.grammar_process", str(model), ",".join(map(str, spelled))]
        # Its own session: a terminal's interrupt is for whoever serves, which ends this one.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._requests, self._answers = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        os.set_blocking(self._requests.fileno(), False)
        os.set_blocking(self._answers.fileno(), False)
        self._unsent = self._unread = b""
        self._asked: deque[bool] = deque([False])
        """What was asked and not answered, oldest first: whether the answer is wanted."""
        self._deadline = time.monotonic() + START_S
        self._lost = False

    @property
    def busy(self) -> bool:
        """Whether anything asked has not been answered."""
        return bool(self._asked)

    def ask(self, operation: int, argument: int = 0, payload: bytes = b"", *, wanted: bool = True) -> None:
        """Ask; the answer to what is not wanted is dropped."""
        if not self._asked:
            self._deadline = time.monotonic() + STEP_S
        self._asked.append(wanted)
        self._unsent += wire.HEADER.pack(operation, argument, len(payload)) + payload

    def is_answered(self) -> bool:
        """Whether :meth:`answer` has one, or would raise."""
        self._pump()
        return self._lost or time.monotonic() > self._deadline or self._whole()

    def answer(self, wait_s: float = 0.0) -> bytes | None:
        """The next answer that is wanted, once it is there; raises :class:`_LostError`."""
        until = time.monotonic() + wait_s
        while True:
            self._pump()
            while (found := self._next()) is not None:
                if self._asked.popleft():
                    return found
                self._deadline = time.monotonic() + STEP_S
            now = time.monotonic()
            if self._lost or now > self._deadline:
                self._lost = True
                raise _LostError
            if now >= until or not self._asked:
                return None
            writing = [self._requests] if self._unsent else []
            select.select([self._answers], writing, [], until - now)

    def _pump(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._requests.fileno(), self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._lost = True
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._answers.fileno(), 1 << 20):
                self._unread += part
            self._lost = True

    def _whole(self) -> bool:
        """Whether one answer is there."""
        head = wire.ANSWER.size
        return len(self._unread) >= head and len(self._unread) >= head + wire.ANSWER.unpack_from(self._unread)[0]

    def _next(self) -> bytes | None:
        if not self._asked or not self._whole():
            return None
        end = wire.ANSWER.size + wire.ANSWER.unpack_from(self._unread)[0]
        found, self._unread = self._unread[wire.ANSWER.size : end], self._unread[end:]
        # What was asked next is begun now.
        self._deadline = time.monotonic() + STEP_S
        return found

    def end(self) -> None:
        """End it; safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._answers.close()


class GrammarHost:
    """Starts processes when grammars are asked for. Not thread-safe."""

    def __init__(self, model: Path, n_vocab: int) -> None:
        self._model = model
        self._idle: list[_Process] = []
        self._last_use_s = 0.0
        self._lent: set[_Process] = set()
        self.n_vocab = n_vocab
        self.spelled: set[int] = set()
        """Control tokens that have a text in answers; what is set after a process has started is for the next one."""

    def follow(self, text: str) -> Grammar:
        """A grammar at its beginning; raises :class:`GrammarError` for what is no grammar at first sight."""
        raw = text.encode()
        if not text.strip() or len(raw) > MAX_GRAMMAR_BYTES or b"\0" in raw:
            raise GrammarError(
                f"a grammar of {len(raw)} bytes, expected 1 to {MAX_GRAMMAR_BYTES} bytes of GBNF text",
                "the rule 'root' says what an answer looks like",
            )
        return Grammar(self, raw)

    def lend(self, *, fresh: bool = False) -> tuple[_Process, bool]:
        """A process for one grammar, and whether it has followed none before."""
        if self._idle and not fresh:
            process, fresh = self._idle.pop(), False
        else:
            try:
                process, fresh = _Process(self._model, self.spelled), True
            except OSError as error:
                raise GrammarError("the process that follows grammars does not start") from error
        self._lent.add(process)
        return process, fresh

    def end(self, process: _Process) -> None:
        """End a process that was lent."""
        self._lent.discard(process)
        process.end()

    def take_back(self, process: _Process) -> None:
        """A process that nobody uses any more."""
        if process.busy or len(self._idle) >= MAX_IDLE:
            self.end(process)
            return
        self._lent.discard(process)
        process.ask(wire.CLOSE, wanted=False)
        with contextlib.suppress(_LostError):
            process.answer()
        self._last_use_s = time.monotonic()
        self._idle.append(process)

    def tidy(self) -> None:
        """End processes that have not been used for :data:`IDLE_S`."""
        if time.monotonic() - self._last_use_s >= IDLE_S:
            while self._idle:
                self._idle.pop().end()

    def close(self) -> None:
        """End all processes; safe to call twice."""
        for process in (*self._idle, *self._lent):
            process.end()
        self._idle.clear()
        self._lent.clear()


class Grammar:
    """One text's way through a grammar; see :class:`spark_runtime.sampling.FollowedGrammar`."""

    def __init__(self, host: GrammarHost, text: bytes) -> None:
        self._host = host
        self._text = text
        self._opened = False
        self._process: _Process | None
        self._process, self._fresh = host.lend()
        self._process.ask(wire.OPEN, payload=text)

    def opened(self) -> _Waits[None]:
        """Wait until it is read; raises :class:`GrammarError` with why it cannot be."""
        if self._opened:
            return
        if not self._fresh:
            try:
                fault = yield from self._answer()
            except _LostError:
                # It may have been the grammar before this one.
                self._start_again()
                fault = yield from self._told()
        else:
            fault = yield from self._told()
        if fault:
            reason = " ".join(fault.decode(errors="replace").split())[:200]
            raise GrammarError(f"llama.cpp cannot read the grammar: {reason}", "expected GBNF with a rule 'root'")
        self._opened = True

    def _start_again(self) -> None:
        if self._process is not None:
            self._host.end(self._process)
            self._process, self._fresh = self._host.lend(fresh=True)
            self._process.ask(wire.OPEN, payload=self._text)

    def allows(self, token: int) -> _Waits[bool]:
        """Whether a token may come next."""
        return (yield from self._step(wire.ALLOWS, token)) == b"\1"

    def allowed(self) -> _Waits[NDArray[np.bool_]]:
        """Whether each token may come next, ``[n_vocab]``."""
        packed = np.frombuffer((yield from self._step(wire.ALLOWED)), dtype=np.uint8)
        return np.unpackbits(packed, count=self._host.n_vocab).astype(np.bool_)

    def accept(self, token: int) -> _Waits[None]:
        """Go on by a token that may come next."""
        yield from self._step(wire.ACCEPT, token)

    @property
    def waits(self) -> bool:
        """Whether what was asked last will take a while yet; when it never comes, asking on says so."""
        return self._process is not None and self._process.busy and not self._process.is_answered()

    def close(self) -> None:
        """Let go of it; safe to call twice."""
        if self._process is not None:
            self._host.take_back(self._process)
            self._process = None

    def _step(self, operation: int, token: int = 0) -> _Waits[bytes]:
        yield from self.opened()
        if self._process is None:
            raise GrammarError("the grammar was closed")
        self._process.ask(operation, token)
        return (yield from self._told())

    def _told(self) -> _Waits[bytes]:
        try:
            return (yield from self._answer())
        except _LostError as error:
            raise GrammarError(
                "llama.cpp fails on this grammar, or takes too long", "make it smaller and less ambiguous"
            ) from error

    def _answer(self) -> _Waits[bytes]:
        wait_s = PATIENCE_S
        while self._process is not None:
            if (found := self._process.answer(wait_s)) is not None:
                return found
            wait_s = 0.0
            yield
        raise GrammarError("the grammar was closed")
