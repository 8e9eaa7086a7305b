"""The harmony format of gpt-oss: messages on channels.

``<|channel|>analysis<|message|>`` is reasoning, ``final`` is the answer, ``commentary`` an answer too, unless it is
addressed to a function: ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from spark_agent.dialogue.call_format import load_json
from spark_agent.dialogue.events import Event, Reasoning, Text, call_of
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.output_parser import possible_start

__all__ = ["HARMONY_TOKENS", "HarmonyParser"]

HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADS = ("<|start|>", "<|channel|>", "<|constrain|>", " to=", "to=")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """Takes text as :class:`~spark_agent.dialogue.output_parser.OutputParser` does; it begins in a header."""

    def __init__(self, tools: Mapping[str, Tool], *, calls: bool = True) -> None:
        """Where no calls are wanted, what is addressed to a function is text."""
        self._tools = tools
        self._calls = calls
        self._held = ""
        self._in_header = True
        self._channel = "final"
        self._recipient: str | None = None

    def push(self, text: str) -> list[Event]:
        """As :meth:`OutputParser.push`."""
        self._held += text
        return self._take(final=False)

    def end(self) -> list[Event]:
        """As :meth:`OutputParser.end`."""
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
            self._in_header, self._channel, self._recipient = False, "final", None
            return True
        at = self._held.find("<|message|>")
        if at < 0:
            if final:
                self._held = ""
            return False
        header, self._held = self._held[:at], self._held[at + len("<|message|>") :]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._recipient = recipient[1].removeprefix("functions.") if recipient else None
        self._channel = channel[1] if channel else "final"
        self._in_header = False
        return True

    def _body(self, events: list[Event], *, final: bool) -> bool:
        """Read a message; whether another header may follow."""
        found = [(at, end) for end in _ENDS if (at := self._held.find(end)) >= 0]
        if self._recipient is not None and self._calls:
            return self._call(events, min(found, default=None), final=final)
        at, end = min(found, default=(len(self._held) if final else possible_start(self._held, _ENDS), ""))
        text, self._held = self._held[:at], self._held[at:]
        if text:
            events.append(Reasoning(text) if self._channel == "analysis" else Text(text))
        self._leave(end)
        return bool(end)

    def _call(self, events: list[Event], found: tuple[int, str] | None, *, final: bool) -> bool:
        if found is None and not final:
            return False
        at, end = found or (len(self._held), "")
        text, self._held = self._held[:at], self._held[at:]
        call = call_of(self._recipient, load_json(text.strip() or "{}"))
        if call is not None:
            events.append(call)
        elif text:
            events.append(Text(text))
        self._recipient = None
        self._leave(end)
        return bool(end)

    def _leave(self, end: str) -> None:
        if end:
            self._in_header = True
            # The start of the next message belongs to its header.
            if end != "<|start|>":
                self._held = self._held[len(end) :]
