"""aider's chat history: Markdown to which every chat of a project is appended.

``# aider chat started at TIME`` begins a chat, ``####`` marks what the person wrote, ``>`` what aider tells the person,
which no model reads; the rest is the model's. One file is one conversation, as it only ever grows.
"""

from __future__ import annotations

import re

from spark_agent.transcripts.lineage import RootFinder
from spark_agent.transcripts.model import Parsed, Role, TurnList, UnusableError

__all__ = ["is_aider", "read_aider"]

_START = re.compile(r"# aider chat started at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*")


def is_aider(text: str) -> bool:
    """Tell whether a text begins as such a history does."""
    first = next((line for line in text.split("\n", 20)[:20] if line.strip()), "")
    return _START.fullmatch(first) is not None


def read_aider(text: str) -> Parsed:
    """Read one history."""
    turns, root = TurnList(), RootFinder()
    role: Role | None = None
    lines: list[str] = []

    def flush() -> None:
        said = "\n".join(lines).strip()
        lines.clear()
        if role is not None and said:
            if role == "user":
                root.note(said)
            turns.add(role, said)

    for line in text.split("\n"):
        if _START.fullmatch(line) or line.startswith("> ") or line.rstrip() == ">":
            flush()
            role = None
            continue
        now, said = _told(line)
        # A blank line within what the person wrote is spelled; elsewhere it belongs to whatever it stands in.
        if now != role and (line.strip() or role == "user"):
            flush()
            role = now
        lines.append(said)
    flush()
    found = turns.turns()
    if not found:
        raise UnusableError("found an aider history without text, expected at least one message")
    return Parsed(
        found,
        root.lineage(found[0].text),
        continues=root.continues,
        summaries=tuple(root.summaries),
        opened=root.opened,
    )


def _told(line: str) -> tuple[Role, str]:
    """Who a line is by, and what it says; aider ends lines with two spaces."""
    if line.startswith("#### ") or line.rstrip() == "####":
        return "user", line[5:].rstrip()
    return "assistant", line
