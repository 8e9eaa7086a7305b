"""Technical prose on this machine: the descriptions of installed packages, and this project's own documents."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from spark_agent.demo.tree import source_tree
from spark_agent.transcripts import Transcript, Turn
from spark_agent.transcripts.lineage import text_lineage

__all__ = ["project_documents", "readmes"]

_MIN_CHARS = 2_000
_MIN_LETTERS = 0.7
# Badges, images and markup around the prose.
_DECORATION = re.compile(r"\s*(?:<|\[?!\[|\.\. (?:image|figure|raw|\|)|:(?:target|alt|width|height|align):)")


def project_documents() -> list[Path]:
    """Return this project's Markdown files; none when it does not run from a source tree."""
    root = source_tree()
    if root is None:
        return []
    documents = [root / "README.md", root / "CHANGELOG.md", *sorted((root / "infra" / "docs").rglob("*.md"))]
    return [path for path in documents if path.is_file() and path.stat().st_size >= _MIN_CHARS]


def readmes() -> list[Transcript]:
    """Return one text for each installed package whose description is mostly prose, by name."""
    found: dict[str, Transcript] = {}
    for distribution in importlib.metadata.distributions():
        description = distribution.metadata.json.get("description")
        name = re.sub(r"[-_.]+", "-", distribution.name or "").lower()
        # The first one found is the one that is imported.
        if not name or name in found or not isinstance(description, str):
            continue
        text = _prose(description)
        if len(text) >= _MIN_CHARS and _letters(text) >= _MIN_LETTERS:
            source = Path(str(distribution.locate_file(""))) / name
            found[name] = Transcript(text_lineage(description), (Turn("text", text),), source)
    return [found[name] for name in sorted(found)]


def _prose(description: str) -> str:
    lines = description.replace("\r\n", "\n").split("\n")
    text = "\n".join(line.rstrip() for line in lines if not _DECORATION.match(line))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _letters(text: str) -> float:
    compact = "".join(text.split())
    return sum(map(str.isalpha, compact)) / len(compact) if compact else 0.0
