"""The demo's sessions: enough of them, on both sides of the split, the same every time."""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
from collections import Counter
from pathlib import Path

import pytest

from spark_agent.demo import DEMO_KEY, DEMO_WORKLOADS, demo_session_hash, demo_sessions, sessions
from spark_agent.demo.code import code_files
from spark_agent.errors import SparkError
from spark_agent.transcripts import Transcript, Turn, read_transcripts
from spark_schemas.split import split_of

DIALOGUES = Path(sessions.__file__).with_name("dialogues")


@pytest.fixture(scope="module")
def found() -> dict[str, list[Transcript]]:
    return demo_sessions()


def test_workloads_and_sizes(found: dict[str, list[Transcript]]) -> None:
    assert tuple(found) == DEMO_WORKLOADS
    for transcripts in found.values():
        assert 16 <= len(transcripts) <= 40
        for transcript in transcripts:
            assert 0 < sum(len(turn.text) for turn in transcript.turns) <= 6_000


def test_both_sides_of_the_split(found: dict[str, list[Transcript]]) -> None:
    for transcripts in found.values():
        sides = Counter(split_of(demo_session_hash(transcript)) for transcript in transcripts)
        assert sides["held_out"] >= 3
        assert sides["calibration"] >= 8
    # The dialogues are fixed, so is their split.
    assert Counter(split_of(demo_session_hash(item)) for item in found["chat"]) == {"calibration": 21, "held_out": 7}


def test_no_session_is_in_two_workloads(found: dict[str, list[Transcript]]) -> None:
    lineages = [transcript.lineage for transcripts in found.values() for transcript in transcripts]
    assert len(lineages) == len(set(lineages))


def test_same_every_time(found: dict[str, list[Transcript]]) -> None:
    assert demo_sessions() == found


def test_session_hash_uses_the_published_key() -> None:
    transcript = Transcript("ab" * 32, (Turn("text", "x"),), Path("x"))
    expected = hmac.new(b"spark-demo-sessions-v1", b"ab" * 32, hashlib.sha256).hexdigest()
    assert DEMO_KEY == b"spark-demo-sessions-v1"
    assert demo_session_hash(transcript) == expected


def test_code_is_spread_over_families() -> None:
    paths = [path for path in code_files() if path.suffix == ".py"]
    # One of each family comes before any family's second.
    assert len({path.parent if path.parent.name != "" else path for path in paths[:40]}) > 8
    for path in paths:
        assert path.stat().st_size >= 4_000
        assert not {"test", "tests", "idlelib", "turtledemo", "encodings", "site-packages"} & set(path.parts)


def test_dialogues_are_conversations() -> None:
    paths = sorted(DIALOGUES.glob("*.md"))
    assert len(paths) >= 26
    for path in paths:
        (transcript,) = read_transcripts(path)
        assert isinstance(transcript, Transcript)
        roles = [turn.role for turn in transcript.turns]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2), path.name
        assert 8 <= len(roles) <= 20, path.name
        assert 350 <= sum(len(turn.text.split()) for turn in transcript.turns) <= 600, path.name


def test_too_few_texts_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "project_documents", list)
    monkeypatch.setattr(importlib.metadata, "distributions", list)
    with pytest.raises(SparkError, match="'docs' needs at least 16 different texts, found 0") as caught:
        demo_sessions()
    assert caught.value.hint is not None


def test_cut_keeps_whole_lines() -> None:
    transcript = Transcript("0" * 64, (Turn("user", "a" * 10), Turn("text", "line\n" * 3_000)), Path("x"))
    first, second = sessions._cut(transcript).turns
    assert first.text == "a" * 10
    assert second.text.endswith("line")
    assert 5_900 < len(second.text) <= 5_990
    exactly_full = Transcript("0" * 64, (Turn("user", "a" * 6_000), Turn("assistant", "b")), Path("x"))
    assert [turn.text for turn in sessions._cut(exactly_full).turns] == ["a" * 6_000]
