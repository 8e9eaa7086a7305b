"""A model's output, taken apart as it streams: reasoning, text, calls.

Nothing that may turn out to be a call's markup is let out as text before it is certain; a call begins to come out with
its arguments, and what closes these only when all of it is certain. So no cut of the output into pieces changes what
comes out, and no broken call is one that a client could run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from spark_agent.dialogue.call_format import CallFormat, Reading
from spark_agent.dialogue.events import CallBroken, CallEnd, CallStart, Event, Reasoning, Text
from spark_agent.dialogue.markers import possible_start
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.source import Source

__all__ = ["CallReader", "OutputParser", "PlainParser", "TaggedParser"]


class OutputParser(Protocol):
    """Takes text as it comes."""

    def push(self, text: str) -> list[Event]:
        """What is certain by now."""

    def end(self, *, cut: bool = False) -> list[Event]:
        """What was held back; ``cut``: the model did not end, it was stopped."""


class PlainParser:
    """All output is the answer."""

    def push(self, text: str) -> list[Event]:
        """As :meth:`OutputParser.push`."""
        return [Text(text)] if text else []

    def end(self, *, cut: bool = False) -> list[Event]:  # noqa: ARG002
        """As :meth:`OutputParser.end`."""
        return []


class CallReader:
    """One reading of calls, on its way."""

    def __init__(self, source: Source, reading: Reading) -> None:
        self.source = source
        self.read: bool | None = None
        """Whether it was calls; ``None`` until that is known."""
        self.called = False
        """Whether a call was whole."""
        self._reading = reading
        self._open = False

    def go_on(self, *, final: bool) -> list[Event]:
        """What is certain by now; a call that has begun and is none ends with :class:`CallBroken`."""
        events: list[Event] = []
        self.source.final = final
        try:
            while (event := next(self._reading)) is not None:
                events.append(event)
                self._open = not isinstance(event, CallEnd) and (self._open or isinstance(event, CallStart))
                self.called = self.called or isinstance(event, CallEnd)
        except StopIteration as end:
            self.read = bool(end.value)
            if self._open:
                events.append(CallBroken())
        return events


class TaggedParser:
    """Reasoning between two tags, then text with calls in one format."""

    def __init__(
        self,
        calls: CallFormat | None,
        tools: Mapping[str, Tool],
        *,
        thinking: tuple[str, str] | None = None,
        in_thought: bool = False,
    ) -> None:
        """``thinking`` are the tags of reasoning; ``in_thought`` says that the prompt has opened it already."""
        self._calls = calls
        self._tools = tools
        self._opening, self._closing = thinking or ("", "")
        self._state = "thought" if thinking and in_thought else "start" if thinking else "answer"
        self._held = ""
        self._reader: CallReader | None = None
        self._marker = ""
        """Where the reader began."""
        self._space = ""
        """White space that is only let out when text follows."""
        self._bare = True
        """Nothing but white space and calls so far: leading space is dropped where reasoning or calls come before."""
        self._strip = self._state == "thought"
        self._called = False

    def push(self, text: str) -> list[Event]:
        """As :meth:`OutputParser.push`."""
        if self._reader is not None:
            self._reader.source.push(text)
        else:
            self._held += text
        return self._take(final=False)

    def end(self, *, cut: bool = False) -> list[Event]:  # noqa: ARG002
        """As :meth:`OutputParser.end`."""
        events = self._take(final=True)
        if self._space and not self._called and not self._strip:
            events.append(Text(self._space))
        self._space = ""
        return events

    def _take(self, *, final: bool) -> list[Event]:
        events: list[Event] = []
        if self._state == "start":
            self._begin(final=final)
        if self._state == "thought":
            self._think(events, final=final)
        if self._state == "answer":
            while self._answer(events, final=final):
                pass
        return events

    def _begin(self, *, final: bool) -> None:
        opening = self._opening
        text = self._held.lstrip()
        if text.startswith(opening):
            self._held, self._state, self._strip = text[len(opening) :], "thought", True
        elif final or not opening.startswith(text):
            self._state = "answer"

    def _think(self, events: list[Event], *, final: bool) -> None:
        closing = self._closing
        at = self._held.find(closing)
        if at >= 0:
            thought, self._held, self._state = self._held[:at], self._held[at + len(closing) :], "answer"
        else:
            at = len(self._held) if final else possible_start(self._held, (closing,))
            thought, self._held = self._held[:at], self._held[at:]
        thought = self._spaced(thought)
        if thought:
            events.append(Reasoning(thought))
            self._strip = False
        if self._state == "answer" or final:
            self._space, self._strip = "", True

    def _spaced(self, text: str) -> str:
        """The text with the space held before it; its own last space is held in turn."""
        text = self._space + text
        if self._strip:
            text = text.lstrip()
        bare = text.rstrip()
        self._space = text[len(bare) :]
        return bare

    def _say(self, events: list[Event], text: str) -> None:
        if self._calls is not None or self._strip:
            text = self._spaced(text)
        if text:
            events.append(Text(text))
            self._strip = False
            self._bare = self._bare and not text.strip()

    def _answer(self, events: list[Event], *, final: bool) -> bool:
        """One step; whether there may be another."""
        if self._reader is not None:
            return self._read(events, self._reader, final=final)
        if self._calls is None:
            self._say(events, self._held)
            self._held = ""
            return False
        at, marker = self._next_marker(self._calls)
        if marker is None:
            at = len(self._held) if final else possible_start(self._held, self._calls.markers)
            self._say(events, self._held[:at])
            self._held = self._held[at:]
            return False
        self._say(events, self._held[:at])
        source, self._held = Source(self._held[at:]), ""
        self._reader = CallReader(source, self._calls.read(source, self._tools))
        self._marker = marker
        return True

    def _read(self, events: list[Event], reader: CallReader, *, final: bool) -> bool:
        events.extend(reader.go_on(final=final))
        self._called = self._called or reader.called
        if reader.read is None:
            return False
        self._reader = None
        if reader.read or reader.source.settled:
            self._space, self._strip = "", True
        if reader.read:
            self._held = reader.source.rest
            return True
        self._held = reader.source.given_back
        if not reader.source.settled:
            self._say(events, self._marker)
            self._held = self._held[len(self._marker) :]
        return True

    def _next_marker(self, calls: CallFormat) -> tuple[int, str | None]:
        if self._bare:
            start = len(self._held) - len(self._held.lstrip())
            for marker in calls.opening:
                if self._held.startswith(marker, start):
                    return start, marker
        found = [(at, marker) for marker in calls.markers if (at := self._held.find(marker)) >= 0]
        return min(found) if found else (0, None)
