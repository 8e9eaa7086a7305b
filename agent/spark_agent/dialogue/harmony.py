"""The harmony format of gpt-oss: messages on channels.

``<|channel|>analysis<|message|>`` is reasoning, ``final`` is the answer, ``commentary`` an answer too, unless it is
addressed to a function: ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from spark_agent.dialogue.call_format import Reading
from spark_agent.dialogue.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from spark_agent.dialogue.json_text import as_arguments, json_text
from spark_agent.dialogue.markers import possible_start
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.output_parser import CallReader
from spark_agent.dialogue.source import Source

__all__ = ["HARMONY_TOKENS", "HarmonyParser"]

HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADS = ("<|start|>", "<|channel|>", "<|constrain|>", " to=", "to=")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _call(source: Source, name: str) -> Reading:
    """A message to a function: its arguments, and nothing else until it ends; nothing at all is no arguments."""
    begin = yield from source.skip_space()
    if begin not in ("{", "") or (source.cut and not begin):
        return False
    yield CallStart(name)
    closed: str | None = "{}"
    if begin:
        closed = yield from as_arguments(json_text(source))
    if closed is None or (yield from source.skip_space()):
        return False
    yield CallArguments(closed)
    yield CallEnd()
    return True


class HarmonyParser:
    """Takes text as :class:`~spark_agent.dialogue.output_parser.OutputParser` does; it begins in a header."""

    def __init__(self, tools: Mapping[str, Tool], *, calls: bool = True) -> None:
        """Where no calls are wanted, what is addressed to a function is text."""
        self._tools = tools
        self._calls = calls
        self._held = ""
        self._in_header = True
        self._channel = "final"
        self._reader: CallReader | None = None

    def push(self, text: str) -> list[Event]:
        """As :meth:`OutputParser.push`."""
        self._held += text
        return self._take(final=False)

    def end(self, *, cut: bool = False) -> list[Event]:
        """As :meth:`OutputParser.end`."""
        if self._reader is not None:
            self._reader.source.cut = cut
        return self._take(final=True)

    def _take(self, *, final: bool) -> list[Event]:
        events: list[Event] = []
        while self._header(final=final) if self._in_header else self._body(events, final=final):
            pass
        return events

    def _header(self, *, final: bool) -> bool:
        """Read a header; whether its message can be read."""
        head = self._held.lstrip() or self._held
        if not head:
            return False
        if not head.startswith(_HEADS):
            if (not final and any(word.startswith(head) for word in _HEADS)) or head.isspace():
                return False
            if head.startswith(_ENDS):
                self._held = head[len(next(end for end in _ENDS if head.startswith(end))) :]
                return True
            if not final and any(word.startswith(head) for word in _ENDS):
                return False
            # A model that uses no channels: what it says is the answer.
            self._in_header, self._channel = False, "final"
            return True
        at = self._held.find("<|message|>")
        if at < 0:
            if final:
                self._held = ""
            return False
        header, self._held = self._held[:at], self._held[at + len("<|message|>") :]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and self._calls:
            source = Source("")
            self._reader = CallReader(source, _call(source, recipient[1].removeprefix("functions.")))
        self._channel = channel[1] if channel else "final"
        self._in_header = False
        return True

    def _body(self, events: list[Event], *, final: bool) -> bool:
        """Read a message; whether another header may follow."""
        found = [(at, end) for end in _ENDS if (at := self._held.find(end)) >= 0]
        at, end = min(found, default=(len(self._held) if final else possible_start(self._held, _ENDS), ""))
        text, self._held = self._held[:at], self._held[at:]
        if self._reader is not None:
            self._reader.source.push(text)
            events.extend(self._reader.go_on(final=final or bool(end)))
            text = self._reader.source.given_back if self._reader.read is False else ""
            if self._reader.read is not None:
                self._reader = None
        if text:
            events.append(Reasoning(text) if self._channel == "analysis" else Text(text))
        self._leave(end)
        return bool(end)

    def _leave(self, end: str) -> None:
        if end:
            self._in_header = True
            # The start of the next message belongs to its header.
            if end != "<|start|>":
                self._held = self._held[len(end) :]
