"""Read conversations that a person points at: Claude Code, Codex CLI, SpecStory Markdown and plain text.

Nothing here looks for transcripts by itself, and a transcript's text and path never leave the machine: only counts,
filed under a keyed hash of :attr:`Transcript.lineage`, do. Every file is treated as hostile.
"""

from __future__ import annotations

from spark_agent.transcripts.model import Limits, Role, Skipped, Transcript, Turn
from spark_agent.transcripts.read import read_transcripts

__all__ = ["Limits", "Role", "Skipped", "Transcript", "Turn", "read_transcripts"]
