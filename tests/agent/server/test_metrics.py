"""``/metrics`` and ``/spark/stats``: every name documented, every number true, nothing private."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from spark_agent.paired_gain import GainInterval
from spark_agent.server.activity import CLOSED_KEPT, SECONDS, Activity, ClosedSession, Distribution, Promise
from spark_agent.server.app import create_app
from spark_agent.server.generation import GenerationReport
from spark_agent.server.metrics import Metrics
from spark_agent.server.nearest import Suggestion
from spark_agent.server.observed import Observed, metrics_route
from spark_agent.server.prefetch_control import PrefetchState
from spark_agent.server.state import AgentState
from spark_agent.server.stats import agent_stats
from spark_agent.spool import SpoolStats
from spark_runtime.tier_counting import TierTotals

REPORT = GenerationReport("stop", None, 0.5, 1.0, 0.9, 1.5, 100, 40, 10)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def activity() -> Activity:
    activity = Activity("unlabelled", clock=Clock())
    activity.generation(REPORT)
    activity.request("/v1/messages", "200")
    activity.closed(None, ClosedSession("", 100, 10, 0.25, 0.2, "code"))
    activity.upload(ok=True, histograms=3)
    activity.upload(ok=False)
    return activity


def state_of(activity: Activity, **changes: object) -> AgentState:
    phases = {"prefill": 8, "decode": 4}
    values = {
        "version": "1",
        "model": "nano",
        "fingerprint": "mf1-0",
        "uptime_s": 5.0,
        "workload": "unlabelled",
        "running": 1,
        "waiting": 2,
        "sequences": 4,
        "tokens_cached": 50,
        "resident_share": 0.6,
        "totals": TierTotals(phases, {"prefill": 16, "decode": 8}, {"prefill": 2, "decode": 2}, phases, phases),
        "promise": Promise(0.2, 0.1, 0.3, "code"),
        "prefetch": PrefetchState("trial", "nothing was measured", 1, 8, 32, 900, GainInterval(1.05, 1.01, 1.08)),
        "sessions_open": 3,
        "sessions_lost": 0,
        "spool": SpoolStats(pending=1, bytes=2, rejected=3, dropped=4, last_error="http://host/secret", next_try=None),
        "numbers": activity.numbers(),
        **changes,
    }
    return AgentState(**values)


def families(state: AgentState) -> dict:
    return {family.name: family for family in text_string_to_metric_families(Metrics(lambda: state).text().decode())}


def value(found: dict, name: str, **labels: str) -> float:
    values = [s.value for family in found.values() for s in family.samples if (s.name, s.labels) == (name, labels)]
    assert len(values) == 1, (name, labels)
    return values[0]


def documented(root) -> dict[str, tuple[str, set[str]]]:
    page = (root / "infra/docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", page, re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_every_name_has_a_line_and_every_line_a_name(activity, pytestconfig):
    there = {}
    for family in families(state_of(activity)).values():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        there[name] = (family.type, labels)
        assert family.documentation
    assert there == documented(pytestconfig.rootpath)


def test_the_numbers(activity):
    found = families(state_of(activity))
    assert value(found, "spark_agent_generations_total", outcome="stop", workload="unlabelled") == 1
    assert value(found, "spark_agent_prompt_tokens_total", workload="unlabelled") == 100
    assert value(found, "spark_agent_reused_tokens_total", workload="unlabelled") == 40
    assert value(found, "spark_agent_completion_tokens_total", workload="unlabelled") == 10
    assert value(found, "spark_agent_http_requests_total", route="/v1/messages", status="200") == 1
    assert value(found, "spark_agent_first_token_seconds_sum") == 1.5
    assert value(found, "spark_agent_first_token_seconds_bucket", le="1.0") == 0
    assert value(found, "spark_agent_first_token_seconds_bucket", le="2.5") == 1
    assert value(found, "spark_agent_first_token_seconds_bucket", le="+Inf") == 1
    assert value(found, "spark_agent_token_seconds_sum") == pytest.approx(0.1)
    assert value(found, "spark_agent_decode_tokens_per_second") == pytest.approx(10)
    assert value(found, "spark_agent_cold_hits_total", phase="prefill") == 2
    assert value(found, "spark_agent_live_cold_hit_rate") == 0.25
    assert value(found, "spark_agent_promised_cold_hit_rate", bound="high") == 0.3
    assert value(found, "spark_agent_prefetch", use="trial") == 1
    assert value(found, "spark_agent_prefetch_trial_pairs") == 8
    assert value(found, "spark_agent_prefetch_gain", bound="low") == 1.01
    assert value(found, "spark_agent_spool_dropped_total") == 4
    assert value(found, "spark_agent_uploads_total", result="failed") == 1
    assert value(found, "spark_agent_uploaded_histograms_total") == 3
    assert value(found, "spark_agent_sessions_closed_total", workload="unlabelled") == 1


def test_what_is_not_known_has_no_sample(activity):
    resident = PrefetchState("off", "every expert is resident", 0)
    state = state_of(activity, totals=None, promise=None, spool=None, resident_share=1.0, prefetch=resident)
    found = families(state)
    unknown = ("live_cold_hit_rate", "promised_cold_hit_rate", "spool_pending", "cold_hits")
    for name in (*unknown, "prefetch_trial_pairs", "prefetch_gain"):
        assert found[f"spark_agent_{name}"].samples == []
    stats = agent_stats(state)
    assert (stats["spool"], stats["live"]["cold_hit_rate"], stats["tiered"]) == (None, None, False)


def test_stats_say_the_same_and_nothing_private(activity):
    state = state_of(activity)
    stats = agent_stats(state)
    assert "secret" not in json.dumps(stats, allow_nan=False) + Metrics(lambda: state).text().decode()
    assert stats["phases"]["decode"]["cold_hit_rate"] == stats["live"]["cold_hit_rate"] == 0.25
    assert stats["live"]["promised_cold_hit_rate"] == 0.2
    assert stats["prefetch"] == {
        "use": "trial",
        "reason": "nothing was measured",
        "experts": 1,
        "trial": {
            "pairs": 8,
            "most_pairs": 32,
            "tokens": 900,
            "gain": {"estimate": 1.05, "low": 1.01, "high": 1.08},
        },
    }
    assert stats["generations"] == {"stop": 1, "length": 0, "cancelled": 0, "error": 0}
    assert stats["tokens"] == {"prompt": 100, "reused": 40, "completion": 10}
    assert stats["sessions"] == {
        "open": 3,
        "closed": 1,
        "lost": 0,
        "last": [
            {
                "workload": "unlabelled",
                "prefill_tokens": 100,
                "decode_tokens": 10,
                "cold_hit_rate": 0.25,
                "promised_cold_hit_rate": 0.2,
                "placement": "code",
            }
        ],
    }
    assert stats["uploads"] == {"ok": 1, "failed": 1, "histograms": 3}
    assert stats["suggestion"] is None


def test_names_that_clients_invent_make_no_series_without_end(activity):
    for number in range(1000):
        activity.generation(GenerationReport("stop", f"w{number}", 0, 0, 0, None, 1, 0, 0))
        activity.closed(f"w{number}", ClosedSession("", 1, 1, None, None, "none"))
    numbers = activity.numbers()
    assert len(numbers.prompt_tokens) <= 33
    assert numbers.prompt_tokens.total() == 1100
    assert numbers.prompt_tokens["other"] > 900
    assert len(numbers.last_closed) == CLOSED_KEPT
    assert numbers.last_closed[0].workload == "other"


def test_numbers_do_not_change_afterwards(activity):
    before = activity.numbers()
    activity.generation(REPORT)
    activity.request("/x", "500")
    assert before.generations == Counter({("stop", "unlabelled"): 1})
    assert before.queue_s.counts != activity.numbers().queue_s.counts
    assert len(before.requests) == 1


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.floats(0, 1e6)))
def test_buckets_are_cumulative_and_hold_every_value(values: list[float]) -> None:
    found = Distribution(SECONDS)
    for one in values:
        found.add(one)
    for bound, count in found.cumulative():
        assert count == sum(one <= (math.inf if bound == "+Inf" else float(bound)) for one in values)
    assert found.total == pytest.approx(sum(values))


@dataclass
class _Counts:
    tokens: dict[str, int]
    counts: dict[str, list] = field(default_factory=lambda: {"decode": []})

    def __hash__(self) -> int:
        return id(self)


@dataclass
class _Sessions:
    used: tuple[str | None, _Counts] | None

    def latest(self) -> tuple[str | None, _Counts] | None:
        return self.used


def test_only_unlabelled_sessions_are_compared_and_only_when_they_have_grown():
    asked: list[int] = []

    class Known:
        def nearest(self, _counts: list, tokens: int) -> Suggestion:
            asked.append(tokens)
            return Suggestion("code", 0.1, 0.05, tokens, ())

    activity = Activity("unlabelled", Known)
    counts = _Counts({"decode": 255})
    sessions = _Sessions((None, counts))
    for tokens in (255, 256, 257, 511, 512, 513):
        counts.tokens["decode"] = tokens
        activity.compare(sessions)
        assert len(asked) == (tokens >= 257) + (tokens >= 513), "not on the thread that computes"
        activity.numbers()
    assert asked == [256, 512]
    sessions.used = ("review", _Counts({"decode": 10_000}))
    activity.compare(sessions)
    sessions.used = None
    activity.compare(sessions)
    assert asked == [256, 512]
    found = activity.numbers().suggestion
    assert found is not None
    assert found.decode_tokens == 512
    stats = agent_stats(state_of(activity))
    assert stats["suggestion"] == {
        "workload": "code",
        "cold_hit_rate": 0.1,
        "best_cold_hit_rate": 0.05,
        "source": "service",
        "decode_tokens": 512,
        "others": [],
    }


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_requests_are_told_by_route_and_status(activity):
    app = create_app(
        None,
        SimpleNamespace(n_ctx=1024, tried=lambda *_, **__: "", spell=lambda _: None),
        model="nano",
        health={},
        stats=dict,
        extra_routes=[metrics_route(Metrics(lambda: state_of(activity)))],
    )
    transport = httpx.ASGITransport(Observed(app, app.routes, activity), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for path in ("/spark/stats", "/v1/models/nano", "/v1/models/a/b", "/nothing", "/etc/passwd", "/health"):
            await client.get(path)
        await client.get("/v1/chat/completions")
        await client.post("/v1/chat/completions", content=b"{")
        await client.get("/health", headers={"Host": "evil.example"})
        page = await client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=")
    assert list(text_string_to_metric_families(page.text))
    requests = activity.numbers().requests
    del requests["/v1/messages", "200"]
    assert requests == {
        ("/spark/stats", "200"): 1,
        ("/v1/models/{name:path}", "200"): 1,
        ("/v1/models/{name:path}", "404"): 1,
        ("other", "404"): 2,
        ("/health", "500"): 1,
        ("/health", "403"): 1,
        ("/v1/chat/completions", "405"): 1,
        ("/v1/chat/completions", "400"): 1,
        ("/metrics", "200"): 1,
    }


@pytest.mark.anyio
async def test_a_client_that_left_is_told_apart(activity):
    async def leaving(_scope, _receive, _send) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await Observed(leaving, [], activity)({"type": "http", "path": "/", "method": "GET"}, None, None)
    assert activity.numbers().requests["other", "unanswered"] == 1


@pytest.mark.anyio
async def test_an_answer_is_counted_once_before_its_end_is_sent(activity):
    """Whoever has been answered finds it in the numbers, whatever the server does afterwards."""
    counts = []

    def count() -> int:
        return activity.numbers().requests["other", "200"]

    async def answering(_scope, _receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        assert count() == 0
        await send({"type": "http.response.body", "body": b"b"})
        assert count() == 1

    async def sent(message) -> None:
        counts.append((message["type"], count()))

    await Observed(answering, [], activity)({"type": "http", "path": "/", "method": "GET"}, None, sent)
    assert [number for _, number in counts] == [0, 0, 1]
    assert count() == 1
