"""Served through slots: the same answers, the same counts, and what the slots did."""

from __future__ import annotations

from typing import Any

from spark_agent.live import live_misses
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.tier_start import uniform_start
from spark_schemas.invariants import check_session

QUESTIONS = ("How are you today?", "What is a list?", "How are you today? And tomorrow?", "Tell me of the sea.")


def served(serve: Any, residency: float | None) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Answers, histograms by lineage, and the statistics in the end."""
    shape = read_model_shape(demo_model_path())
    tier = None if residency is None else uniform_start(shape, residency)
    with serve(tier=tier, n_ctx=256, repack=False) as agent:
        answers = [agent.answer(question, max_tokens=12) for question in QUESTIONS]
        # The same conversation goes on after others have been served between.
        answers.append(agent.answer(QUESTIONS[0], max_tokens=20))
        events = [event for event in agent.events(QUESTIONS[1], max_tokens=3) if isinstance(event, dict)]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        answers.append("".join(delta.get("content") or "" for delta in deltas))
        stats = agent.client.get("/spark/stats").json()
    histograms = {lineage: counts.to_histogram("ab" * 32, "chat") for lineage, counts in agent.kept}
    assert agent.complaints == []
    return answers, histograms, stats


def test_tiers_change_neither_answers_nor_histograms(serve):
    answers, histograms, stats = served(serve, None)
    assert stats == {"tiered": False, "resident_share": 1.0, "phases": {}}
    assert len(histograms) == 4
    for residency in (0.6, 0.0):
        tiered_answers, tiered_histograms, tiered_stats = served(serve, residency)
        assert tiered_answers == answers
        assert tiered_histograms == histograms, "what would be uploaded"
        assert tiered_stats["tiered"] is True
        for phase, counted in tiered_stats["phases"].items():
            layers = [getattr(histogram, phase).layers for histogram in histograms.values()]
            assert counted["selections"] == sum(sum(layer.counts) for session in layers for layer in session)
            assert 0 < counted["cold_hits"] <= counted["selections"]
            assert counted["cold_hit_rate"] == counted["cold_hits"] / counted["selections"]
            assert counted["tokens"] == sum(getattr(histogram, phase).tokens for histogram in histograms.values())


def test_what_is_told_of_sessions_is_what_the_slots_counted(serve):
    shape = read_model_shape(demo_model_path())
    start = uniform_start(shape, 0.3)
    with serve(tier=start, n_ctx=256) as agent:
        for question in (*QUESTIONS, QUESTIONS[0]):
            agent.answer(question, max_tokens=12)
        decode = agent.client.get("/spark/stats").json()["phases"]["decode"]
    told = [live_misses(counts, None) for _, counts in agent.kept]
    assert len(told) == 4
    assert sum(one.selections for one in told) == decode["selections"]
    assert sum(one.cold_hits for one in told) == decode["cold_hits"] > 0
    assert {one.resident_bytes for one in told} == {
        sum(one.slots * layer.expert_bytes for one, layer in zip(start.layers, shape.layers, strict=True))
    }
    for (_, counts), live in zip(agent.kept, told, strict=True):
        check_session(counts.to_histogram("ab" * 32, "chat", live), shape)


def test_stats_are_there_before_the_first_request(serve):
    shape = read_model_shape(demo_model_path())
    with serve(tier=uniform_start(shape, 0.5), n_ctx=64) as agent:
        stats = agent.client.get("/spark/stats").json()
        assert stats["phases"]["decode"] == {
            "tokens": 0,
            "selections": 0,
            "cold_hits": 0,
            "cold_hit_rate": None,
            "loads": 0,
            "bytes_moved": 0,
            "l1_hits": 0,
            "l2_hits": 0,
            "prefetched_bytes": 0,
            "prefetched_used_bytes": 0,
            "prefetched_wasted_bytes": 0,
        }
