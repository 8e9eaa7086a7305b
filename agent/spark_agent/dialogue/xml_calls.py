"""Formats whose arguments stand one by one between tags: Qwen3-Coder, GLM-4.5, MiniMax-M2.

Values are written bare. A parameter declared as a string is one, and streams; any other is JSON where it can be read as
such, with whatever its strings hold, and comes whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_agent.dialogue.call_format import MAX_HEAD_CHARS, Reading
from spark_agent.dialogue.events import CallArguments, CallEnd, CallStart, sendable
from spark_agent.dialogue.json_text import json_text, load_json
from spark_agent.dialogue.markers import possible_start
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.source import Source, Waits

__all__ = ["GLM", "MINIMAX", "QWEN_CODER", "SEED", "TaggedCalls", "is_text"]

_NAME = re.compile(r"[\w.:/-]+")
_SPACE = re.compile(r"\s*")


def is_text(schema: object) -> bool:
    """Whether a parameter is declared as a string, and as nothing else."""
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if kind is None:
        values = schema.get("enum")
        return isinstance(values, list) and all(isinstance(value, str) for value in values)
    return kind in ("string", ["string"])


def _spelled(value: object) -> str:
    return sendable(json.dumps(value, ensure_ascii=False))


def _bare_value(text: str) -> str:
    """The JSON text of what stands between tags."""
    stripped = text.strip()
    value: Any = load_json(stripped)
    return _spelled(text if value is None and stripped != "null" else value)


def _json_before(source: Source, close: str) -> Waits[int | None]:
    """Where ``close`` stands right after a JSON value at the front, whose strings may hold it; ``None`` without one.

    A line break inside a string more likely means that its end was forgotten: then the first ``close`` is meant.
    """
    ahead, seen = Source(source.rest), len(source.rest)
    pieces = json_text(ahead)
    while True:
        ahead.push(source.rest[seen:])
        ahead.final, seen = source.final, len(source.rest)
        try:
            while (piece := next(pieces)) is not None:
                if piece == "\\n" and source.rest[seen - len(ahead.rest) - 1] == "\n":
                    return None
        except StopIteration as end:
            if end.value is None:
                return None
            break
        yield
    at = seen - len(ahead.rest)
    while True:
        space = _SPACE.match(source.rest, at)
        tag = at if space is None else space.end()
        if source.rest.startswith(close, tag):
            return tag
        if source.final or not close.startswith(source.rest[tag:]):
            return None
        yield


@dataclass(frozen=True)
class TaggedCalls:
    """``open name … key value … close``, by the tags of one format."""

    name: str
    outer: tuple[str, str]
    """What may stand around calls; empty where nothing does."""
    call: tuple[str, str, str]
    """Before the name, after it (``<`` is the next tag's and is left), and the end."""
    key: tuple[str, str]
    value: tuple[str, str]
    written: tuple[str, str, str, str]
    """As the model writes them, with line breaks: head of a call, of an argument, end of an argument, of a call."""
    opening: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """As :attr:`CallFormat.markers`."""
        return tuple(filter(None, (self.outer[0], self.call[0])))

    @property
    def special(self) -> tuple[str, ...]:
        """As :attr:`CallFormat.special`."""
        words = (*self.outer, self.call[0], self.call[2], *self.key, *self.value)
        return tuple(word for word in words if len(word) > 1)

    def read(self, source: Source, tools: Mapping[str, Tool], /) -> Reading:
        """As :meth:`CallFormat.read`."""
        opened = bool(self.outer[0]) and source.rest.startswith(self.outer[0])
        if opened:
            source.take(len(self.outer[0]))
            yield from source.skip_space()
            if not (yield from source.word((self.call[0],))):
                return False
        while True:
            if not (yield from self._call(source, tools)):
                return False
            if not opened:
                return True
            yield from source.skip_closers((self.outer[1],))
            # Another one inside the same outer tags.
            yield from source.skip_space()
            if not (yield from source.word((self.call[0],))):
                return True

    def _call(self, source: Source, tools: Mapping[str, Tool]) -> Reading:
        head, after, close = self.call
        source.take(len(head))
        name = yield from source.until(after, MAX_HEAD_CHARS)
        name = name.strip().strip("\"'") if name is not None else ""
        if not _NAME.fullmatch(name):
            return False
        if after != "<":
            source.take(len(after))
        schemas = tools[name].properties if name in tools else {}
        written = ""
        while True:
            yield from source.skip_space()
            tag = yield from source.word((close, self.key[0]))
            if not tag:
                return False
            source.take(len(tag))
            if tag == close:
                break
            key = yield from self._key(source)
            if key is None:
                return False
            if not written:
                yield CallStart(name)
            yield CallArguments(f"{',' if written else '{'}{' ' if written else ''}{_spelled(key)}: ")
            written = key or " "
            read = self._text(source) if is_text(schemas.get(key)) else self._any(source)
            if not (yield from read):
                return False
        if not written:
            yield CallStart(name)
        yield CallArguments("}" if written else "{}")
        yield CallEnd()
        source.settle()
        return True

    def _key(self, source: Source) -> Waits[str | None]:
        key = yield from source.until(self.key[1], MAX_HEAD_CHARS)
        if key is None:
            return None
        source.take(len(self.key[1]))
        if self.value[0]:
            yield from source.skip_space()
            if not (yield from source.word((self.value[0],))):
                return None
            source.take(len(self.value[0]))
        return key.strip().strip("\"'")

    def _any(self, source: Source) -> Reading:
        close = self.value[1]
        at = yield from _json_before(source, close)
        text = source.take(at) if at is not None else (yield from source.until(close))
        if text is None:
            return False
        source.take(len(close))
        yield CallArguments(_bare_value(text.removeprefix("\n").removesuffix("\n")))
        return True

    def _text(self, source: Source) -> Reading:
        """A string as it comes, without the line break after the opening tag and the one before the closing tag."""
        close = self.value[1]
        if (yield from source.char()) == "\n":
            source.take(1)
        yield CallArguments('"')
        while (at := source.rest.find(close)) < 0:
            certain = possible_start(source.rest, (close, f"\n{close}"))
            if certain:
                yield CallArguments(_spelled(source.take(certain))[1:-1])
            if source.final:
                return False
            yield None
        text = source.take(at)
        source.take(len(close))
        yield CallArguments(_spelled(text.removesuffix("\n"))[1:-1] + '"')
        return True


QWEN_CODER = TaggedCalls(
    "qwen-coder",
    outer=("<tool_call>", "</tool_call>"),
    call=("<function=", ">", "</function>"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    written=(
        "<tool_call>\n<function=NAME>\n",
        "<parameter=KEY>\n",
        "\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
)
"""Qwen3-Coder, Nemotron 3."""
SEED = TaggedCalls(
    "seed",
    outer=("<seed:tool_call>", "</seed:tool_call>"),
    call=QWEN_CODER.call,
    key=QWEN_CODER.key,
    value=QWEN_CODER.value,
    written=(
        "<seed:tool_call>\n<function=NAME>\n",
        "<parameter=KEY>",
        "</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
)
GLM = TaggedCalls(
    "glm",
    outer=("", ""),
    call=("<tool_call>", "<", "</tool_call>"),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    written=(
        "<tool_call>NAME\n",
        "<arg_key>KEY</arg_key>\n<arg_value>",
        "</arg_value>\n",
        "</tool_call>",
    ),
)
"""GLM-4.5 to 4.7."""
MINIMAX = TaggedCalls(
    "minimax",
    outer=("<minimax:tool_call>", "</minimax:tool_call>"),
    call=("<invoke name=", ">", "</invoke>"),
    key=("<parameter name=", ">"),
    value=("", "</parameter>"),
    written=(
        '<minimax:tool_call>\n<invoke name="NAME">\n',
        '<parameter name="KEY">',
        "</parameter>\n",
        "</invoke>\n</minimax:tool_call>",
    ),
)
