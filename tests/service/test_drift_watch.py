"""From stored sessions and served manifests to a flag, a rebuilt profile, and its end."""

from __future__ import annotations

import datetime as dt
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from spark_runtime.placement import cold_hit_rates
from spark_schemas.drift import Drift, DriftList, WorkloadDrift
from spark_schemas.live import LiveProfile
from spark_schemas.manifest import PlacementManifest
from spark_schemas.profile import Profile
from spark_service.app import create_app
from spark_service.db.store import Store
from spark_service.drift_watch import DriftWatch, all_drift, clear_drift
from spark_service.verification import verify

BUDGET = {"vram_bytes": 4000, "n_ctx": 100}
TODAY = dt.datetime.now(dt.UTC).date()


class Team:
    """Agents that record and run sessions of one workload, on days that the test chooses."""

    def __init__(self, store: Store, make: Any) -> None:
        self.store = store
        self.make = make
        self.shape = make.shape()
        self.watch = DriftWatch(store)
        self._uploads = 0
        self._sessions = 0

    def send(self, sessions: list[Any], days_ago: int) -> None:
        """Store sessions as if they had come so many days ago."""
        self._uploads += 1
        key = f"upload {self._uploads}"
        ids = [session.content_id(self.shape.fingerprint) for session in sessions]
        self.store.add_upload(self.make.upload(self.shape, sessions), key, key)
        with self.store.writing() as cursor:
            day = TODAY - dt.timedelta(days=days_ago)
            cursor.execute("UPDATE parts SET received_day = ? WHERE list_contains(?, content_id)", [day, ids])

    def sessions(self, calibration: int, held_out: int, **how: Any) -> list[Any]:
        """Sessions that nobody has had before."""
        start = self._sessions
        self._sessions += calibration + held_out
        sides = ["calibration"] * calibration + ["held_out"] * held_out
        return [
            self.make.session(self.shape, self.make.hash(start + index, side), seed=start + index, **how)
            for index, side in enumerate(sides)
        ]

    def client(self) -> TestClient:
        return TestClient(create_app(self.store, open_access=True))

    def pull(self) -> PlacementManifest:
        with self.client() as client:
            answer = client.get(f"/api/v1/manifests/{self.shape.fingerprint}/code", params=BUDGET)
            assert answer.status_code == 200, answer.text
            return PlacementManifest.model_validate_json(answer.content)

    def profile(self) -> Profile:
        with self.client() as client:
            return Profile.model_validate_json(client.get(f"/api/v1/profiles/{self.shape.fingerprint}/code").content)

    def ran(self, manifest: PlacementManifest, sessions: list[Any], days_ago: int, rate: float = 0.1) -> None:
        """Sessions that ran with a manifest."""
        profile = LiveProfile(
            workload=manifest.workload,
            revision=manifest.profile_revision,
            vram_budget_bytes=manifest.vram_budget_bytes,
        )
        self.send([self.make.live(self.shape, one, rate, profile=profile) for one in sessions], days_ago)

    def look(self) -> WorkloadDrift:
        self.watch.review()
        [found] = all_drift(self.store).workloads
        return found

    def audited(self) -> list[str]:
        with self.store.reading() as cursor:
            rows = cursor.execute("SELECT action FROM audit_log WHERE action LIKE 'drift.%' ORDER BY entry").fetchall()
        return [row[0] for row in rows]


@pytest.fixture
def team(store: Store, make: Any) -> Team:
    found = Team(store, make)
    found.send(found.sessions(20, 8), days_ago=60)
    return found


def moved(team: Team) -> PlacementManifest:
    """A month as promised, then ten days of other traffic."""
    manifest = team.pull()
    for days_ago in range(30, 10, -4):
        team.ran(manifest, team.sessions(4, 1), days_ago)
    assert team.look().state == "steady"
    for days_ago in range(10, 4, -2):
        team.ran(manifest, team.sessions(3, 1, taste=9), days_ago)
    return manifest


def test_a_promise_that_is_kept_is_said_to_be(team: Team) -> None:
    manifest = team.pull()
    sessions = team.sessions(10, 2)
    team.ran(manifest, sessions, days_ago=2)
    found = team.look()
    assert (found.state, found.since, found.rebuilt, found.n_sessions) == ("steady", None, False, 12)
    assert manifest.expected is not None
    assert found.promised is not None
    assert found.measured is not None
    assert found.promised.cold_hit_rate == pytest.approx(manifest.expected.cold_hit_rate)
    # What the hot set would have missed, counted apart from the service.
    counts = [
        np.array([session.decode.layers[index].counts for session in sessions]) for index in range(len(manifest.layers))
    ]
    hot = [np.array(layer.hot_set) for layer in manifest.layers]
    assert found.measured.cold_hit_rate == pytest.approx(cold_hit_rates(counts, hot).mean())
    assert team.audited() == []
    told = Drift.model_validate(found.model_dump(exclude={"fingerprint", "workload"}))
    assert team.profile().drift == told


def test_traffic_that_moves_is_flagged_and_rebuilt_and_the_flag_ends(team: Team) -> None:
    manifest = moved(team)
    found = team.look()
    assert (found.state, found.since, found.rebuilt) == ("moved", str(TODAY - dt.timedelta(days=10)), False)
    assert found.promised is not None
    assert found.measured is not None
    assert found.measured.low > found.promised.high
    assert team.audited() == ["drift.flag"]
    # Three held-out sessions are too few to judge a rebuilt profile.
    before = team.profile()
    assert before.n_calibration + before.n_held_out == 28 + 25 + 12
    assert before.warnings == ()
    team.send(team.sessions(2, 3, taste=9), days_ago=3)
    found = team.look()
    assert (found.state, found.rebuilt) == ("moved", True)
    assert team.audited() == ["drift.flag", "drift.rebuild"]
    after = team.profile()
    assert (after.n_calibration, after.n_held_out) == (11, 6)
    assert after.revision != before.revision
    [warning] = after.warnings
    assert str(TODAY - dt.timedelta(days=10)) in warning
    rebuilt = team.pull()
    assert rebuilt.expected is not None
    assert manifest.expected is not None
    assert rebuilt.profile_revision == after.revision
    # Who still runs the old manifest tells nothing new.
    team.ran(manifest, team.sessions(8, 2, taste=9), days_ago=2)
    assert (team.look().state, team.audited()) == ("moved", ["drift.flag", "drift.rebuild"])
    team.ran(team.pull(), team.sessions(10, 2, taste=9), days_ago=1)
    found = team.look()
    assert (found.state, found.since, found.rebuilt) == ("steady", str(TODAY - dt.timedelta(days=10)), True)
    assert team.audited() == ["drift.flag", "drift.rebuild", "drift.end"]
    assert team.profile().n_calibration == 11 + 8 + 10, "older traffic stays out"
    assert team.look() == found
    assert len(team.audited()) == 3


def test_an_administrator_counts_everything_again(team: Team) -> None:
    moved(team)
    team.send(team.sessions(2, 3, taste=9), days_ago=3)
    team.look()
    everything = 28 + 25 + 12 + 5
    with team.client() as client:
        path = f"/api/v1/admin/drift/{team.shape.fingerprint}/code"
        assert client.delete(path).json() == {"cleared": True}
        assert client.delete(path.replace("code", "chat")).json() == {"cleared": False}
    profile = team.profile()
    assert profile.n_calibration + profile.n_held_out == everything
    assert profile.warnings == ()
    found = team.look()
    assert (found.state, found.since, found.rebuilt) == ("steady", None, False), "old manifests tell nothing any more"
    assert team.audited() == ["drift.flag", "drift.rebuild", "drift.clear"]


def test_it_is_listed(team: Team) -> None:
    moved(team)
    expected = team.look()
    with team.client() as client:
        listed = DriftList.model_validate_json(client.get("/api/v1/drift").content)
        [summary] = client.get("/api/v1/profiles").json()["profiles"]
    assert listed.workloads == (expected,)
    assert summary["drift"]["state"] == "moved"


def test_nothing_known_is_not_even_named(team: Team) -> None:
    with team.client() as client:
        assert client.get("/api/v1/drift").json() == {"workloads": []}
        assert "drift" not in client.get("/api/v1/profiles").text
        text = client.get(f"/api/v1/profiles/{team.shape.fingerprint}/code").text
    assert not [name for name in ("drift", "live", "live_comparisons") if f'"{name}"' in text]


def test_a_deleted_session_leaves_the_rates_at_once(team: Team) -> None:
    manifest = moved(team)
    before = team.look()
    assert before.measured is not None
    team.store.delete_session(team.make.hash(0))
    [found] = all_drift(team.store).workloads
    assert (found.state, found.since, found.n_sessions) == ("moved", before.since, 0)
    assert (found.promised, found.measured) == (None, None)
    # Its manifests are forgotten with it: who runs them is no measure any more; new ones are, at once.
    assert team.look() == found
    team.ran(team.pull(), team.sessions(10, 2, taste=9), days_ago=1)
    assert team.look().n_sessions == 12
    assert manifest.profile_revision != team.pull().profile_revision


def test_what_is_known_outlives_a_restart_and_verifies(store: Store, team: Team, tmp_path: Path) -> None:
    moved(team)
    expected = team.look()
    copy = tmp_path / "copy"
    copy.mkdir()
    store.copy_to(copy / "service.duckdb", copy / "segments")
    opened = Store.open(copy / "service.duckdb", memory="256MB", threads=1)
    try:
        assert all_drift(opened).workloads == (expected,)
        DriftWatch(opened).review()
        assert all_drift(opened).workloads == (expected,)
        while opened.age_out(dt.date(9999, 1, 1)):
            pass
        DriftWatch(opened).review()
        assert all_drift(opened).workloads == (expected,), "segments hold the same counts"
    finally:
        opened.close()
    assert verify(copy, memory="256MB", threads=1).faults == 0
    shutil.rmtree(copy)


def test_other_workloads_and_unknown_manifests_tell_nothing(team: Team) -> None:
    manifest = team.pull()
    team.ran(manifest, team.sessions(10, 2, workload="chat", taste=9), days_ago=1)
    stranger = manifest.model_copy(update={"profile_revision": "0" * 64})
    team.ran(stranger, team.sessions(10, 2, taste=9), days_ago=1)
    team.send([team.make.live(team.shape, one) for one in team.sessions(10, 2, taste=9)], days_ago=1)
    team.watch.review()
    assert all_drift(team.store).workloads == ()


def test_a_look_waits_for_news_and_rests(team: Team) -> None:
    now = [0.0]
    looks: list[int] = []

    class Counting(DriftWatch):
        def review(self) -> None:
            looks.append(1)
            now[0] += 2.0
            super().review()

    watch = Counting(team.store, clock=lambda: now[0])
    watch.review_if_due()
    watch.review_if_due()
    assert len(looks) == 1, "nothing new"
    team.send(team.sessions(1, 0), days_ago=0)
    watch.review_if_due()
    assert len(looks) == 1, "too soon"
    now[0] += 40.0
    watch.review_if_due()
    assert len(looks) == 2


def test_clearing_what_is_unknown(store: Store, make: Any) -> None:
    assert not clear_drift(store, make.fingerprint, "code", "cli")


def test_measured_rates_are_published_with_the_profile(team: Team) -> None:
    plain = team.profile()
    manifest = team.pull()
    team.ran(manifest, team.sessions(5, 3), days_ago=1, rate=0.1)
    team.send([team.make.live(team.shape, one, 0.2) for one in team.sessions(5, 3)], days_ago=1)
    found = team.profile()
    assert [(point.policy, point.n_sessions) for point in found.live] == [("live_profile", 3), ("live_unprofiled", 3)]
    assert [point.cold_hit_rate for point in found.live] == pytest.approx([0.1, 0.2], abs=1e-3)
    [compared] = found.live_comparisons
    assert compared.high < 0
    assert found.revision != plain.revision
    # The same sessions, not measured, are the same profile but for that.
    with team.store.writing() as cursor:
        cursor.execute("DELETE FROM live")
    bare = team.profile()
    assert (bare.live, bare.live_comparisons) == ((), ())
    assert bare.curves == found.curves
    assert bare.revision not in (found.revision, plain.revision)
