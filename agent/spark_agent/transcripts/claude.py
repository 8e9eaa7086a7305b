"""Claude Code sessions: one JSON object per line.

Lines of type ``user`` and ``assistant`` carry the conversation, one message possibly split over several lines; what
the person typed while the assistant worked stands in an ``attachment``. Other known types (``summary``, ``system``,
``progress``, ``file-history-snapshot``, titles, …) are bookkeeping; unknown ones are counted. Lines of sub-agents
(``isSidechain``) are other contexts interleaved with this one and are left out, and so are errors that the tool itself
writes in the assistant's name. The tool's printed stream (``--output-format stream-json``) is read as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from spark_agent.transcripts.lineage import RootFinder, to_second
from spark_agent.transcripts.model import Parsed, Problems, TurnList, UnusableError, describe

__all__ = ["is_claude", "read_claude"]

_BOOKKEEPING = frozenset({
    "agent-color",
    "agent-name",
    "agent-setting",
    "ai-title",
    "attribution-snapshot",
    "bridge-session",
    "content-replacement",
    "control_request",
    "control_response",
    "custom-title",
    "file-history-delta",
    "file-history-snapshot",
    "hook_event",
    "last-prompt",
    "marble-origami-commit",
    "marble-origami-snapshot",
    "mode",
    "permission-mode",
    "pr-link",
    "progress",
    "queue-operation",
    "rate_limit_event",
    "result",
    "speculation-accept",
    "stream_event",
    "summary",
    "system",
    "tag",
    "task-summary",
    "worktree-state",
})  # fmt: skip
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
_NO_TEXT = frozenset({"connector_text", "container_upload", "document", "image", "redacted_thinking", "tool_reference"})


def is_claude(record: dict[str, object]) -> bool:
    """Tell whether a line is one that only Claude Code writes."""
    if record.get("type") in ("user", "assistant"):
        return isinstance(record.get("message"), dict)
    return isinstance(record.get("type"), str) and isinstance(record.get("sessionId"), str)


class _Reader:
    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.turns = TurnList()
        self.seen: set[str] = set()
        self.root = RootFinder()
        self.sidechains = 0

    def line(self, number: int, record: dict[str, object]) -> None:
        kind = record.get("type")
        if not isinstance(kind, str):
            self.problems.add(number, f"found {describe(kind)} as type, expected a string such as 'user'")
            return
        if kind not in ("user", "assistant", "attachment"):
            if kind not in _BOOKKEEPING:
                self.problems.unknown(number, "a line", kind)
            return
        # The printed stream names the call that started a sub-agent instead.
        if record.get("isSidechain") is True or isinstance(record.get("parent_tool_use_id"), str):
            self.sidechains += 1
            return
        if kind == "attachment":
            self._attachment(number, record.get("attachment"))
            return
        message = record.get("message")
        if not isinstance(message, dict):
            self.problems.add(number, f"found {describe(message)} as message of type '{kind}', expected an object")
            return
        # Some versions write a line again; the same uuid in another type is no copy.
        uuid = record.get("uuid")
        if isinstance(uuid, str):
            if (key := f"{kind} {uuid}") in self.seen:
                return
            self.seen.add(key)
        if kind == "user":
            self._user(number, record, message.get("content"))
        elif record.get("isApiErrorMessage") is not True and message.get("model") != "<synthetic>":
            self._assistant(number, message.get("content"))

    def _attachment(self, number: int, attachment: object) -> None:
        if not isinstance(attachment, dict):
            self.problems.add(number, f"found {describe(attachment)} as attachment, expected an object")
        elif attachment.get("type") == "queued_command":
            for block in self._blocks(number, attachment.get("prompt")):
                if block.get("type") == "text":
                    self.turns.add("user", _string(block, "text"))

    def _user(self, number: int, record: dict[str, object], content: object) -> None:
        blocks = self._blocks(number, content)
        texts = [text for block in blocks if block.get("type") == "text" and (text := _string(block, "text"))]
        said = "\n\n".join(texts)
        for block in blocks:
            kind = block.get("type")
            if kind == "tool_result":
                self.turns.add("tool", _result_text(block.get("content")))
            elif kind != "text" and kind not in _NO_TEXT:
                self._unknown_block(number, kind)
        meta = record.get("isMeta") is True
        self.turns.add("system" if meta else "user", said)
        if not meta:
            summary = record.get("isCompactSummary") is True
            for text in texts:
                self.root.note(text, to_second(record.get("timestamp")), is_summary=summary)

    def _assistant(self, number: int, content: object) -> None:
        for block in self._blocks(number, content):
            kind = block.get("type")
            if kind == "text":
                self.turns.add("assistant", _string(block, "text"))
            elif kind == "thinking":
                self.turns.add("assistant", _string(block, "thinking"))
            elif kind in _CALLS:
                call = json.dumps(block.get("input"), ensure_ascii=False)
                self.turns.add("assistant", f"{_string(block, 'name')} {call}")
            elif isinstance(kind, str) and kind.endswith("_tool_result"):
                # Of tools that ran at the provider, in the middle of the answer.
                self.turns.add("tool", _result_text(block.get("content")))
            elif kind not in _NO_TEXT:
                self._unknown_block(number, kind)

    def _unknown_block(self, number: int, kind: object) -> None:
        if isinstance(kind, str):
            self.problems.unknown(number, "a block", kind)
        else:
            self.problems.add(number, f"found {describe(kind)} as type of a block, expected a string such as 'text'")

    def _blocks(self, number: int, content: object) -> list[dict[str, object]]:
        """Return content as blocks; images, documents and unknown blocks have no text and stay unused."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            if content is not None:
                self.problems.add(
                    number, f"found {describe(content)} as content, expected a string or a list of blocks"
                )
            return []
        blocks = [block for block in content if isinstance(block, dict)]
        if len(blocks) < len(content):
            self.problems.add(number, "found a block that is no object, expected objects with a type")
        return blocks


def read_claude(lines: Iterable[tuple[int, dict[str, object]]], problems: Problems) -> Parsed:
    """Read one session from its lines; problems of single lines are counted, not raised."""
    reader = _Reader(problems)
    problems.each(lines, reader.line, "a message")
    turns = reader.turns.turns()
    if not turns:
        if reader.sidechains:
            raise UnusableError(
                f"found only sub-agent lines ({reader.sidechains}), expected a main conversation; "
                "sub-agents belong to the session that started them"
            )
        raise UnusableError(problems.nothing())
    root = reader.root
    return Parsed(turns, root.lineage(turns[0].text), problems, root.continues, tuple(root.summaries), root.opened)


def _string(block: dict[str, object], key: str) -> str:
    value = block.get(key)
    return value if isinstance(value, str) else ""


def _result_text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n\n".join(_string(block, "text") for block in content if isinstance(block, dict))
    return ""
