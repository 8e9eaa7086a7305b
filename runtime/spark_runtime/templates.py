"""Chat templates, which are not trusted, rendered by a process that may hang or die in place of this one.

One process serves all templates of this one. It is started for the first, and again after it was lost.
"""

from __future__ import annotations

import atexit
import itertools
import marshal
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spark_runtime import template_process as wire
from spark_runtime.errors import ChatTemplateError

__all__ = ["ChatTemplate", "rendering"]

CPU_S = 5.0
"""Processor time for a prompt; the slowest template takes some milliseconds for a long conversation."""
MEMORY_BYTES = 2**30
"""What templates may take beyond the process itself."""
_WAIT_S = 120.0
"""For an answer, on a busy machine: the process ends itself after its processor time."""
_MAX_LOST = 2
"""Processes that a template may cost before it has ever rendered anything; it is not asked again then."""
_PASSED_ON = ("HOME", "LANG", "LC_", "LD_", "PYTHON", "TZ")
"""How the variables begin that the process is started with; it needs no keys."""
_PROGRAM = Path(__file__).with_name("template_process.py")


class _LostError(Exception):
    """The process died or took too long."""


class _Meanwhile:
    """Work for the time in which the process renders. It is done once, and what it raises waits until it was read."""

    def __init__(self, work: Callable[[], object] | None = None) -> None:
        self._work = work
        self._fault: Exception | None = None

    def __call__(self) -> None:
        work, self._work = self._work, None
        try:
            if work is not None:
                work()
        except Exception as fault:
            self._fault = fault

    def finish(self) -> None:
        """Raise what the work raised."""
        self()
        if self._fault is not None:
            raise self._fault


class _Process:
    """A process and the numbers of the templates that it has been sent."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_WAIT_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(CPU_S), str(MEMORY_BYTES)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)},
                # A terminal's interrupt is for whoever serves, which ends this one.
                start_new_session=True,
            )
        self.sent: set[int] = set()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes, meanwhile: _Meanwhile) -> tuple[int, str]:
        """Status and text; raises :class:`_LostError`."""
        try:
            self._socket.sendall(wire.REQUEST.pack(len(request)) + request)
            meanwhile()
            status, length = wire.ANSWER.unpack(self._read(wire.ANSWER.size))
            if length > wire.MAX_ANSWER_BYTES:
                raise _LostError
            return status, self._read(length).decode(errors="surrogatepass")
        except (OSError, ValueError) as error:
            raise _LostError from error

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise _LostError
            view = view[received:]
        return data

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


class _Host:
    """The one process, and whose turn it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def ask(
        self, template: ChatTemplate, variables: Mapping[str, Any] | None, meanwhile: _Meanwhile
    ) -> tuple[int, str]:
        number = template.number
        request = _request(template, variables, source=False)
        with self._lock:
            process = self._running()
            try:
                if number in process.sent:
                    answer = process.ask(request, meanwhile)
                    if answer[0] != wire.UNKNOWN:
                        return answer
                process.sent.add(number)
                return process.ask(_request(template, variables, source=True), meanwhile)
            except BaseException:
                # Also where this thread is interrupted: the answer would be taken for the next one's.
                self._process = None
                process.end()
                raise

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    def _running(self) -> _Process:
        if self._process is not None and not self._process.alive:
            self._process.end()
            self._process = None
        if self._process is None:
            self._process = _Process()
        return self._process

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def forget(self) -> None:
        """In a forked copy of this process: the other one is its parent's."""
        self.__init__()  # type: ignore[misc]


def _request(template: ChatTemplate, variables: Mapping[str, Any] | None, *, source: bool) -> bytes:
    parts: Any = (template.number, template.source if source else None, template.constants, variables)
    try:
        return marshal.dumps(parts)
    except ValueError as error:
        raise ChatTemplateError(f"a chat template takes only what JSON can say: {error}") from error


_HOST = _Host()
atexit.register(_HOST.close)
os.register_at_fork(after_in_child=_HOST.forget)
_NUMBERS = itertools.count()


def rendering() -> bool:
    """Whether the process is busy: who renders now waits for another one's text."""
    return _HOST.busy


class ChatTemplate:
    """A Jinja template with the functions, filters and options that Hugging Face's Transformers gives it.

    It may change lists and objects, its own or those given, which are copies; others never see it.
    """

    def __init__(self, source: str, constants: Mapping[str, str]) -> None:
        """Raises :class:`ChatTemplateError` for what is no template. ``constants`` are variables of every prompt."""
        self.source = source
        self.constants = dict(constants)
        self.number = next(_NUMBERS)
        self._lost: int | None = 0
        """Processes that were lost; ``None`` once it has rendered something: then a prompt may be at fault."""
        status, reason = self._ask(None, _Meanwhile())
        if status != wire.RENDERED:
            raise ChatTemplateError(f"the model's chat template cannot be read: {reason}")

    def render(self, variables: Mapping[str, Any], meanwhile: Callable[[], object] | None = None) -> str:
        """The text; raises :class:`ChatTemplateError` with the template's own reason where it refuses.

        ``variables`` hold what JSON can say. ``meanwhile`` is called once, while the text is made elsewhere: what need
        not wait for it takes no time then. It must not render itself, and what it raises is raised when the text came.
        """
        work = _Meanwhile(meanwhile)
        status, text = self._ask(dict(variables), work)
        if status != wire.RENDERED:
            raise ChatTemplateError(
                f"the model's chat template rejects these messages: {text}",
                "check the order of roles and that every content is text",
            )
        work.finish()
        return text

    def _ask(self, variables: Mapping[str, Any] | None, meanwhile: _Meanwhile) -> tuple[int, str]:
        try:
            if self._lost is not None and self._lost >= _MAX_LOST:
                raise _LostError
            answer = _HOST.ask(self, variables, meanwhile)
            if variables is not None and answer[0] == wire.RENDERED:
                self._lost = None
            return answer
        except (_LostError, OSError) as error:
            if self._lost is not None:
                self._lost += 1
            raise ChatTemplateError(
                "the model's chat template fails, or takes too much time or memory",
                "if a short conversation fails, too, take the model file from its publisher",
            ) from error
