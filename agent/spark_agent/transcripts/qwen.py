"""Sessions of Qwen Code, a descendant of Gemini CLI: one JSON object per line, messages in parts.

Lines of type ``user``, ``assistant`` and ``tool_result`` carry the conversation; ``system`` ones are bookkeeping.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from spark_agent.transcripts.lineage import RootFinder, to_second, typed
from spark_agent.transcripts.model import Parsed, Problems, TurnList, UnusableError, describe

__all__ = ["is_qwen", "read_qwen"]

_TALK = ("user", "assistant", "tool_result")
_NO_TEXT = ("inlineData", "fileData", "thoughtSignature")


def is_qwen(record: dict[str, object]) -> bool:
    """Tell whether a line is one that only this family writes."""
    message = record.get("message")
    return record.get("type") in _TALK and isinstance(message, dict) and isinstance(message.get("parts"), list)


class _Reader:
    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.turns = TurnList()
        self.root = RootFinder()

    def line(self, number: int, record: dict[str, object]) -> None:
        kind = record.get("type")
        if kind == "system":
            return
        if not isinstance(kind, str):
            self.problems.add(number, f"found {describe(kind)} as type, expected a string such as 'user'")
            return
        if kind not in _TALK:
            self.problems.unknown(number, "a line", kind)
            return
        message = record.get("message")
        parts = message.get("parts") if isinstance(message, dict) else None
        if not isinstance(parts, list):
            self.problems.add(number, f"found {describe(parts)} as parts of type '{kind}', expected a list")
            return
        for part in parts:
            self._part(number, kind, part, to_second(record.get("timestamp")))

    def _part(self, number: int, kind: str, part: object, time: str | None) -> None:
        if not isinstance(part, dict):
            self.problems.add(number, f"found {describe(part)} as a part, expected an object")
        elif isinstance(text := part.get("text"), str):
            if kind == "assistant":
                self.turns.add("assistant", text)
                return
            self.root.note(text, time)
            self.turns.add("user" if typed(text) else "system", text)
        elif isinstance(call := part.get("functionCall"), dict):
            arguments = json.dumps(call.get("args"), ensure_ascii=False)
            self.turns.add("assistant", f"{call.get('name') or ''} {arguments}")
        elif isinstance(result := part.get("functionResponse"), dict):
            self.turns.add("tool", _result(result.get("response")))
        elif not any(name in part for name in _NO_TEXT):
            self.problems.unknown(number, "a part", next(iter(part), ""))


def read_qwen(lines: Iterable[tuple[int, dict[str, object]]], problems: Problems) -> Parsed:
    """Read one session from its lines; problems of single lines are counted, not raised."""
    reader = _Reader(problems)
    problems.each(lines, reader.line, "a message")
    turns = reader.turns.turns()
    if not turns:
        raise UnusableError(problems.nothing())
    root = reader.root
    return Parsed(turns, root.lineage(turns[0].text), problems, root.continues, tuple(root.summaries), root.opened)


def _result(response: object) -> str:
    if isinstance(response, dict):
        said = response.get("output", response.get("error"))
        return said if isinstance(said, str) else json.dumps(response, ensure_ascii=False)
    return response if isinstance(response, str) else ""
