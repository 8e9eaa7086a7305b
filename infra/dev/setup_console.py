"""What the set-up needs to talk to its user and to the programs it starts: progress, logs, errors, locks."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

TAIL_LINES = 15
SECONDS_BETWEEN_LINES = 15.0
SHARE_BETWEEN_LINES = 0.1
GRACE_SECONDS = 5.0

#: Reads how many of how many steps are done from a line of a program's output.
StepReader = Callable[[str], tuple[int, int] | None]

#: What to do about a failure, by what its log says. The first match wins, so the specific ones come first.
HINTS: Sequence[tuple[str, str]] = (
    (r"No space left on device", "free some disk space, then run the same command again"),
    (
        r"DO NOT MATCH THE HASHES",
        "a download differs from the lock: a damaged download or a changed package; try again, and do not bypass it",
    ),
    (
        r"Killed signal|out of memory|Cannot allocate memory",
        "memory ran out; try again with CMAKE_BUILD_PARALLEL_LEVEL=1",
    ),
    (
        r"No CMAKE_\w+_COMPILER|is not able to compile a simple test program|cannot execute .?cc1plus",
        "the compiler does not work; on Debian: apt-get install gcc g++",
    ),
    (r"Python\.h: No such file", "the Python headers are missing; on Debian: apt-get install python3-dev"),
    (
        r"Failed to establish a new connection|Name or service not known|name resolution|timed out|Connection"
        r" (aborted|refused|reset|broken)|ProxyError|SSLError|Could not fetch URL|IncompleteRead|HTTP error"
        r"|Network is unreachable|No matching distribution found",
        "the Python package index could not be reached, or lacks this release; check the network, proxy and pip"
        " settings, then run the same command again: it goes on where it stopped",
    ),
)


class SetupError(Exception):
    """The set-up cannot go on; says why and what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def say(text: str) -> None:
    """Tell the user something; never on stdout, which belongs to what runs after the set-up."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def hint_for(log: str) -> str:
    """Return what the user can do about a failure that left this log."""
    for pattern, hint in HINTS:
        if re.search(pattern, log):
            return hint
    return "the log has the whole story"


class Progress:
    """One line that is rewritten on a terminal; elsewhere a new line each 10% or 15 seconds."""

    def __init__(self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._started = clock()
        self._rewrites = self._stream.isatty()
        self._last_time = self._started
        self._last_share = 0.0
        self._open_line = False

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` steps are finished, if it is time to."""
        now, share = self._clock(), done / total if total else 0.0
        due = share - self._last_share >= SHARE_BETWEEN_LINES or now - self._last_time >= SECONDS_BETWEEN_LINES
        if not (self._rewrites or due):
            return
        self._last_time, self._last_share = now, share
        self._write(f"setup: {self._label} {done}/{total} ({self._elapsed(now)})")

    def close(self, outcome: str) -> None:
        """Show how it ended, and leave the cursor on a new line."""
        self._write(f"setup: {self._label} {outcome} ({self._elapsed(self._clock())})")
        if self._open_line:
            self._stream.write("\n")
        self._stream.flush()

    def _write(self, text: str) -> None:
        if self._rewrites:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[K" + text[:width])
            self._open_line = True
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def _elapsed(self, now: float) -> str:
        minutes, seconds = divmod(int(now - self._started), 60)
        return f"{minutes}:{seconds:02d}"


def stop_group(process: subprocess.Popen[str]) -> None:
    """End a program that we started as the leader of its own group, with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break  # all of them are gone
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def run_logged(
    command: Sequence[str],
    *,
    label: str,
    log: Path,
    read_step: StepReader | None = None,
    environment: Mapping[str, str] | None = None,
    keep_open: Sequence[int] = (),
) -> None:
    """Run a program, append its output to a log, and show progress read from its lines.

    `keep_open` are lock files: a program that outlives a killed set-up goes on holding them, so that the next
    set-up waits for it instead of working in the same folder.
    """
    progress = Progress(label)
    tail: deque[str] = deque(maxlen=200)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            pass_fds=keep_open,
            start_new_session=True,  # so that stop_group() reaches compilers too
        )
        assert process.stdout is not None
        try:
            with process.stdout:
                for line in process.stdout:
                    file.write(line)
                    tail.append(line)
                    if read_step and (step := read_step(line)):
                        progress.update(*step)
            status = process.wait()
        except BaseException:
            stop_group(process)
            progress.close("stopped")
            raise
    if status:
        progress.close("failed")
        shown = "".join(f"  | {line.rstrip()[:200]}\n" for line in list(tail)[-TAIL_LINES:])
        message = f"{label} failed with exit status {status}; last lines:\n{shown}  full log: {log}"
        raise SetupError(message, hint_for("".join(tail)))
    progress.close("done")


@contextmanager
def exclusive(path: Path, purpose: str) -> Iterator[int]:
    """Hold a lock file while the block runs; wait, and say so, while another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is {purpose}; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def clear_folder(folder: Path, keep: Sequence[str] = ()) -> None:
    """Remove what is in a folder, except the named entries; the folder itself stays."""
    for entry in folder.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
