"""Codex CLI rollouts: one JSON object per line, in two layouts.

Now: ``{"timestamp", "type", "payload"}`` with types ``session_meta``, ``response_item``, ``event_msg``, … . Until
September 2025: a first line with ``id``, ``timestamp`` and ``instructions``, then the response items themselves and
``{"record_type": "state"}`` lines. Response items carry the conversation; events repeat it for the screen and are
read only from rollouts that have no response items.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from spark_agent.transcripts.lineage import RootFinder, typed
from spark_agent.transcripts.model import Parsed, Problems, Role, TurnList, UnusableError, describe

__all__ = ["is_codex", "read_codex"]

_ENVELOPES = frozenset({
    "compacted",
    "event_msg",
    "inter_agent_communication",
    "inter_agent_communication_metadata",
    "realtime_item",
    "response_item",
    "security_risk_score",
    "session_meta",
    "session_state",
    "token_usage_record",
    "turn_context",
    "world_state",
})  # fmt: skip
_BARE_ITEMS = frozenset({"message", "reasoning", "function_call", "function_call_output", "local_shell_call"})
_CALLS = {"function_call": "arguments", "custom_tool_call": "input", "mcp_call": "arguments"}
_ACTIONS = frozenset({"local_shell_call", "web_search_call"})
_OUTPUTS = frozenset({"custom_tool_call_output", "function_call_output", "local_shell_call_output"})
_NO_TEXT = frozenset({
    "compaction",
    "compaction_summary",
    "compaction_trigger",
    "context_compaction",
    "ghost_snapshot",
    "image_generation_call",
    "item_reference",
    "other",
    "tool_search_call",
    "tool_search_output",
})  # fmt: skip
_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "developer": "system", "system": "system"}


def is_codex(record: dict[str, object]) -> bool:
    """Tell whether a line is one that only Codex writes."""
    kind = record.get("type")
    if kind is None:
        bare_header = isinstance(record.get("id"), str) and isinstance(record.get("timestamp"), str)
        return record.get("record_type") == "state" or (bare_header and "instructions" in record)
    if not isinstance(kind, str):
        return False
    if kind in _ENVELOPES:
        return isinstance(record.get("payload"), dict)
    if kind == "message":
        return isinstance(record.get("role"), str) and isinstance(record.get("content"), list)
    return kind in _BARE_ITEMS


class _Reader:
    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.items = TurnList()
        self.events = TurnList()
        self.root = RootFinder()
        self.event_root = RootFinder()

    def line(self, number: int, record: dict[str, object]) -> None:
        kind = record.get("type")
        if kind is None and ("record_type" in record or "id" in record):
            return
        if not isinstance(kind, str):
            self.problems.add(number, f"found {describe(kind)} as type, expected a string such as 'response_item'")
            return
        if kind in ("response_item", "event_msg"):
            payload = record.get("payload")
            if not isinstance(payload, dict):
                self.problems.add(number, f"found {describe(payload)} as payload of '{kind}', expected an object")
            elif kind == "response_item":
                self._item(number, payload)
            else:
                self._event(number, payload)
        elif kind == "compacted":
            # The model goes on from its own summary.
            self.items.add("user", _text_of(_member(record.get("payload"), "message")))
        elif kind not in _ENVELOPES:
            self._item(number, record)

    def _item(self, number: int, item: dict[str, object]) -> None:
        kind = item.get("type")
        if not isinstance(kind, str):
            self.problems.add(number, f"found {describe(kind)} as type of an item, expected a string such as 'message'")
        elif kind == "message":
            self._message(number, item)
        elif kind == "reasoning":
            # The thoughts themselves, where the provider gives them; else what it gives in their place.
            self.items.add("assistant", _text_of(item.get("content")) or _text_of(item.get("summary")))
        elif kind in _CALLS:
            self.items.add("assistant", f"{_text_of(item.get('name'))} {_text_of(item.get(_CALLS[kind]))}")
            self.items.add("tool", _output_text(item.get("output")))
        elif kind in _ACTIONS:
            self.items.add("assistant", json.dumps(item.get("action"), ensure_ascii=False))
        elif kind in _OUTPUTS:
            self.items.add("tool", _output_text(item.get("output")))
        elif kind == "agent_message":
            self.items.add("user", _text_of(item.get("content")))
        elif kind not in _NO_TEXT:
            self.problems.unknown(number, "an item", kind)

    def _message(self, number: int, item: dict[str, object]) -> None:
        role, content = _ROLES.get(_text_of(item.get("role"))), item.get("content")
        if role is None or not isinstance(content, list | str):
            found = f"found {describe(item.get('role'))} as role and {describe(content)} as content"
            self.problems.add(number, f"{found}, expected a known role and a list")
            return
        text = _text_of(content).strip()
        if role == "user":
            # No time: a fork stamps its copies anew.
            for part in content if isinstance(content, list) else (content,):
                self.root.note(_text_of([part]) if isinstance(part, dict) else _text_of(part))
            role = "user" if typed(text) else "system"
        self.items.add(role, text)

    def _event(self, number: int, event: dict[str, object]) -> None:
        kind = event.get("type")
        if kind not in ("user_message", "agent_message"):
            return
        text = event.get("message")
        if not isinstance(text, str):
            self.problems.add(number, f"found {describe(text)} as message of '{kind}', expected a string")
            return
        if kind == "user_message":
            self.event_root.note(text)
        self.events.add("user" if kind == "user_message" else "assistant", text)


def read_codex(lines: Iterable[tuple[int, dict[str, object]]], problems: Problems) -> Parsed:
    """Read one rollout from its lines; problems of single lines are counted, not raised."""
    reader = _Reader(problems)
    problems.each(lines, reader.line, "a rollout item")
    turns, root = reader.items.turns(), reader.root
    if not any(turn.role in ("user", "assistant") for turn in turns):
        turns, root = reader.events.turns(), reader.event_root
    if not turns:
        raise UnusableError(problems.nothing())
    return Parsed(turns, root.lineage(turns[0].text), problems, opened=root.opened)


def _member(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None


def _text_of(value: object) -> str:
    """Return a string, or the texts of a list of content parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = (part.get("text") for part in value if isinstance(part, dict))
        return "\n\n".join(part for part in parts if isinstance(part, str))
    return ""


def _output_text(output: object) -> str:
    if isinstance(output, dict):
        return _text_of(output.get("content", output.get("output")))
    return _text_of(output)
