"""What the readers give and what they share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = [
    "Limits",
    "Opened",
    "Parsed",
    "Problems",
    "Role",
    "Skipped",
    "Transcript",
    "Turn",
    "TurnList",
    "UnusableError",
    "describe",
]

_MOST_KINDS = 12
_NUMBER = re.compile(r"\d[\d,]*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}", re.ASCII)

Role = Literal["system", "user", "assistant", "tool", "text"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side said. Neighbouring parts of the same role are joined into one turn."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Opened:
    """How a conversation began whose root is too short to tell it from others."""

    lineage: str
    """Of the root alone, as it is where its time is not known."""
    at: str | None
    """When the root was written, ISO 8601, to the second, where that is known."""
    more: str | None = None
    """Of what the person wrote first, over as many messages as tell it from others; ``None`` where it is too little."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """One conversation. ``source`` is for messages on this machine and never leaves it."""

    lineage: str
    turns: tuple[Turn, ...]
    source: Path
    opened: Opened | None = None
    """Only where the root is short."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file, or lines of a file, that could not be used, and why."""

    source: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What one scan may read. The defaults are far above what coding tools write."""

    max_file_bytes: int = 256 * 1024 * 1024
    max_line_bytes: int = 16 * 1024 * 1024
    max_files: int = 100_000


class UnusableError(Exception):
    """The file can not be used; the text says why. Stays inside this package."""


@dataclass(slots=True)
class Problems:
    """Counts lines that could not be used, by kind, and remembers the first."""

    count: int = 0
    first: str = ""
    kinds: Counter[str] = field(default_factory=Counter)
    """Lines by what was found."""

    def add(self, line: int, what: str) -> None:
        """Count one line; ``what`` says what was found and what was expected."""
        self.count += 1
        if not self.first:
            self.first = f"line {line}: {what}"
        kind = _NUMBER.sub("…", what.partition(", expected")[0].removeprefix("found "))
        # A hostile file may name a new kind on every line.
        if kind not in self.kinds and len(self.kinds) >= _MOST_KINDS:
            kind = "others"
        self.kinds[kind] += 1

    def unknown(self, line: int, what: str, name: str) -> None:
        """Count one line, or a part of it, of a type that this version does not know."""
        self.add(line, f"found {what} of unknown type {name if _NAME.fullmatch(name) else 'with no plain name'}")

    def summary(self) -> str:
        """Say how many lines, of which kinds, and show the first."""
        lines = "1 line" if self.count == 1 else f"{self.count} lines"
        told = f"{lines} not used; {'it is' if self.count == 1 else 'the first is'} {self.first}"
        if len(self.kinds) < 2:
            return told
        return f"{told}; in all: {', '.join(f'{number} times {kind}' for kind, number in self.kinds.most_common())}"

    def each(
        self,
        lines: Iterable[tuple[int, dict[str, object]]],
        take: Callable[[int, dict[str, object]], None],
        expected: str,
    ) -> None:
        """Hand over every line; one whose JSON is nested too deeply is counted."""
        for number, record in lines:
            try:
                take(number, record)
            except RecursionError:
                self.add(number, f"found JSON nested too deeply, expected {expected}")

    def nothing(self) -> str:
        """What is wrong with a conversation without any text."""
        detail = f" ({self.summary()})" if self.count else ""
        return f"found no text to use, expected user or assistant messages{detail}"


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a reader makes of one file.

    ``continues`` marks a conversation that starts in a summary of an earlier one; ``summaries`` are the lineages that
    continuations of this conversation would have if read alone (see :mod:`spark_agent.transcripts.lineage`).
    """

    turns: tuple[Turn, ...]
    lineage: str
    problems: Problems = field(default_factory=Problems)
    continues: bool = False
    summaries: tuple[str, ...] = ()
    opened: Opened | None = None


class TurnList:
    """Collects turns, joins neighbours of one role and drops empty ones."""

    def __init__(self) -> None:
        self._roles: list[Role] = []
        self._parts: list[list[str]] = []

    def add(self, role: Role, text: str) -> None:
        """Append text to the conversation."""
        text = _printable(text).strip()
        if not text:
            return
        if self._roles and self._roles[-1] == role:
            self._parts[-1].append(text)
        else:
            self._roles.append(role)
            self._parts.append([text])

    def turns(self) -> tuple[Turn, ...]:
        """Return what was collected."""
        return tuple(Turn(role, "\n\n".join(parts)) for role, parts in zip(self._roles, self._parts, strict=True))


def describe(value: object) -> str:
    """Name what was found without repeating the person's text."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if type(value) in (int, float):
        return "a number"
    return names.get(type(value), type(value).__name__)


def _printable(text: str) -> str:
    """Replace what no tokenizer takes: NUL, and lone surrogates, which JSON escapes can smuggle in."""
    return text.replace("\0", "\ufffd").encode("utf-8", "surrogatepass").decode("utf-8", "replace")
