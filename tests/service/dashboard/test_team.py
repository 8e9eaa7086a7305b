"""What the team's page says: from rows to sentences."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from spark_runtime.placement import Interval
from spark_schemas.drift import Drift, RateInterval
from spark_schemas.profile import CurvePoint, LiveComparison, LivePoint, Profile
from spark_service.catalog import Catalog
from spark_service.dashboard.team import read_activity, read_judged
from spark_service.dashboard.team_views import (
    Judgement,
    activity_of,
    judged_of,
    memory_classes,
    quiet_workloads,
    rate_at,
    residency_for,
    saving_of,
)
from spark_service.db.activity import AgentUploads, LiveSize, SessionsOfDay, received, uploads_by_version
from spark_service.db.drift import save_state
from spark_service.db.store import Store
from spark_service.drift import State
from spark_service.errors import StorageError
from spark_service.retention import apply_retention

GB = 10**9
TODAY = (dt.datetime.now(dt.UTC).date() - dt.date(1970, 1, 1)).days
RATE = RateInterval(cold_hit_rate=0.1, low=0.09, high=0.11)


def size(n_bytes: int, sessions: int, *, with_profile: bool = True, workload: str = "code") -> LiveSize:
    return LiveSize("mf1-x", workload, n_bytes, with_profile, sessions)


def profile(make: Any, **changes: Any) -> Profile:
    curves = {
        "own": [1 - step / 10 for step in range(1, 11)],  # misses 40% at 60%
        "uniform": [1 - step / 20 for step in range(1, 10)] + [0.0],  # never below 55% before all are resident
        "lru": [1 - step / 12 for step in range(1, 11)],  # misses 40% at 72%
    }
    points = [
        CurvePoint(policy=policy, residency=(index + 1) / 10, cold_hit_rate=rate, low=rate, high=rate)
        for policy, rates in curves.items()
        for index, rate in enumerate(rates)
    ]
    fields = {
        "fingerprint": make.fingerprint, "workload": "code", "phase": "decode", "revision": "0" * 64,
        "n_calibration": 10, "n_held_out": 5, "tokens_calibration": 1, "tokens_held_out": 1, "layers": (),
        "curves": tuple(points), "verdict": "profile", "verdict_reason": "it does",
    }  # fmt: skip
    return Profile.model_construct(**{**Profile.model_construct().__dict__, **fields, **changes})


def test_curves_are_read_between_their_points() -> None:
    curve = [(0.5, 0.4), (1.0, 0.0)]
    assert [rate_at(curve, at) for at in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([1.0, 0.7, 0.4, 0.2, 0.0])
    for rate in (1.0, 0.7, 0.4, 0.3, 0.0):
        assert rate_at(curve, residency_for(curve, rate)) == pytest.approx(rate)
    assert residency_for([(0.5, 0.4), (1.0, 0.2)], 0.1) == 1.0
    assert residency_for([(0.5, 0.4), (1.0, 0.4)], 0.4) == 0.5


def test_a_saving_is_what_a_cache_needs_more(make: Any) -> None:
    shape = make.shape()
    total = shape.expert_bytes_total
    usual = saving_of(Judgement(shape, "code", profile(make)), [], 7)
    assert usual is not None
    assert not usual.is_measured_size
    assert usual.cold_hit_rate == pytest.approx(0.4)
    assert usual.resident_bytes == round(0.6 * total)
    assert usual.needed_bytes == pytest.approx(0.72 * total, abs=1)
    assert usual.saved_bytes == usual.needed_bytes - usual.resident_bytes
    measured = saving_of(Judgement(shape, "code", profile(make)), [round(0.5 * total)] * 3, 7)
    assert measured is not None
    assert measured.is_measured_size
    assert measured.needed_bytes == pytest.approx(0.6 * total, abs=1)
    for verdict in ("cache_only", "no_gain"):
        nothing = saving_of(Judgement(shape, "code", profile(make, verdict=verdict)), [], 7)
        assert nothing is not None
        assert nothing.saved_bytes == 0
    assert saving_of(Judgement(shape, "code", profile(make, verdict=None)), [], 7) is None
    assert saving_of(Judgement(shape, "code", None, "none"), [], 7) is None


def test_the_mean_saving_counts_sessions(make: Any) -> None:
    shape = make.shape()
    judgements = [
        Judgement(shape, "code", profile(make)),
        Judgement(shape, "chat", profile(make, workload="chat", verdict="no_gain")),
    ]
    found = judged_of(judgements, [], {(make.fingerprint, "code"): 1, (make.fingerprint, "chat"): 3})
    assert found.average_saved_bytes == round(found.savings[0].saved_bytes / 4)
    assert judged_of(judgements, [], {}).average_saved_bytes is None


def test_what_needs_attention_comes_with_its_number(make: Any) -> None:
    shape = make.shape()
    moved = Drift(
        state="moved", since="2026-11-02", rebuilt=True, n_sessions=20, promised=RATE,
        measured=RateInterval(cold_hit_rate=0.3, low=0.2, high=0.4),
    )  # fmt: skip
    worse = LiveComparison(residency=0.6, difference=0.05, low=0.01, high=0.09, n_profile=9, n_unprofiled=8)
    judgements = [
        Judgement(shape, "quiet", profile(make, verdict="cache_only", verdict_reason="a. Whether b")),
        Judgement(shape, "new", None, "new: found 1 calibration sessions, expected at least 3"),
        Judgement(shape, "few", profile(make, verdict=None, verdict_reason="2 more held-out sessions needed (1 of 3)")),
        Judgement(shape, "flat", profile(make, verdict="no_gain", verdict_reason="neither")),
        Judgement(shape, "moved", profile(make, drift=moved, live_comparisons=(worse,))),
        Judgement(shape, "fine", profile(make)),
    ]
    notes = judged_of(judgements, [], {}).attention
    assert [(note.level, note.workload) for note in notes] == [
        ("bad", "moved"), ("bad", "moved"), ("warn", "new"), ("warn", "few"), ("warn", "flat"), ("plain", "quiet"),
    ]  # fmt: skip
    texts = [note.text for note in notes]
    assert "since 2026-11-02" in texts[0]
    assert "miss 30.0% of selections on the 20 most recent sessions, and 10.0% were promised" in texts[0]
    assert "built from the sessions since then alone" in texts[0] or "alone now" in texts[0]
    assert "5.0 points more than those without, at 60% residency (9 sessions against 8)" in texts[1]
    assert texts[2] == "No profile yet: found 1 calibration sessions, expected at least 3."
    assert texts[3] == "Too few sessions to judge the profile: 2 more held-out sessions needed (1 of 3)."
    assert texts[5] == "The cache does the work, not the profile: a."


def test_promises_stand_beside_what_was_measured(make: Any) -> None:
    steady = Drift(state="steady", since=None, rebuilt=False, n_sessions=12, promised=RATE, measured=RATE)
    live = tuple(
        LivePoint(policy=policy, residency=0.6, cold_hit_rate=rate, low=rate, high=rate, n_sessions=count)
        for policy, rate, count in (("live_profile", 0.04, 5), ("live_profile", 0.05, 9), ("live_unprofiled", 0.2, 50))
    )
    found = judged_of([Judgement(make.shape(), "code", profile(make, drift=steady, live=live))], [], {}).promises
    assert [(one.promised, one.measured, one.live, one.live_sessions) for one in found] == [(0.1, 0.1, 0.05, 9)]
    assert judged_of([Judgement(make.shape(), "code", profile(make))], [], {}).promises == []


def test_few_sessions_are_not_told_apart_by_memory() -> None:
    sizes = [size(3 * GB, 2), size(4 * GB, 2), size(5 * GB, 2), size(500 * GB, 1), size(12 * GB, 3)]
    assert [(one.label, one.sessions) for one in memory_classes(sizes)] == [
        ("up to 4 GB", 4), ("8 to 12 GB", 3), ("other sizes, too few to tell apart", 3),
    ]  # fmt: skip
    assert memory_classes([]) == []


def test_days_without_sessions_are_zeros(make: Any) -> None:
    shape = make.shape()
    counts = [
        SessionsOfDay(make.fingerprint, "code", TODAY - 40, 3, 1),
        SessionsOfDay(make.fingerprint, "code", TODAY - 2, 1, 0),
    ]
    tokens = {(make.fingerprint, "code"): {TODAY - 40: 900, TODAY - 2: 100}}
    agents = [AgentUploads("0.1.0", 2, 5, TODAY)]
    found = activity_of([shape], counts, tokens, agents, [], TODAY)
    assert [(day.sessions, day.tokens) for day in found.days] == [(4, 900)] + [(0, 0)] * 37 + [(1, 100)] + [(0, 0)] * 2
    assert (found.sessions, found.recent_sessions, found.tokens) == (5, 1, 1000)
    [workload] = found.models[0].workloads
    assert (workload.sessions, workload.held_out, workload.recent_sessions) == (5, 1, 1)
    assert quiet_workloads(found, TODAY) == []
    [note] = quiet_workloads(found, TODAY + 20)
    assert "No session since" in note.text


def test_it_is_read_from_what_was_uploaded(store: Store, make: Any) -> None:
    shape = make.shape()
    sessions = [
        make.live(shape, one, profile=make.profile()) for one in make.sessions(shape, 4, 4, decode=50, prefill=30)
    ]
    store.add_upload(make.upload(shape, sessions), "a", "a")
    upload = make.upload(shape, make.sessions(shape, 1, 0, workload="chat", decode=20))
    store.add_upload(upload.model_copy(update={"agent_version": "<b>2</b>"}), "b", "b")
    state = State(
        state="steady", since_day=None, rebuilt=False, after_sequence=-1, n_sessions=8,
        promised=Interval(0.1, 0.09, 0.11), measured=Interval(0.1, 0.09, 0.11),
    )  # fmt: skip
    with store.writing() as cursor:
        save_state(cursor, shape.fingerprint, "code", state)
    catalog = Catalog(store, min_sessions=3)
    activity = read_activity(store, catalog)
    assert activity.tokens == 8 * 80 + 20
    assert (activity.sessions, activity.recent_sessions) == (9, 9)
    assert sum(day.sessions for day in activity.days) == 9
    assert [(one.version, one.histograms) for one in activity.agents] == [("0.1.0", 8), ("other", 1)]
    judged = read_judged(store, catalog)
    assert judged.verdicts[f"{shape.fingerprint}/chat"] is None
    assert [one.workload for one in judged.promises] == ["code"]
    assert judged.promises[0].live == pytest.approx(0.1, abs=0.01)
    with store.reading() as cursor:
        found = received(cursor)
    assert (found.sessions, found.parts, found.decode, found.prefill, found.live) == (8, 9, 9, 8, 8)
    assert (found.calibration, found.held_out, found.with_profile, found.versions) == (4, 4, 8, 2)


def test_versions_beyond_the_first_of_a_day_are_one(store: Store, make: Any) -> None:
    shape = make.shape()
    for index in range(70):
        upload = make.upload(shape, [make.session(shape, make.hash(index), seed=index, decode=5)])
        store.add_upload(upload.model_copy(update={"agent_version": f"1.{index}"}), f"k{index}", f"k{index}")
        if index == 40:
            store.flush_agents()
    store.flush_agents()
    with store.reading() as cursor:
        found = uploads_by_version(cursor, dt.date(1970, 1, 1))
    assert len(found) == 65
    assert (found[0].version, found[0].uploads) == ("other", 6)
    assert sum(one.histograms for one in found) == 70


def test_counts_of_versions_go_with_their_day(store: Store, make: Any) -> None:
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape, 2, 0, decode=5)), "a", "a")
    store.flush_agents()
    with store.writing() as cursor:
        for table in ("parts", "agent_uploads"):
            cursor.execute(f"UPDATE {table} SET received_day = current_date - 50")
    apply_retention(store, 30, dt.datetime.now(dt.UTC).date(), "cli")
    with store.reading() as cursor:
        assert uploads_by_version(cursor, dt.date(1970, 1, 1)) == []


def test_versions_outlive_a_restart_and_a_refusal(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, path = make.shape(), tmp_path / "again.duckdb"
    store = Store.open(path)
    store.add_upload(make.upload(shape, make.sessions(shape, 2, 0, decode=5)), "a", "a")

    def refuse(*_: object) -> None:
        raise StorageError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("spark_service.db.activity.AgentCounts.store", refuse)
        with pytest.raises(StorageError):
            store.flush_agents()
    store.close()
    opened = Store.open(path)
    with opened.reading() as cursor:
        assert [(one.version, one.histograms) for one in uploads_by_version(cursor, dt.date(1970, 1, 1))] == [
            ("0.1.0", 2)
        ]
    opened.close()
