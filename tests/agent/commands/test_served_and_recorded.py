"""A conversation that was served and whose transcript is recorded, by real agent and command, is counted once."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from agent_process import END_S, KEY, chat, ended, running

from spark_agent.dialogue.messages import Message
from spark_agent.paths import spool_path
from spark_agent.served import marks_of_served
from spark_agent.server.sessions import lineage_of
from spark_agent.spool import Spool

LONG = "Write a function that reads a file of numbers, one a line, and gives their median."


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("SPARKMOE_TEAM_KEY", KEY.hex())


@pytest.fixture
def served(until):
    """Have a message answered; the answer, and when it was asked, once the spool knows that it was."""

    def ask(start: dict[str, Any], text: str) -> tuple[str, dt.datetime]:
        asked_at = dt.datetime.now(dt.UTC)
        answer = chat(start, text)
        marks = marks_of_served(KEY, [lineage_of([Message("user", text)])], None)
        with Spool.open(spool_path()) as spool:
            # No request waits for the disk.
            until(lambda: spool.was_served(start["fingerprint"], marks))
        return answer, asked_at

    return ask


def write(path: Path, opening: str, answer: str, at: dt.datetime) -> None:
    """A transcript as Claude Code keeps it."""
    lines = [
        {
            "type": role,
            "uuid": f"u{number}",
            "sessionId": path.stem,
            "timestamp": f"{at + dt.timedelta(seconds=number):%Y-%m-%dT%H:%M:%S}.250Z",
            "message": {"role": role, "content": text},
        }
        for number, (role, text) in enumerate((("user", opening), ("assistant", answer)))
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_each_conversation_is_counted_once(agent_cli, kept, served, tmp_path):
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    record = ("record", "--sessions", sessions, "--workload", "chat", "--threads", 1)
    with running() as (process, start):
        write(sessions / "long.jsonl", LONG, *served(start, LONG))
        write(sessions / "short.jsonl", "hi", *served(start, "hi"))
        now = dt.datetime.now(dt.UTC)
        write(sessions / "other-day.jsonl", "hi", "Hello there.", now - dt.timedelta(days=3))
        write(sessions / "cloud.jsonl", LONG + " In Rust.", "fn median() {}", now)
        # The conversations are open: their counts are nowhere yet.
        assert kept() == []
        report = agent_cli(*record, "--json").json
        assert (report["sessions"], report["served"], report["known"]) == (2, 2, 0)
        assert len(kept()) == 2
        ended(process)
    assert len(kept()) == 4
    assert len({row.session_hash for row in kept()}) == 4
    again = agent_cli(*record)
    assert "2 sessions that an agent served here" in again.err
    assert "--include-served" in again.err
    assert len(kept()) == 4

    only = tmp_path / "only"
    only.mkdir()
    (sessions / "long.jsonl").rename(only / "long.jsonl")
    found = agent_cli("record", "--sessions", only, "--workload", "chat", "--json", "--threads", 1)
    assert (found.json["sessions"], found.json["served"], found.json["workloads"]) == (0, 1, {}), "no failure"
    wanted = ("record", "--sessions", only, "--workload", "chat", "--include-served", "--json", "--threads", 1)
    assert agent_cli(*wanted).json["sessions"] == 1
    assert len(kept()) == 5


def test_traces_are_written_of_served_conversations_too(agent_cli, kept, tmp_path):
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    with running() as (process, start):
        write(sessions / "long.jsonl", LONG, chat(start, LONG), dt.datetime.now(dt.UTC))
        ended(process)
    before = kept()
    traces = tmp_path / "traces"
    command = ("record", "--sessions", sessions, "--workload", "chat", "--trace", traces, "--json", "--threads", 1)
    report = agent_cli(*command).json
    assert (report["sessions"], report["served"], report["tokens_new"]) == (1, 1, 0)
    assert list(traces.glob("**/*.parquet"))
    assert kept() == before


def test_a_killed_agents_open_conversations_can_be_recorded_once_another_one_starts(agent_cli, kept, served, tmp_path):
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    record = ("record", "--sessions", sessions, "--workload", "chat", "--threads", 1, "--json")
    with running() as (process, start):
        write(sessions / "long.jsonl", LONG, *served(start, LONG))
        assert agent_cli(*record).json["served"] == 1
        process.kill()
        process.wait(END_S)
    assert kept() == []
    with running() as (process, _):
        assert agent_cli(*record).json["sessions"] == 1
        ended(process)
    assert len(kept()) == 1


def test_a_conversation_that_was_recorded_and_goes_on_here_is_counted_once(agent_cli, kept, tmp_path):
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    began = dt.datetime.now(dt.UTC) - dt.timedelta(days=3)
    write(sessions / "long.jsonl", LONG, "fn median() {}", began)
    record = ("record", "--sessions", sessions, "--workload", "chat", "--threads", 1, "--json")
    assert agent_cli(*record).json["sessions"] == 1
    before = kept()
    with running() as (process, start):
        chat(start, LONG)
        chat(start, LONG + " In Rust.")
        ended(process)
    added = [row for row in kept() if row not in before]
    assert len(added) == 1, "only the other conversation is counted as served"
    # What was new in it comes with its transcript.
    write(sessions / "long.jsonl", LONG, "fn median() {} and here is how it works: " + "it sorts. " * 20, began)
    again = agent_cli(*record).json
    assert (again["sessions"], again["served"], again["grown"]) == (1, 0, 1)
    assert len(kept()) == 3
