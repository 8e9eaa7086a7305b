"""OpenCode sessions, as ``opencode export`` prints them: one JSON document.

Messages have ``info``, with the role, and ``parts``: what is said, what is thought, and calls together with what they
returned. What OpenCode itself keeps is a database, which is not read.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

from spark_agent.transcripts.lineage import RootFinder
from spark_agent.transcripts.model import Parsed, Problems, TurnList, UnusableError, describe

__all__ = ["is_opencode", "read_opencode"]

_NO_TEXT = frozenset({
    "agent",
    "compaction",
    "file",
    "patch",
    "retry",
    "snapshot",
    "step-finish",
    "step-start",
    "subtask",
})  # fmt: skip


def is_opencode(document: dict[str, object]) -> bool:
    """Tell whether a document is an exported session."""
    messages = document.get("messages")
    return (
        isinstance(document.get("info"), dict)
        and isinstance(messages, list)
        and all(isinstance(each, dict) and isinstance(each.get("parts"), list) for each in messages)
    )


class _Reader:
    def __init__(self) -> None:
        self.problems = Problems()
        self.turns = TurnList()
        self.root = RootFinder()

    def message(self, number: int, message: dict[str, object]) -> None:
        info, parts = message.get("info"), message.get("parts")
        role = info.get("role") if isinstance(info, dict) else None
        if not isinstance(info, dict) or role not in ("user", "assistant") or not isinstance(parts, list):
            self.problems.add(number, f"found {describe(role)} as role of a message, expected 'user' or 'assistant'")
            return
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(part, dict) or not isinstance(kind, str):
                self.problems.add(number, f"found {describe(kind)} as type of a part, expected a string such as 'text'")
            elif kind == "tool":
                self._tool(number, part)
            elif kind == "reasoning":
                self.turns.add("assistant", _text(part.get("text")))
            elif kind == "text":
                self._said(info, role, part)
            elif kind not in _NO_TEXT:
                self.problems.unknown(number, "a part", kind)

    def _said(self, info: dict[str, object], role: object, part: dict[str, object]) -> None:
        text = _text(part.get("text"))
        if role == "assistant":
            self.turns.add("assistant", text)
        elif part.get("synthetic") is True:
            self.turns.add("system", text)
        else:
            self.root.note(text, _second(info.get("time")))
            self.turns.add("user", text)

    def _tool(self, number: int, part: dict[str, object]) -> None:
        state = part.get("state")
        if not isinstance(state, dict):
            self.problems.add(number, f"found {describe(state)} as state of a tool, expected an object")
            return
        self.turns.add("assistant", f"{_text(part.get('tool'))} {json.dumps(state.get('input'), ensure_ascii=False)}")
        self.turns.add("tool", _text(state.get("output")) or _text(state.get("error")))


def read_opencode(document: dict[str, object]) -> Parsed:
    """Read one exported session; problems of single messages are counted, by their number, not raised."""
    reader = _Reader()
    messages = document.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else (), start=1):
        if isinstance(message, dict):
            reader.message(number, message)
    turns = reader.turns.turns()
    if not turns:
        raise UnusableError("found an exported session without text, expected user or assistant messages")
    root = reader.root
    return Parsed(
        turns, root.lineage(turns[0].text), reader.problems, root.continues, tuple(root.summaries), root.opened
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _second(time: object) -> str | None:
    """When a message was written, UTC to the second, from milliseconds."""
    created = time.get("created") if isinstance(time, dict) else None
    if not isinstance(created, int | float) or isinstance(created, bool):
        return None
    try:
        return datetime.fromtimestamp(created // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return None
