"""The demo's three workloads, found on this machine.

The same Python and the same set of packages give the same sessions in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from spark_agent.demo.code import code_files
from spark_agent.demo.prose import project_documents, readmes
from spark_agent.errors import SparkError
from spark_agent.identity import session_hash
from spark_agent.transcripts import Limits, Transcript, Turn, read_transcripts
from spark_schemas.split import split_of

__all__ = ["DEMO_KEY", "DEMO_WORKLOADS", "demo_session_hash", "demo_sessions"]

DEMO_KEY = b"spark-demo-sessions-v1"
"""Public on purpose: these sessions are nobody's secret, and everybody's demo shall have the same split."""

DEMO_WORKLOADS = ("code-heavy", "docs", "chat")

_MAX_CHARS = 6_000
_MIN_SESSIONS = 16
_MAX_CALIBRATION = 32
_MAX_HELD_OUT = 8
# Far above any source file; keeps a generated monster out before it is read.
_LIMITS = Limits(max_file_bytes=2_000_000)
_DIALOGUES = Path(__file__).with_name("dialogues")


def demo_sessions() -> dict[str, list[Transcript]]:
    """Return each workload's sessions, at least 16 and at most 40, cut to what a small model's context takes.

    Raises :class:`~spark_agent.errors.SparkError` when this machine has too little text for a workload.
    """
    candidates = {
        "code-heavy": _read(code_files()),
        "docs": [*_read(project_documents()), *readmes()],
        "chat": _read([_DIALOGUES]),
    }
    return {workload: _choose(workload, found) for workload, found in candidates.items()}


def demo_session_hash(transcript: Transcript) -> str:
    """Return the session hash under the demo's key."""
    return session_hash(DEMO_KEY, transcript.lineage)


def _read(paths: Iterable[Path]) -> list[Transcript]:
    return [transcript for path in paths for transcript in _transcripts(path)]


def _transcripts(path: Path) -> Iterator[Transcript]:
    for found in read_transcripts(path, limits=_LIMITS):
        if isinstance(found, Transcript):
            yield found


def _choose(workload: str, candidates: list[Transcript]) -> list[Transcript]:
    """Take the first of each side of the split, so that a limit never leaves one side empty."""
    room = Counter(calibration=_MAX_CALIBRATION, held_out=_MAX_HELD_OUT)
    chosen: dict[str, Transcript] = {}
    for transcript in candidates:
        side = split_of(demo_session_hash(transcript))
        if room[side] and transcript.lineage not in chosen:
            room[side] -= 1
            chosen[transcript.lineage] = _cut(transcript)
    if len(chosen) < _MIN_SESSIONS:
        raise SparkError(
            f"the demo's workload '{workload}' needs at least {_MIN_SESSIONS} different texts, "
            f"found {len(chosen)} on this machine",
            hint="record your own sessions: spark-agent record MODEL --sessions PATH --workload NAME",
        )
    return list(chosen.values())


def _cut(transcript: Transcript) -> Transcript:
    """Keep the beginning: whole turns, and of the last one whole lines."""
    room = _MAX_CHARS
    turns: list[Turn] = []
    for turn in transcript.turns:
        if len(turn.text) > room:
            text = turn.text[:room]
            text = text[: text.rfind("\n")] if "\n" in text else text
            if text.strip():
                turns.append(Turn(turn.role, text))
            break
        turns.append(turn)
        room -= len(turn.text)
    return Transcript(transcript.lineage, tuple(turns), transcript.source)
