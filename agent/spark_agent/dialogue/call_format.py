"""How a format of tool calls is read, and what all of them share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from spark_agent.dialogue.events import Call
from spark_agent.dialogue.messages import Tool

__all__ = ["NOT_A_CALL", "CallFormat", "Read", "after_closers", "could_become", "json_end", "load_json", "skip_space"]

MAX_HEAD_CHARS = 300
"""Between a call's marker and its arguments; what is longer is text."""
_INSIDE = re.compile(r'[^"{}\[\]]+|"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Read:
    """What was read and how many characters it took; 0: what looked like a call is text."""

    calls: tuple[Call, ...]
    used: int


NOT_A_CALL = Read((), 0)


class CallFormat(Protocol):
    """A way to write calls."""

    markers: ClassVar[tuple[str, ...]]
    """What begins a call wherever it stands."""
    opening: ClassVar[tuple[str, ...]]
    """What begins a call at the start of an answer only."""
    ends: ClassVar[str]
    """Characters of which one is the last of every call."""

    def read(self, text: str, tools: Mapping[str, Tool], /, *, final: bool) -> Read | None:
        """Read the text, which begins with a marker; ``None`` until there is enough of it. It ends if ``final``."""


def skip_space(text: str, start: int) -> int:
    """The next position that holds no white space."""
    found = _SPACE.match(text, start)
    return found.end() if found else start


def could_become(text: str, wanted: Sequence[str]) -> bool:
    """Whether the text is the beginning of one of these, and not yet the whole of it."""
    return any(len(text) < len(word) and word.startswith(text) for word in wanted)


def json_end(text: str, start: int) -> int | None:
    """Where the object or array that begins at ``start`` ends; ``None`` while it does not.

    Only brackets and strings are followed; whether it is JSON is for :func:`load_json` to say.
    """
    depth, at = 0, start
    while (found := _INSIDE.match(text, at)) is not None:
        at = found.end()
        found_text = found[0]
        if found_text in "{[":
            depth += 1
        elif found_text in "}]":
            depth -= 1
            if depth <= 0:
                return at
    return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def load_json(text: str) -> Any:
    """The value, or ``None`` when it is no JSON. Line breaks inside strings are let pass: models write them."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def after_closers(text: str, at: int, closers: Sequence[str], *, final: bool) -> int | None:
    """The position after those of the closers that follow, in order, with white space before each.

    ``None`` while more text could bring one. Models forget closers; what is missing is not missed.
    """
    for closer in closers:
        begin = skip_space(text, at)
        if text.startswith(closer, begin):
            at = begin + len(closer)
        elif not final and closer.startswith(text[begin:]):
            return None
    return at
