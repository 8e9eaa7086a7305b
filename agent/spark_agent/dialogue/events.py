"""What a model's output consists of: as it streams, and put together again."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = [
    "Call",
    "CallArguments",
    "CallBroken",
    "CallEnd",
    "CallStart",
    "Event",
    "Part",
    "Reasoning",
    "Text",
    "call_events",
    "certain",
    "joined",
    "merged",
    "sendable",
]


@dataclass(frozen=True, slots=True)
class Text:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: its name is known, and its arguments have begun."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the JSON text of a call's arguments.

    What closes their object comes last, once the call is certain: until then the text is no JSON, and nobody runs it.
    """

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is whole."""


@dataclass(frozen=True, slots=True)
class CallBroken:
    """What began as a call is none after all; its markup follows as text."""


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call; ``arguments`` is JSON text of an object."""

    name: str
    arguments: str


Event = Text | Reasoning | CallStart | CallArguments | CallEnd | CallBroken
Part = Text | Reasoning | Call


def call_events(name: object, arguments: object) -> list[Event] | None:
    """The events of a whole call, if these can be the name and the arguments of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    text = sendable(json.dumps(arguments, ensure_ascii=False))
    return [CallStart(sendable(name)), CallArguments(text), CallEnd()]


def sendable(text: str) -> str:
    """The text with lone surrogates, which JSON can spell and nothing can send, as replacement characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events, with neighbouring parts of one text made one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text | Reasoning | CallArguments) and type(last) is type(event):
            result[-1] = type(event)(last.text + event.text)
        else:
            result.append(event)
    return result


def certain(events: Iterable[Event], streamed: Collection[str] = ()) -> tuple[list[Event], list[Event]]:
    """The events that nothing takes back, without calls that broke, and the beginning of a call that may yet break.

    Calls of the tools in ``streamed`` are told as they come all the same, with :class:`CallBroken`.
    """
    told: list[Event] = []
    begun: list[Event] = []
    for event in events:
        if begun or (isinstance(event, CallStart) and event.name not in streamed):
            begun.append(event)
            if isinstance(event, CallEnd):
                told += begun
            if isinstance(event, CallEnd | CallBroken):
                begun = []
        else:
            told.append(event)
    return joined(told), joined(begun)


def merged(events: Iterable[Event]) -> list[Part]:
    """What was said in all: whole calls, and neighbouring texts as one. A call that broke is the text that follows."""
    kept: list[Event | Call] = []
    start: int | None = None
    for event in joined(events):
        if isinstance(event, CallStart):
            start = len(kept)
        elif isinstance(event, CallEnd | CallBroken) and start is not None:
            begun, kept[start:] = kept[start:], []
            if isinstance(event, CallEnd):
                texts = [each.text for each in begun if isinstance(each, CallArguments)]
                names = [each.name for each in begun if isinstance(each, CallStart)]
                kept.append(Call(names[0], "".join(texts)))
            start = None
            continue
        kept.append(event)
    return _parts(kept if start is None else kept[:start])


def _parts(kept: list[Event | Call]) -> list[Part]:
    result: list[Part] = []
    for each in kept:
        last = result[-1] if result else None
        if isinstance(each, Text | Reasoning) and type(last) is type(each):
            result[-1] = type(each)(last.text + each.text)
        elif isinstance(each, Text | Reasoning | Call):
            result.append(each)
    return result
