"""Read every conversation under a path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from spark_agent.transcripts.aider import is_aider, read_aider
from spark_agent.transcripts.claude import is_claude, read_claude
from spark_agent.transcripts.codex import is_codex, read_codex
from spark_agent.transcripts.load import decode_text, json_objects, load
from spark_agent.transcripts.model import Limits, Parsed, Problems, Skipped, Transcript, UnusableError
from spark_agent.transcripts.opencode import is_opencode, read_opencode
from spark_agent.transcripts.plain import read_plain
from spark_agent.transcripts.qwen import is_qwen, read_qwen
from spark_agent.transcripts.specstory import is_specstory, read_specstory
from spark_agent.transcripts.walk import walk

__all__ = ["read_transcripts"]

_DEFAULT_LIMITS = Limits()
_JSON_LINES = (".jsonl", ".ndjson")
# Enough to meet a message behind the bookkeeping that a session starts with.
_LINES_TO_TRY = 50


def read_transcripts(path: Path, *, limits: Limits = _DEFAULT_LIMITS) -> Iterator[Transcript | Skipped]:
    """Give the conversations of a file or of a folder's files, and what was left out with its reason.

    The format is told by content first and by the name's ending second. A file of which some lines could not be used
    gives both its transcript and one :class:`Skipped` that counts them. Continuations of compacted conversations come
    last, because their lineage is that of a conversation which may stand in any other file.
    """
    origins: dict[str, str] = {}
    continuations: list[Path] = []
    for entry in walk(path, limits):
        if isinstance(entry, Skipped):
            yield entry
            continue
        parsed = _parse(entry, limits)
        if isinstance(parsed, Parsed):
            for summary in parsed.summaries:
                origins.setdefault(summary, parsed.lineage)
            if parsed.continues:
                # Only the path: a long scan must not hold every conversation in memory.
                continuations.append(entry)
                continue
        yield from _results(entry, parsed, origins)
    for entry in continuations:
        yield from _results(entry, _parse(entry, limits), origins)


def _results(source: Path, parsed: Parsed | Skipped, origins: dict[str, str]) -> Iterator[Transcript | Skipped]:
    if isinstance(parsed, Skipped):
        yield parsed
        return
    # Only a continuation asks for its origin: no file can move a conversation that starts at its own beginning.
    lineage = _origin(parsed.lineage, origins) if parsed.continues else parsed.lineage
    yield Transcript(lineage, parsed.turns, source, parsed.opened)
    if parsed.problems.count:
        yield Skipped(source, parsed.problems.summary())


def _origin(lineage: str, origins: dict[str, str]) -> str:
    # A hostile file can name itself, or two files each other, as the origin. The smallest of such a circle stands for
    # all of it, wherever it was entered.
    path = [lineage]
    while (parent := origins.get(path[-1])) is not None:
        if parent in path:
            return min(path[path.index(parent) :])
        path.append(parent)
    return path[-1]


def _parse(path: Path, limits: Limits) -> Parsed | Skipped:
    try:
        data = load(path, limits)
        return _parse_json_lines(path, data, limits) or _parse_json_file(data, limits) or _parse_text(data)
    except UnusableError as refusal:
        return Skipped(path, str(refusal))


def _parse_json_lines(path: Path, data: bytes, limits: Limits) -> Parsed | None:
    named_so = path.suffix.lower() in _JSON_LINES
    if not named_so and not data.lstrip().startswith(b"{"):
        return None
    problems = Problems()
    perhaps_claude = False
    for tried, (_, record) in enumerate(json_objects(data, limits, problems)):
        if is_codex(record):
            problems = Problems()
            return read_codex(json_objects(data, limits, problems), problems)
        if is_qwen(record):
            problems = Problems()
            return read_qwen(json_objects(data, limits, problems), problems)
        perhaps_claude = perhaps_claude or is_claude(record)
        if perhaps_claude and record.get("type") in ("user", "assistant"):
            # Bookkeeping alone may be another tool's.
            break
        if not named_so and tried + 1 >= _LINES_TO_TRY:
            break
    if perhaps_claude:
        problems = Problems()
        return read_claude(json_objects(data, limits, problems), problems)
    if not named_so:
        return None
    detail = f" ({problems.summary()})" if problems.count else ""
    raise UnusableError(
        f"found no line of a known conversation format, expected Claude Code, Codex or Qwen Code JSON lines{detail}"
    )


def _parse_json_file(data: bytes, limits: Limits) -> Parsed | None:
    """A session that OpenCode exported, or of the first Codex versions: one document with the items in a list."""
    if not data.lstrip().startswith(b"{") or len(data) > limits.max_line_bytes:
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if is_opencode(document):
        return read_opencode(document)
    items = document.get("items")
    if not isinstance(document.get("session"), dict) or not isinstance(items, list):
        return None
    problems = Problems()
    numbered = [(number, item) for number, item in enumerate(items, start=1) if isinstance(item, dict)]
    return read_codex(numbered, problems) if any(is_codex(item) for _, item in numbered) else None


def _parse_text(data: bytes) -> Parsed:
    text = decode_text(data)
    if is_aider(text):
        return read_aider(text)
    return read_specstory(text) if is_specstory(text) else read_plain(text)
