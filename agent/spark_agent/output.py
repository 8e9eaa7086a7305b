"""How the agent talks: data to stdout, everything else to stderr, one JSON object when asked for JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol, TextIO, runtime_checkable

import typer

from spark_agent.env import Environment

__all__ = ["Fault", "Output", "counted", "report_fault", "run_app"]

_STYLES = {"error": "31;1", "warning": "33", "hint": "36"}
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE, as shells report a reader that went away."""


@runtime_checkable
class Fault(Protocol):
    """What an expected failure looks like, whichever package raised it."""

    exit_code: int
    hint: str | None


@runtime_checkable
class _CommandLineFault(Protocol):
    """What the command-line parser raises; matched by shape, as Typer has moved these classes between packages."""

    exit_code: int

    def format_message(self) -> str: ...

    def show(self) -> None: ...


class Output:
    """One command's voice."""

    def __init__(self, *, json_mode: bool = False, environment: Environment | None = None) -> None:
        self.json_mode = json_mode
        self._environment = Environment.read() if environment is None else environment
        self._printed = False

    def result(self, value: Mapping[str, object], human: str | Callable[[], None] | None = None) -> None:
        """Report what the command found: the object itself in JSON mode, else the text (or what the call prints).

        Raises :class:`RuntimeError` on a second object in JSON mode: readers parse exactly one.
        """
        if self.json_mode:
            if self._printed:
                raise RuntimeError("a command prints exactly one JSON object")
            self._printed = True
            sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
        elif callable(human):
            human()
        elif human is not None:
            sys.stdout.write(_printable(human) + "\n")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print aligned columns, numbers to the right; in JSON mode ``{"rows": [{column: value}]}``."""
        if self.json_mode:
            self.result({"rows": [dict(zip(columns, row, strict=True)) for row in rows]})
            return
        cells = [[_printable(str(cell)) for cell in row] for row in rows]
        widths = [max(len(line[index]) for line in (columns, *cells)) for index in range(len(columns))]
        numeric = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
        for line in (columns, *cells):
            padded = (
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, numeric, strict=True)
            )
            sys.stdout.write("  ".join(padded).rstrip() + "\n")

    def info(self, message: str) -> None:
        """Say what is happening."""
        _say(sys.stderr, None, message, color=self._color)

    def warning(self, message: str) -> None:
        """Say what a person should know although the command goes on."""
        _say(sys.stderr, "warning", message, color=self._color)

    def error(self, message: str, hint: str | None = None) -> None:
        """Say what failed, and what to do next."""
        _say(sys.stderr, "error", message, color=self._color)
        if hint is not None:
            self.hint(hint)

    def hint(self, message: str) -> None:
        """Say what to do next."""
        _say(sys.stderr, "hint", message, color=self._color)

    @contextmanager
    def progress(self, description: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
        """Yield a function that advances a bar by so many steps; without a terminal it draws nothing.

        ``total`` is the number of steps, ``None`` when nobody knows.
        """
        if self._environment.no_progress or not sys.stderr.isatty():
            yield _advance_nothing
            return
        # Costs 95 ms to import, so only when there is something to draw.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True, no_color=self._environment.no_color or None)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(_printable(description), total=total)
            yield lambda steps: bar.advance(task, steps)

    @property
    def _color(self) -> bool:
        return sys.stderr.isatty() and not self._environment.no_color and os.environ.get("TERM") != "dumb"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def report_fault(fault: BaseException) -> int:
    """Print ``error:`` and ``hint:`` of an expected failure and return its exit code; raise anything else again."""
    color = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if isinstance(fault, _CommandLineFault):
        if type(fault).__name__ == "NoArgsIsHelpError":
            fault.show()
        else:
            _say(sys.stderr, "error", fault.format_message(), color=color)
            context = getattr(fault, "ctx", None)
            if context is not None:
                _say(sys.stderr, "hint", f"{context.command_path} --help", color=color)
        return fault.exit_code
    if isinstance(fault, Fault):
        _say(sys.stderr, "error", str(fault), color=color)
        if fault.hint is not None:
            _say(sys.stderr, "hint", fault.hint, color=color)
        return fault.exit_code
    raise fault


def run_app(app: typer.Typer, args: Sequence[str] | None = None) -> NoReturn:
    """Run a Typer app and exit: expected failures without a traceback, bugs with one.

    Exit codes: 0 done, 1 failed, 2 wrong command line, 3 refused for safety, 130 interrupted, 141 reader went away.
    """
    sys.exit(_run(app, args))


def _run(app: typer.Typer, args: Sequence[str] | None) -> int:
    try:
        result = typer.main.get_command(app).main(args=None if args is None else list(args), standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as leaving:
        # Typer itself turns a broken pipe into this.
        if isinstance(leaving.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except Exception as fault:
        return report_fault(fault)
    # `typer.Exit` arrives as its code; newer Typer turns an interrupt into one as well.
    if result == INTERRUPTED:
        return _interrupted()
    return result if isinstance(result, int) else 0


def _reader_gone() -> int:
    # The interpreter flushes stdout once more at exit; let that go nowhere.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return BROKEN_PIPE


def _interrupted() -> int:
    sys.stderr.write("interrupted\n")
    return INTERRUPTED


def _advance_nothing(steps: float) -> None:
    """Stand in for a bar that nobody sees."""


def _say(stream: TextIO, kind: str | None, message: str, *, color: bool) -> None:
    label = ""
    if kind is not None:
        label = f"\x1b[{_STYLES[kind]}m{kind}:\x1b[0m " if color else f"{kind}: "
    stream.write(label + _printable(message) + "\n")


def _printable(text: str) -> str:
    # A peer's words may hold terminal control sequences; only line breaks and tabs pass.
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
