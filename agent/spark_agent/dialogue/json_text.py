"""JSON as a model writes it, checked while it comes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator
from typing import Any, TypeVar

from spark_agent.dialogue.events import CallArguments, Event
from spark_agent.dialogue.source import Source

__all__ = ["MAX_DEPTH", "Pieces", "as_arguments", "captured", "json_text", "load_json"]

MAX_DEPTH = 100
"""Of brackets in brackets: clients' parsers end not far beyond."""
MAX_SCALAR_CHARS = 1000
"""Of a number: clients' parsers refuse longer ones."""
_T = TypeVar("_T")
Pieces = Generator[str | None, None, _T]
"""Yields text that is certain, and ``None`` where more is needed."""
_SPACE = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.\w]+", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_UNIT = re.compile(r"\\u[0-9a-fA-F]{4}")
_SECOND_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BEGUN_UNIT = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")


def json_text(source: Source) -> Pieces[str | None]:
    """Read one value, which begins at the source's front; return what closes it, which is not yielded, or ``None``.

    The text is passed on as it is, but for what nobody could read or send: line breaks and other control characters
    inside strings are escaped (models write them), halves of surrogate pairs become replacement characters.
    """
    open_brackets: list[str] = []
    wanted = "value"
    while char := (yield from source.char()):
        if char in " \t\n\r":
            yield source.take_all(_SPACE)
        elif wanted in ("more", "first key", "first value") and char == open_brackets[-1]:
            source.take(1)
            closed = open_brackets.pop()
            if not open_brackets:
                return closed
            yield closed
            wanted = "more"
        elif wanted in ("colon", "more"):
            if char != {"colon": ":", "more": ","}[wanted]:
                return None
            yield source.take(1)
            wanted = "key" if wanted == "more" and open_brackets[-1] == "}" else "value"
        elif wanted in ("key", "first key"):
            if char != '"' or not (yield from _string(source)):
                return None
            wanted = "colon"
        else:
            wanted = yield from _value(source, char, open_brackets)
            if not wanted or not open_brackets:
                return "" if wanted else None
    return None


def _value(source: Source, char: str, open_brackets: list[str]) -> Pieces[str]:
    """Read a string or scalar, or open a bracket; what is wanted next, empty when it is no value."""
    if char in "{[":
        if len(open_brackets) >= MAX_DEPTH:
            return ""
        open_brackets.append("}" if char == "{" else "]")
        yield source.take(1)
        return "first key" if char == "{" else "first value"
    read = yield from _string(source) if char == '"' else _scalar(source)
    return "more" if read else ""


def _string(source: Source) -> Pieces[bool]:
    yield source.take(1)
    while char := (yield from source.char()):
        if char == '"':
            yield source.take(1)
            return True
        if char == "\\":
            if not (yield from _escape(source)):
                return False
        else:
            yield source.take_all(_PLAIN) or json.dumps(source.take(1))[1:-1]
    return False


def _escape(source: Source) -> Pieces[bool]:
    while len(source.rest) < 2 and not source.final:
        yield None
    kind = source.rest[1:2]
    if kind and kind in '"\\/bfnrt':
        yield source.take(2)
        return True
    while len(source.rest) < 6 and not source.final and _BEGUN_UNIT.fullmatch(source.rest):
        yield None
    if not _UNIT.match(source.rest):
        return False
    code = int(source.rest[2:6], 16)
    if not 0xD800 <= code < 0xE000:
        yield source.take(6)
        return True
    first = source.take(6)
    if code < 0xDC00:
        while not source.final and _BEGUN_UNIT.fullmatch(source.rest):
            yield None
        second = source.take_all(_SECOND_HALF)
        yield first + second if second else "\ufffd"
    else:
        yield "\ufffd"
    return True


def _scalar(source: Source) -> Pieces[bool]:
    text = ""
    while True:
        text += source.take_all(_SCALAR)
        if source.rest or source.final or len(text) > MAX_SCALAR_CHARS:
            break
        yield None
    number = _NUMBER.fullmatch(text) is not None and len(text) <= MAX_SCALAR_CHARS and math.isfinite(float(text))
    if number or text in ("true", "false", "null"):
        yield text
        return True
    return False


def as_arguments(pieces: Pieces[_T]) -> Generator[Event | None, None, _T]:
    """The same, as parts of a call's arguments."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            result: _T = end.value
            return result
        yield None if piece is None else CallArguments(piece)


def captured(pieces: Pieces[_T], into: list[str]) -> Generator[None, None, _T]:
    """The same, with the text kept instead of yielded."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            result: _T = end.value
            return result
        if piece is None:
            yield
        else:
            into.append(piece)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def load_json(text: str) -> Any:
    """The value, or ``None`` when it is no JSON. Line breaks inside strings are let pass: models write them."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
