"""Formats whose arguments stand one by one between tags: Qwen3-Coder and GLM-4.5.

Values are written bare. A parameter declared as a string is one; any other is JSON where it can be read as such.
"""

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
    could_become,
    load_json,
    skip_space,
)
from spark_agent.dialogue.events import call_of
from spark_agent.dialogue.messages import Tool

__all__ = ["Glm", "QwenCoder", "is_text"]

_NAME = re.compile(r"\s*([\w.:/-]+)\s*")


def is_text(schema: object) -> bool:
    """Whether a parameter is declared as a string, and as nothing else."""
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if kind is None:
        values = schema.get("enum")
        return isinstance(values, list) and all(isinstance(value, str) for value in values)
    return kind in ("string", ["string"])


def _value(text: str, schema: object) -> Any:
    if is_text(schema):
        return text
    stripped = text.strip()
    value = load_json(stripped)
    return text if value is None and stripped != "null" else value


def _one_line_off(text: str) -> str:
    """Without the line break after the opening tag and the one before the closing tag."""
    return text.removeprefix("\n").removesuffix("\n")


@dataclass(frozen=True)
class QwenCoder:
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    opening: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[str] = ">"

    def read(self, text: str, tools: Mapping[str, Tool], /, *, final: bool) -> Read | None:
        """As :meth:`CallFormat.read`."""
        at = skip_space(text, len("<tool_call>")) if text.startswith("<tool_call>") else 0
        if not text.startswith("<function=", at):
            waits = not final and could_become(text[at:], ("<function=",))
            return None if waits else NOT_A_CALL
        begin = at + len("<function=")
        end = text.find(">", begin, begin + MAX_HEAD_CHARS)
        if end < 0:
            return NOT_A_CALL if final or len(text) >= begin + MAX_HEAD_CHARS else None
        name = text[begin:end].strip().strip("\"'")
        schemas = tools[name].properties if name in tools else {}
        arguments: dict[str, Any] = {}
        at = end + 1
        while True:
            at = skip_space(text, at)
            if text.startswith("</function>", at):
                break
            if not text.startswith("<parameter=", at):
                waits = not final and could_become(text[at:], ("</function>", "<parameter="))
                return None if waits else NOT_A_CALL
            head, tail = text.find(">", at), text.find("</parameter>", at)
            if head < 0 or tail < 0:
                return NOT_A_CALL if final else None
            if tail < head:
                return NOT_A_CALL
            key = text[at + len("<parameter=") : head].strip().strip("\"'")
            arguments[key] = _value(_one_line_off(text[head + 1 : tail]), schemas.get(key))
            at = tail + len("</parameter>")
        call = call_of(name, arguments)
        if call is None:
            return NOT_A_CALL
        used = after_closers(text, at + len("</function>"), ("</tool_call>",), final=final)
        return None if used is None else Read((call,), used)


@dataclass(frozen=True)
class Glm:
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    opening: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[str] = ">"

    def read(self, text: str, tools: Mapping[str, Tool], /, *, final: bool) -> Read | None:
        """As :meth:`CallFormat.read`."""
        begin = len("<tool_call>")
        at = text.find("<", begin, begin + MAX_HEAD_CHARS)
        if at < 0:
            return NOT_A_CALL if final or len(text) >= begin + MAX_HEAD_CHARS else None
        head = _NAME.fullmatch(text, begin, at)
        if head is None:
            return NOT_A_CALL
        name = head[1]
        schemas = tools[name].properties if name in tools else {}
        arguments: dict[str, Any] = {}
        while True:
            at = skip_space(text, at)
            if text.startswith("</tool_call>", at):
                call = call_of(name, arguments)
                return NOT_A_CALL if call is None else Read((call,), at + len("</tool_call>"))
            if not text.startswith("<arg_key>", at):
                waits = not final and could_become(text[at:], ("</tool_call>", "<arg_key>"))
                return None if waits else NOT_A_CALL
            key_end = text.find("</arg_key>", at)
            if key_end < 0:
                return NOT_A_CALL if final else None
            value = skip_space(text, key_end + len("</arg_key>"))
            if not text.startswith("<arg_value>", value):
                waits = not final and could_become(text[value:], ("<arg_value>",))
                return None if waits else NOT_A_CALL
            value_end = text.find("</arg_value>", value)
            if value_end < 0:
                return NOT_A_CALL if final else None
            key = text[at + len("<arg_key>") : key_end].strip()
            arguments[key] = _value(_one_line_off(text[value + len("<arg_value>") : value_end]), schemas.get(key))
            at = value_end + len("</arg_value>")
