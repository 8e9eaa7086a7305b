"""Plain text: one turn of role ``text``."""

from __future__ import annotations

from spark_agent.transcripts.lineage import text_lineage
from spark_agent.transcripts.model import Parsed, TurnList, UnusableError

__all__ = ["read_plain"]


def read_plain(text: str) -> Parsed:
    """Read any text as one turn."""
    turns = TurnList()
    turns.add("text", text)
    if not turns.turns():
        raise UnusableError("line 1: found only white space, expected text")
    return Parsed(turns.turns(), text_lineage(text))
