"""Formats whose calls are JSON between markers: an object with name and arguments, or a name before its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_agent.dialogue.call_format import MAX_HEAD_CHARS, Reading, json_arguments
from spark_agent.dialogue.events import CallArguments, CallEnd, CallStart, Event, call_events
from spark_agent.dialogue.json_text import as_arguments, captured, json_text, load_json
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.source import Source, Waits

__all__ = [
    "DEEPSEEK",
    "DEEPSEEK_BARE",
    "GRANITE",
    "HERMES",
    "KIMI",
    "LLAMA",
    "MINIMAX_M1",
    "MISTRAL",
    "MISTRAL_NAMED",
    "NEMOTRON",
    "PHI",
    "TOOL_CALLS",
    "NamedCalls",
    "ObjectCalls",
]

_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id", "function", *_ARGUMENTS})


def _calls_in(value: Any) -> list[Event] | None:
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = value.get("name", inner)
    return call_events(name, value.get("arguments", value.get("parameters", {})))


def _key(source: Source, raw: list[str]) -> Waits[str | None]:
    """A member's key and the colon after it."""
    key: list[str] = []
    if (yield from source.skip_space()) != '"' or (yield from captured(json_text(source), key)) is None:
        return None
    if (yield from source.skip_space()) != ":":
        return None
    source.take(1)
    yield from source.skip_space()
    raw += [*key, ":"]
    loaded: str = json.loads("".join(key))
    return loaded


def _object_call(source: Source, tools: Mapping[str, Tool], *, known: bool) -> Reading:
    """A call that is an object, from its ``{`` on; ``known`` takes tools' names only.

    Arguments stream where the name comes before them, as every template asks for; otherwise the call comes whole.
    """
    raw = [source.take(1)]
    name: object = None
    started, first = False, True
    while not ((yield from source.skip_space()) == "}" and first):
        key = yield from _key(source, raw)
        if key is None or (known and first and key not in _CALL_KEYS):
            return False
        first = False
        if started and key in ("name", "function", *_ARGUMENTS):
            return False
        begins = key in _ARGUMENTS and isinstance(name, str) and source.rest.startswith("{")
        if begins:
            started = True
            yield CallStart(str(name))
            closed = yield from as_arguments(json_text(source))
        else:
            value: list[str] = []
            closed = yield from captured(json_text(source), value)
            raw += [*value, closed or ""]
            if key in ("name", "function") and name is None:
                name = load_json("".join(value) + (closed or "")) or None
                # The function's own object says it all, and comes whole.
                name = name if isinstance(name, str) else ()
                if known and isinstance(name, str) and name not in tools:
                    return False
        if closed is None:
            return False
        if (yield from source.skip_space()) != ",":
            break
        raw.append(source.take(1))
    if (yield from source.char()) != "}":
        return False
    raw.append(source.take(1))
    whole: list[Event] | None = [CallArguments("}"), CallEnd()]
    if not started:
        whole = _calls_in(load_json("".join(raw)))
    if whole is None or (known and isinstance(whole[0], CallStart) and whole[0].name not in tools):
        return False
    yield from whole
    source.settle()
    return True


def _list_of_calls(source: Source, tools: Mapping[str, Tool]) -> Reading:
    """Calls in an array, from its ``[`` on."""
    source.take(1)
    while True:
        if (yield from source.skip_space()) != "{" or not (yield from _object_call(source, tools, known=False)):
            return False
        following = yield from source.skip_space()
        if following not in (",", "]"):
            return False
        source.take(1)
        if following == "]":
            source.settle()
            return True


@dataclass(frozen=True)
class ObjectCalls:
    """``{"name": …, "arguments": …}`` after a marker; several in an array, or each with a marker of its own."""

    name: str
    markers: tuple[str, ...]
    opening: tuple[str, ...] = ()
    closer: str = ""
    listed: bool = False
    """Whether the model writes an array; both are read."""
    around: str = ""
    """White space that the model writes around a call."""
    key: str = "arguments"
    known: bool = False
    """An answer may be JSON without being a call, so the name must be a tool's."""

    @property
    def special(self) -> tuple[str, ...]:
        """As :attr:`CallFormat.special`."""
        return (*self.markers, *filter(None, [self.closer.strip("; ")]))

    def read(self, source: Source, tools: Mapping[str, Tool], /) -> Reading:
        """As :meth:`CallFormat.read`."""
        marker = next((marker for marker in self.markers if source.rest.startswith(marker)), "")
        source.take(len(marker))
        begin = yield from source.skip_space()
        if begin == "{":
            read = yield from _object_call(source, tools, known=self.known)
            # Some write one after the other between the same markers.
            while read and not self.known and (yield from source.skip_space()) == "{":
                read = yield from _object_call(source, tools, known=False)
        elif begin == "[" and not self.known:
            read = yield from _list_of_calls(source, tools)
        else:
            return False
        if read and self.closer:
            yield from source.skip_closers((self.closer,))
        return read


@dataclass(frozen=True)
class NamedCalls:
    """A name, then its arguments as JSON: ``marker name separator {…} closer``."""

    name: str
    markers: tuple[str, ...]
    head: re.Pattern[str]
    """What stands between the marker and the arguments; its last group that matches is the name."""
    written: str
    """Marker and head as the model writes them; ``NAME`` stands for the name, ``INDEX`` for the call's number."""
    tail: str = ""
    """What the model writes after the arguments."""
    closers: tuple[str, ...] = ()
    brackets: tuple[str, str] = ("", "")
    """What stands around all calls; each is also a marker, and forgotten by some models."""
    listed: bool = False
    """Calls in an array, with their names inside, are read too."""
    opening: tuple[str, ...] = ()
    special: tuple[str, ...] = ()

    def read(self, source: Source, tools: Mapping[str, Tool], /) -> Reading:
        """As :meth:`CallFormat.read`."""
        marker = next(marker for marker in self.markers if source.rest.startswith(marker))
        source.take(len(marker))
        if marker in self.brackets:
            source.settle()
            return True
        if self.listed and (yield from source.skip_space()) == "[":
            return (yield from _list_of_calls(source, tools))
        text = yield from source.until("{", MAX_HEAD_CHARS)
        head = self.head.fullmatch(text) if text is not None else None
        if head is None or not (yield from json_arguments(source, head[head.lastindex or 0])):
            return False
        yield from source.skip_closers(self.closers)
        return True


HERMES = ObjectCalls("hermes", ("<tool_call>",), closer="</tool_call>", around="\n")
"""Hermes, Qwen 2.5 and 3, Granite 4, Ernie 4.5, and models without a format."""
LLAMA = ObjectCalls("llama3", ("<|python_tag|>",), opening=("{",), closer=";", key="parameters", known=True)
"""The whole answer is the call, with or without a marker."""
NEMOTRON = ObjectCalls("nemotron", ("<TOOLCALL>",), closer="</TOOLCALL>", listed=True)
GRANITE = ObjectCalls("granite3", ("<|tool_call|>",), listed=True)
PHI = ObjectCalls("phi4", ("<|tool_call|>",), closer="<|/tool_call|>")
TOOL_CALLS = ObjectCalls("tool_calls", ("<tool_calls>",), closer="</tool_calls>", listed=True)
"""Jamba, Apriel."""
MINIMAX_M1 = ObjectCalls("minimax-m1", TOOL_CALLS.markers, closer=TOOL_CALLS.closer, around="\n")
MISTRAL = ObjectCalls("mistral", ("[TOOL_CALLS]",), listed=True)
"""Mistral 7B, Nemo, Large and Small up to 3.1."""

_NAME = r"([\w.-]+)"
MISTRAL_NAMED = NamedCalls(
    "mistral-named",
    ("[TOOL_CALLS]",),
    re.compile(rf"\s*{_NAME}\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*"),
    "[TOOL_CALLS]NAME[ARGS]",
    listed=True,
    special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
"""Mistral Small 3.2, Magistral, Devstral, Ministral 3."""

_CALLS, _CALL, _SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL_END, _CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_HEAD = re.compile(rf"(?:\s*function{_SEP}\s*{_NAME}\s*(?:```json)?|\s*{_NAME}\s*{_SEP})\s*", re.ASCII)
_DEEPSEEK: dict[str, Any] = {
    "markers": (_CALLS, _CALL, _CALLS_END),
    "head": _DEEPSEEK_HEAD,
    "brackets": (_CALLS, _CALLS_END),
    "special": (_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END),
}
DEEPSEEK = NamedCalls(
    "deepseek",
    written=f"{_CALL}function{_SEP}NAME\n```json\n",
    tail=f"\n```{_CALL_END}",
    closers=("```", _CALL_END),
    **_DEEPSEEK,
)
"""V3, R1 and its distills. Both ways are read by either."""
DEEPSEEK_BARE = NamedCalls(
    "deepseek-v3.1", written=f"{_CALL}NAME{_SEP}", tail=_CALL_END, closers=("```", _CALL_END), **_DEEPSEEK
)

_KIMI_CALLS, _KIMI_CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
_KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_CALLS_END = "<|tool_calls_section_end|>"
KIMI = NamedCalls(
    "kimi",
    (_KIMI_CALLS, _KIMI_CALL, _KIMI_CALLS_END),
    re.compile(rf"\s*(?:functions\.)?{_NAME}(?::\d+)?\s*{re.escape(_KIMI_ARGUMENTS)}\s*"),
    f"{_KIMI_CALL}functions.NAME:INDEX{_KIMI_ARGUMENTS}",
    tail=_KIMI_END,
    closers=(_KIMI_END,),
    brackets=(_KIMI_CALLS, _KIMI_CALLS_END),
    special=(_KIMI_CALLS, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END, _KIMI_CALLS_END),
)
