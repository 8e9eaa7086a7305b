"""Agents with tiers measure, the service shows it; then their traffic moves, is flagged, and its profile is rebuilt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest

from spark_agent.dialogue.messages import Message
from spark_agent.identity import session_hash
from spark_agent.server.sessions import lineage_of
from spark_schemas.split import split_of

pytestmark = pytest.mark.e2e

SERVICE = ("spark_service.cli", "run", "--open", "-p", "0", "--json", "--data-dir")
RECORD = ("record", "--workload", "code-heavy", "--threads", "1", "--json", "--sessions")
DEADLINE_S = 180.0


def write_programs(folder: Path, count: int) -> None:
    folder.mkdir()
    for index in range(count):
        lines = [f"def step_{index}_{line}(value):\n    return value * {index + line} + {line}\n" for line in range(16)]
        (folder / f"module_{index}.py").write_text("\n".join(lines))


def write_letters(folder: Path, count: int) -> None:
    folder.mkdir()
    for index in range(count):
        text = f"Dear friend number {index}, the garden was quiet this evening and we talked about the sea. "
        (folder / f"letter_{index}.txt").write_text(text * 6)


def questions(key: bytes, side: str, count: int) -> list[str]:
    """First messages of conversations on a side of the split."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        text = f"Tell me a story about the sea, number {number}."
        if split_of(session_hash(key, lineage_of([Message("user", text)]))) == side:
            found.append(text)
        number += 1
    return found


def ask(agent: Any, texts: list[str]) -> None:
    for text in texts:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "temperature": 0}
        reply = httpx.post(f"{agent['base_url']}/v1/chat/completions", json=body, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text


def drift_of(service: Any) -> dict[str, Any]:
    """What the service knows once it has looked, which it does when it starts."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        listed = httpx.get(f"{service['base_url']}/api/v1/drift", timeout=120, trust_env=False).json()["workloads"]
        if listed:
            return listed[0]
        time.sleep(0.1)
    raise AssertionError("the service never looked")


def test_traffic_moves(machine, tmp_path: Path) -> None:
    data = tmp_path / "service"
    key = bytes.fromhex(machine.environment["SPARKMOE_TEAM_KEY"])
    flush = ("upload", "flush", "--json", "--minimum-tokens", "1")
    with machine.serving(*SERVICE, str(data)) as (service, _):
        machine.environment["SPARKMOE_SERVICE_URL"] = service["base_url"]
        machine.agent("upload", "consent", "--yes")
        write_programs(tmp_path / "programs", 36)
        machine.agent(*RECORD, str(tmp_path / "programs"))
        assert machine.agent(*flush)["uploaded"] == 36
        before = machine.agent("profiles", "show", "code-heavy", "--json")
        assert before["n_held_out"] >= 5
        assert (before["live"], before["drift"]) == ([], None)
        machine.agent("pull-profile", "code-heavy", "--vram", "9M", "--json")
        with machine.serving(
            "spark_agent.cli", "run", "-p", "0", "--json", "--threads", "1", "--manifest", "code-heavy"
        ) as (agent, _):
            assert agent["tiers"]["tiered"] is True
            ask(agent, questions(key, "held_out", 4) + questions(key, "calibration", 8))
            decode = httpx.get(f"{agent['base_url']}/spark/stats", timeout=120, trust_env=False).json()["phases"][
                "decode"
            ]
        assert machine.agent(*flush)["uploaded"] == 12
        shown = machine.agent("profiles", "show", "code-heavy", "--json")
        [point] = shown["live"]
        assert (point["policy"], point["n_sessions"]) == ("live_profile", 4)
        assert point["residency"] == pytest.approx(agent["tiers"]["residency"], abs=0.01)
        assert 0 < point["low"] <= point["cold_hit_rate"] <= point["high"] <= 1
        assert point["cold_hit_rate"] < 3 * decode["cold_hit_rate"]

    with duckdb.connect(str(data / "service.duckdb")) as connection:
        [(measured, misses)] = connection.execute("SELECT sum(selections), sum(cold_hits) FROM live").fetchall()
        assert (measured, misses) == (decode["selections"], decode["cold_hits"]), "what the slots counted"
        connection.execute(
            "UPDATE parts SET received_day = received_day - 30 WHERE content_id NOT IN (SELECT content_id FROM live)"
        )
        connection.execute("DELETE FROM tallies")  # of the days before; without them everything is counted anew

    with machine.serving(*SERVICE, str(data)) as (service, _):
        machine.environment["SPARKMOE_SERVICE_URL"] = service["base_url"]
        found = drift_of(service)
        assert (found["workload"], found["state"], found["rebuilt"]) == ("code-heavy", "moved", False)
        assert found["n_sessions"] == 12
        assert found["measured"]["low"] > found["promised"]["high"]
        machine.agent("upload", "consent", "--yes")
        write_letters(tmp_path / "letters", 30)
        machine.agent(*RECORD, str(tmp_path / "letters"))
        assert machine.agent(*flush)["uploaded"] == 30

    with machine.serving(*SERVICE, str(data)) as (service, _):
        machine.environment["SPARKMOE_SERVICE_URL"] = service["base_url"]
        deadline = time.monotonic() + DEADLINE_S
        while not drift_of(service)["rebuilt"]:
            assert time.monotonic() < deadline, "the service never looked"
            time.sleep(0.1)
        after = machine.agent("profiles", "show", "code-heavy", "--json")
        assert after["n_calibration"] + after["n_held_out"] == 42, "the programs of a month ago are left out"
        assert after["drift"]["since"] == found["since"]
        assert found["since"] in after["warnings"][0]
        audit = httpx.get(f"{service['base_url']}/api/v1/admin/audit", timeout=120, trust_env=False).json()["entries"]
        assert [one["action"] for one in audit if one["action"].startswith("drift.")] == ["drift.flag", "drift.rebuild"]
        [listed] = machine.agent("profiles", "ls", "--json")["profiles"]
        assert listed["drift"]["state"] == "moved"
