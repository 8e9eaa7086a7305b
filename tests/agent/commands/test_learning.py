"""An agent learns from what it served: the second start is calibrated; placements are taken over while it runs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from agent_process import END_S, asked, chat, ended, running

from spark_agent.own_counts import OwnCounts
from spark_agent.paths import own_counts_path
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_schemas.split import split_of

PLACES = ("the sea", "my garden", "a train", "an old house", "the moon", "a list")
TOPICS = [
    f"{what} {place}" for what in ("the weather at", "bread and", "a story of", "a friend from") for place in PLACES
]
"""Enough for a profile: the demo model answers in few words."""
START = ("--residency", "0.3", "--workload", "chat", "--ctx", "512")


def served(*arguments: object, words: str) -> tuple[dict[str, Any], dict[str, Any], list[str], str]:
    """Start-up object, decode counters, answers and what was said, of one agent's life."""
    with running(*START, *arguments) as (process, start):
        answers = [chat(start, f"{words} {topic}.", 48) for topic in TOPICS]
        decode = asked(start, "/spark/stats")["phases"]["decode"]
        return start, decode, answers, ended(process)


def test_the_second_start_is_calibrated(spark_cli):
    first, cold, answers, said = served(words="Tell me of")
    assert first["placement"]["source"] == "none"
    assert "no session of this model was served here yet" in said
    kept = spark_cli("profiles", "ls", "--local", "--json").json["profiles"]
    assert [(one["workload"], one["sessions"], one["source"]) for one in kept] == [("chat", len(TOPICS), "local")]
    assert kept[0]["tokens"] == cold["tokens"]

    second, warm, again, said = served(words="Tell me of")
    assert second["placement"]["source"] == "local"
    assert second["manifest"]["workload"] == "chat"
    assert "own sessions of chat" in said
    assert again == answers, "placement changes no token"
    assert warm["selections"] == cold["selections"]
    assert warm["cold_hits"] < cold["cold_hits"]

    third, uncalibrated, again, _ = served("--no-profile", words="Tell me of")
    assert third["placement"]["source"] == "none"
    assert (again, uncalibrated["cold_hits"]) == (answers, cold["cold_hits"]), "as the first start, to the last hit"

    assert spark_cli("profiles", "forget", "chat", "--json").json == {"forgotten": len(TOPICS)}
    assert spark_cli("profiles", "ls", "--local", "--json").json["profiles"] == []


def test_unlabelled_requests_are_compared_with_own_sessions_and_stay_unlabelled(agent_cli):
    served(words="Tell me of")
    with running("--residency", "0.3", "--ctx", "512", "--no-profile") as (process, start):
        for number in range(60):
            chat(start, "Tell me of the sea and the moon, please.", 48 + number)
            if (found := asked(start, "/spark/stats")["suggestion"]) is not None:
                break
        assert (found["workload"], found["source"], found["others"]) == ("chat", "local", [])
        assert 0.0 <= found["best_cold_hit_rate"] <= found["cold_hit_rate"] < 1.0
        said = agent_cli("ps").err
        assert "look like chat: the profile of your own sessions of it misses" in said
        assert "spark-agent run --workload chat" in said
        assert {row["workload"] for row in asked(start, "/spark/stats")["workloads"]} == {"unlabelled"}
        assert asked(start, "/spark/placement")["source"] == "none", "shown, never applied"
        ended(process)


def test_what_local_profiles_promise(spark_cli):
    with running(*START) as (process, start):
        for topic in TOPICS[:8]:
            chat(start, f"Tell me of {topic}.", 48)
        ended(process)
    shape = read_model_shape(demo_model_path())
    with OwnCounts(own_counts_path(), pytest.fail) as counts:
        parts = counts.parts(shape)["chat"]
    sides = [split_of(part.session_hash) for part in parts]
    pulled = spark_cli("pull-profile", "chat", "--local", "--json").json
    assert pulled["source"] == "local"
    assert pulled["signed_by"] is None
    assert pulled["manifest"]["n_calibration"] == sides.count("calibration")
    assert pulled["manifest"]["n_held_out"] == sides.count("held_out") < 3, "then nothing is promised"
    assert pulled["expected_cold_hit_rate"] is None
    assert pulled["verdict"] is None
    assert "held-out session" in pulled["manifest"]["verdict_reason"]
    shown = spark_cli("profiles", "show", "chat", "--local", "--json").json
    assert shown["revision"] == pulled["manifest"]["profile_revision"]


def test_a_placement_is_taken_over_between_tokens(spark_cli):
    with running(*START, "--no-profile") as (process, start):
        answers = [chat(start, f"Tell me of {topic}.", 48) for topic in TOPICS[:6]]
        refused = httpx.post(
            f"{start['base_url']}/spark/placement", json={"local": "chat"}, timeout=END_S, trust_env=False
        )
        assert refused.status_code == 409, "no session has closed yet"
        assert "no session of chat" in refused.json()["error"]["message"]
        assert asked(start, "/spark/placement")["source"] == "none"
        ended(process)
    with running(*START, "--no-profile", "--replacement", "watch", SPARKMOE_REPLACEMENT="off") as (process, start):
        before = asked(start, "/spark/placement")
        assert before["replacement"] == "watch", "an option comes before its variable"
        assert (before["source"], before["tiered"], before["decisions"]) == ("none", True, [])
        left = spark_cli("pull-profile", "chat", "--local", "--no-apply")
        assert (left.code, "applied" in left.err) == (0, False)
        assert asked(start, "/spark/placement") == before
        pulled = spark_cli("pull-profile", "chat", "--local")
        assert f"applied to the agent at {start['base_url']}" in pulled.err
        now = asked(start, "/spark/placement")
        assert (now["source"], now["workload"]) == ("local", "chat")
        assert now["since"] >= before["since"]
        assert [chat(start, f"Tell me of {topic}.", 48) for topic in TOPICS[:6]] == answers
        assert asked(start, "/spark/placement")["live_cold_hit_rate"] > 0
        ended(process)


def test_a_contradiction_is_refused(agent_cli):
    agent_cli("run", "--manifest", "chat", "--no-profile").failed(2, "--no-profile")
