"""Formats whose calls are JSON between markers: Hermes and Qwen, Llama 3, Mistral, DeepSeek."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from spark_agent.dialogue.call_format import (
    MAX_HEAD_CHARS,
    NOT_A_CALL,
    Read,
    after_closers,
    json_end,
    load_json,
    skip_space,
)
from spark_agent.dialogue.events import Call, call_of
from spark_agent.dialogue.messages import Tool

__all__ = ["DeepSeek", "Hermes", "Llama3", "Mistral"]

_LLAMA_KEYS = frozenset({"name", "type", "function", "parameters", "arguments"})
_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"')


def _call_in(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = value.get("name", inner)
    return call_of(name, value.get("arguments", value.get("parameters", {})))


@dataclass(frozen=True)
class Hermes:
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``: Hermes, Qwen 2.5 and 3, and models without a format."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    opening: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[str] = "}>"

    def read(self, text: str, _tools: Mapping[str, Tool], /, *, final: bool) -> Read | None:
        """As :meth:`CallFormat.read`."""
        start = skip_space(text, len(self.markers[0]))
        if start < len(text) and text[start] != "{":
            return NOT_A_CALL
        end = json_end(text, start)
        if end is None:
            return NOT_A_CALL if final else None
        call = _call_in(load_json(text[start:end]))
        if call is None:
            return NOT_A_CALL
        used = after_closers(text, end, ("</tool_call>",), final=final)
        return None if used is None else Read((call,), used)


@dataclass(frozen=True)
class Llama3:
    """``{"name": …, "parameters": …}`` as the whole answer, with or without ``<|python_tag|>`` before it.

    An answer may be JSON without being a call, so the name must be a tool's.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    opening: ClassVar[tuple[str, ...]] = ("{",)
    ends: ClassVar[str] = '}":;'

    def read(self, text: str, tools: Mapping[str, Tool], /, *, final: bool) -> Read | None:
        """As :meth:`CallFormat.read`."""
        start = skip_space(text, 0 if text.startswith("{") else len(self.markers[0]))
        if start < len(text) and text[start] != "{":
            return NOT_A_CALL
        first = _FIRST_KEY.match(text, start)
        if first is not None and first[1] not in _LLAMA_KEYS:
            return NOT_A_CALL
        end = json_end(text, start)
        if end is None:
            return NOT_A_CALL if final else None
        call = _call_in(load_json(text[start:end]))
        if call is None or call.name not in tools:
            return NOT_A_CALL
        used = after_closers(text, end, (";",), final=final)
        return None if used is None else Read((call,), used)


_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


@dataclass(frozen=True)
class Mistral:
    """``[TOOL_CALLS][{…}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` as newer models write."""

    named: bool = False
    """Whether the model is one of the newer ones; both are read."""
    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    opening: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[str] = "}]"

    def read(self, text: str, _tools: Mapping[str, Tool], /, *, final: bool) -> Read | None:
        """As :meth:`CallFormat.read`."""
        start = skip_space(text, len(self.markers[0]))
        if start == len(text):
            return NOT_A_CALL if final else None
        if text[start] == "[":
            return self._array(text, start, final=final)
        at = text.find("{", start, start + MAX_HEAD_CHARS)
        if at < 0:
            return NOT_A_CALL if final or len(text) >= start + MAX_HEAD_CHARS else None
        head = _MISTRAL_HEAD.fullmatch(text, start, at)
        if head is None:
            return NOT_A_CALL
        end = json_end(text, at)
        if end is None:
            return NOT_A_CALL if final else None
        call = call_of(head[1], load_json(text[at:end]))
        return NOT_A_CALL if call is None else Read((call,), end)

    def _array(self, text: str, start: int, *, final: bool) -> Read | None:
        end = json_end(text, start)
        if end is None:
            return NOT_A_CALL if final else None
        values = load_json(text[start:end])
        if not isinstance(values, list) or not values:
            return NOT_A_CALL
        calls = [_call_in(value) for value in values]
        return Read(tuple(call for call in calls if call is not None), end) if all(calls) else NOT_A_CALL


_CALLS, _CALL, _SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL_END, _CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_HEAD = re.compile(
    rf"(?:\s*function{_SEP}\s*(?P<old>[\w.-]+)\s*(?:```json)?|\s*(?P<new>[\w.-]+)\s*{_SEP})\s*", re.ASCII
)


@dataclass(frozen=True)
class DeepSeek:
    """DeepSeek V3 and R1 (``function``, name, a fenced block) and V3.1 (name, JSON)."""

    fenced: bool = True
    """Whether the model is one of the older ones; both are read."""
    markers: ClassVar[tuple[str, ...]] = (_CALLS, _CALL, _CALLS_END)
    opening: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[str] = "}`>"

    def read(self, text: str, _tools: Mapping[str, Tool], /, *, final: bool) -> Read | None:
        """As :meth:`CallFormat.read`."""
        for bracket in (_CALLS, _CALLS_END):
            if text.startswith(bracket):
                return Read((), len(bracket))
        start = len(_CALL)
        at = text.find("{", start, start + MAX_HEAD_CHARS)
        if at < 0:
            return NOT_A_CALL if final or len(text) >= start + MAX_HEAD_CHARS else None
        head = _DEEPSEEK_HEAD.fullmatch(text, start, at)
        if head is None:
            return NOT_A_CALL
        end = json_end(text, at)
        if end is None:
            return NOT_A_CALL if final else None
        call = call_of(head["old"] or head["new"], load_json(text[at:end]))
        if call is None:
            return NOT_A_CALL
        used = after_closers(text, end, ("```", _CALL_END), final=final)
        return None if used is None else Read((call,), used)
