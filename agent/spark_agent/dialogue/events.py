"""What a model's output consists of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "Event", "Reasoning", "Text", "call_of", "merged"]


@dataclass(frozen=True, slots=True)
class Text:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call; ``arguments`` is JSON text of an object."""

    name: str
    arguments: str


Event = Text | Reasoning | Call


def call_of(name: object, arguments: object) -> Call | None:
    """A call, if these can be the name and the arguments of one.

    Lone surrogates, which JSON can spell and nothing can send, become replacement characters.
    """
    if isinstance(arguments, str):
        arguments = _object_of(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return Call(_sendable(name), _sendable(json.dumps(arguments, ensure_ascii=False)))


def _object_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _sendable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def merged(events: Iterator[Event] | list[Event]) -> list[Event]:
    """The same events, with neighbouring texts made one: independent of how the output was cut into pieces."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        else:
            result.append(event)
    return result
