"""Following grammars that are not trusted: in another process, which may hang or die in place of this one."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, cast

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


class _LostError(Exception):
    """The process died or took too long."""


class _Process:
    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "spark_runtime.grammar_process", str(model)]
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
        self.opened: set[int] = set()
        try:
            self._answer(START_S)
        except BaseException:
            self.end()
            raise

    def ask(self, operation: int, handle: int, argument: int = 0, payload: bytes = b"") -> bytes:
        try:
            self._requests.write(wire.HEADER.pack(operation, handle, argument, len(payload)) + payload)
        except OSError as error:
            raise _LostError from error
        return self._answer(STEP_S)

    def _answer(self, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        (size,) = wire.ANSWER.unpack(self._read(wire.ANSWER.size, deadline))
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        found = b""
        while len(found) < size:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._answers.fileno(), size - len(found)) if ready else b""
            if not part:
                raise _LostError
            found += part
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._answers.close()


class GrammarHost:
    """Starts the process when a grammar is first asked for, and again when one has ended it. Not thread-safe."""

    def __init__(self, model: Path, n_vocab: int) -> None:
        self._model = model
        self._process: _Process | None = None
        self._handles = 0
        self.n_vocab = n_vocab

    def follow(self, text: str) -> Grammar:
        """A grammar at its beginning; raise :class:`GrammarError` with why it cannot be followed."""
        raw = text.encode()
        if not text.strip() or len(raw) > MAX_GRAMMAR_BYTES or b"\0" in raw:
            raise GrammarError(
                f"a grammar of {len(raw)} bytes, expected 1 to {MAX_GRAMMAR_BYTES} bytes of GBNF text",
                "the rule 'root' says what an answer looks like",
            )
        self._handles += 1
        grammar = Grammar(self, self._handles, raw)
        grammar.start()
        return grammar

    @property
    def process(self) -> _Process:
        """The running process; raises :class:`GrammarError` when it cannot be started."""
        if self._process is None:
            try:
                self._process = _Process(self._model)
            except (OSError, _LostError) as error:
                raise GrammarError("the process that follows grammars does not start") from error
        return self._process

    def is_open(self, handle: int) -> bool:
        """Whether the process that runs, if any, knows a grammar."""
        return self._process is not None and handle in self._process.opened

    def close(self) -> None:
        """End the process; safe to call twice."""
        if self._process is not None:
            self._process.end()
            self._process = None


class Grammar:
    """One text's way through a grammar; see :class:`spark_runtime.sampling.FollowedGrammar`."""

    def __init__(self, host: GrammarHost, handle: int, text: bytes) -> None:
        self._host = host
        self._handle = handle
        self._text = text
        self._accepted: list[int] = []

    def start(self) -> None:
        """Read the grammar, and what was accepted so far; raises :class:`GrammarError`."""
        process = self._host.process
        fault = self._ask(wire.OPEN, payload=self._text)
        if fault:
            reason = " ".join(fault.decode(errors="replace").split())[:200]
            raise GrammarError(f"llama.cpp cannot read the grammar: {reason}", "expected GBNF with a rule 'root'")
        process.opened.add(self._handle)
        for token in self._accepted:
            self._ask(wire.ACCEPT, token)

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return self._step(wire.ALLOWS, token) == b"\1"

    def allowed(self) -> NDArray[np.bool_]:
        """Whether each token may come next, ``[n_vocab]``."""
        packed = np.frombuffer(self._step(wire.ALLOWED), dtype=np.uint8)
        return np.unpackbits(packed, count=self._host.n_vocab).astype(np.bool_)

    def accept(self, token: int) -> None:
        """Go on by a token that may come next."""
        self._step(wire.ACCEPT, token)
        self._accepted.append(token)

    def close(self) -> None:
        """Free it; safe to call twice."""
        if self._host.is_open(self._handle):
            self._host.process.opened.discard(self._handle)
            with contextlib.suppress(GrammarError):
                self._ask(wire.CLOSE)

    def _step(self, operation: int, token: int = 0) -> bytes:
        if not self._host.is_open(self._handle):
            self.start()  # another grammar ended the process
        return self._ask(operation, token)

    def _ask(self, operation: int, argument: int = 0, payload: bytes = b"") -> bytes:
        try:
            return self._host.process.ask(operation, self._handle, argument, payload)
        except _LostError as error:
            self._host.close()
            raise GrammarError(
                "llama.cpp fails on this grammar, or takes too long", "make it smaller and less ambiguous"
            ) from error
