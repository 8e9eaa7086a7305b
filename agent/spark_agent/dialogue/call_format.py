"""How a format of tool calls is read, and what all of them share."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Protocol

from spark_agent.dialogue.events import CallArguments, CallEnd, CallStart, Event
from spark_agent.dialogue.json_text import as_arguments, json_text
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.source import Source

__all__ = ["MAX_HEAD_CHARS", "CallFormat", "Reading", "json_arguments"]

MAX_HEAD_CHARS = 300
"""Between a call's marker and its arguments; what is longer is text."""
Reading = Generator[Event | None, None, bool]
"""Yields the events of calls as they are certain, and ``None`` where more text is needed.

Returns whether everything taken was calls. If not, what was not settled is text.
"""


class CallFormat(Protocol):
    """A way to write calls."""

    @property
    def name(self) -> str:
        """What documents call it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """What begins a call wherever it stands."""

    @property
    def opening(self) -> tuple[str, ...]:
        """What begins a call at the start of an answer only."""

    @property
    def special(self) -> tuple[str, ...]:
        """All markup that is needed as text even where it is a control token, which has none."""

    def read(self, source: Source, tools: Mapping[str, Tool], /) -> Reading:
        """Read calls from a source that begins with a marker."""


def json_arguments(source: Source, name: str) -> Reading:
    """A whole call whose arguments, an object, begin at the source's front."""
    yield CallStart(name)
    closed = yield from as_arguments(json_text(source))
    if closed is None:
        return False
    yield CallArguments(closed)
    yield CallEnd()
    source.settle()
    return True
