"""Mixes and chosen windows over HTTP: every spelling, the past, rollback, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from spark_schemas.api import PROBLEM_MEDIA_TYPE, Problem
from spark_schemas.manifest import PlacementManifest
from spark_schemas.manifest_api import Pin, ServedHistory
from spark_schemas.manifest_diff import ManifestDiff
from spark_schemas.profile import Profile
from spark_service.app import create_app
from spark_service.build_budget import BURST_SECONDS, BuildBudget
from spark_service.db.store import Store
from spark_service.windows import Windows

Post = Callable[..., httpx2.Response]
BUDGET = {"vram_bytes": 3500, "n_ctx": 100}
MIX = "chat:3+code-heavy:7"
SPELLINGS = [
    MIX,
    "code-heavy:7+chat:3",
    "code-heavy:70+chat:30",
    "code-heavy%3A7%2Bchat%3A3",
    "code-heavy%3a7+chat%3a3",
    "code-heavy:7%2bchat:3",
]


def problem(response: httpx2.Response, status: int, code: str) -> Problem:
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE, response.text
    found = Problem.model_validate_json(response.content)
    assert (response.status_code, found.status, found.code) == (status, status, code), response.text
    return found


@pytest.fixture
def at(make: Any) -> Callable[..., str]:
    def path(workload: str, of: str = "manifests", end: str = "") -> str:
        return f"/api/v1/{of}/{make.fingerprint}/{workload}{end}"

    return path


@pytest.fixture
def filled(client: TestClient, post: Post, make: Any) -> TestClient:
    shape = make.shape()
    for workload, taste in (("code-heavy", 1), ("chat", 2), ("docs", 3)):
        sessions = make.sessions(shape, 4, 3, workload=workload, taste=taste)
        assert post(make.body(shape, sessions), workload).status_code == 202
    return client


@pytest.fixture
def add(post: Post, make: Any) -> Callable[..., None]:
    """Upload one more calibration session, so that the profile has another revision."""
    shape, numbers = make.shape(), iter(range(1000))

    def more(workload: str = "chat") -> None:
        number = next(numbers)
        session = make.session(shape, make.hash(50 + number), seed=900 + number, taste=5, workload=workload)
        assert post(make.body(shape, [session]), f"more-{number}").json()["accepted"] == 1

    return more


@pytest.mark.parametrize("spelt", SPELLINGS)
def test_every_spelling_gets_the_same_bytes(filled: TestClient, at: Any, spelt: str) -> None:
    for of, query in (("profiles", {}), ("manifests", BUDGET)):
        first, again = (filled.get(at(name, of), params=query) for name in (MIX, spelt))
        assert again.status_code == 200, again.text
        assert (again.content, again.headers["etag"]) == (first.content, first.headers["etag"])
        unchanged = filled.get(at(spelt, of), params=query, headers={"If-None-Match": first.headers["etag"]})
        assert unchanged.status_code == 304
    assert PlacementManifest.model_validate_json(again.content).workload == MIX


def test_a_mix_of_one_is_that_workload(filled: TestClient, at: Any) -> None:
    for of, query in (("profiles", {}), ("manifests", BUDGET)):
        plain, mix = (filled.get(at(name, of), params=query) for name in ("chat", "chat:5"))
        assert mix.content == plain.content


def test_a_mixs_profile_says_what_mixing_gains(filled: TestClient, at: Any) -> None:
    profile = Profile.model_validate_json(filled.get(at(MIX, "profiles")).content)
    assert (profile.workload, profile.n_calibration, profile.n_held_out) == (MIX, 8, 6)
    rows = {row.workload: row.cold_hit_rate for row in profile.mismatch if row.residency == 0.6}
    own = next(point for point in profile.curves if (point.policy, point.residency) == ("own", 0.6))
    assert set(rows) == {"chat", "code-heavy", "docs"}
    assert own.cold_hit_rate < min(rows.values())
    assert MIX not in filled.get("/api/v1/profiles").text


def test_a_mix_has_a_history_under_every_spelling(filled: TestClient, at: Any, add: Any) -> None:
    first = filled.get(at("code-heavy:7+chat:3"), params=BUDGET)
    add()
    second = filled.get(at(MIX), params=BUDGET)
    revisions = [one.json()["profile_revision"] for one in (second, first)]
    for spelt in SPELLINGS:
        found = ServedHistory.model_validate_json(filled.get(at(spelt, end="/history"), params=BUDGET).content)
        assert [one.revision for one in found.manifests] == revisions
        sides = {"from": revisions[1], "to": revisions[0]}
        diff = ManifestDiff.model_validate_json(filled.get(at(spelt, end="/diff"), params={**BUDGET, **sides}).content)
        assert (diff.before.workload, diff.after.workload) == (MIX, MIX)
        assert filled.get(at(spelt), params={**BUDGET, "revision": revisions[1]}).content == first.content
    problem(filled.get(at("code-heavy:7+chat:4", end="/history"), params=BUDGET), 404, "no_history")


def test_a_mix_is_rolled_back_by_itself(filled: TestClient, at: Any, add: Any) -> None:
    first = filled.get(at(MIX), params=BUDGET)
    revision = first.json()["profile_revision"]
    add()
    pin = at("code-heavy:70+chat:30", "admin/manifests", "/pin")
    pinned = Pin.model_validate_json(filled.post(pin, json={"revision": revision}).content)
    assert (pinned.workload, pinned.revision) == (MIX, revision)
    for spelt in SPELLINGS:
        back = filled.get(at(spelt), params=BUDGET)
        assert (back.content, back.headers["spark-pinned"]) == (first.content, revision)
    for other in ("chat", "code-heavy:7+chat:4"):
        assert "spark-pinned" not in filled.get(at(other), params=BUDGET).headers
    unpinned = Pin.model_validate_json(filled.delete(at(MIX, "admin/manifests", "/pin")).content)
    assert (unpinned.workload, unpinned.revision) == (MIX, None)
    assert filled.get(at(MIX), params=BUDGET).json()["n_calibration"] == 9


def test_a_deletion_ends_the_history_of_mixes_with_its_workload(filled: TestClient, at: Any, make: Any) -> None:
    shape = make.shape()
    own = make.session(shape, make.hash(60), workload="docs", seed=5)
    body = make.body(shape, [own])
    filled.post(
        "/api/v1/histograms", content=body, headers={"Content-Type": "application/json", "Idempotency-Key": "x"}
    )
    for name in (MIX, "chat+docs"):
        revision = filled.get(at(name), params=BUDGET).json()["profile_revision"]
        assert filled.post(at(name, "admin/manifests", "/pin"), json={"revision": revision}).status_code == 200
    filled.delete(f"/api/v1/sessions/{make.hash(60)}")
    problem(filled.get(at("chat+docs", end="/history"), params=BUDGET), 404, "no_history")
    assert "spark-pinned" not in filled.get(at("chat+docs"), params=BUDGET).headers
    assert "spark-pinned" in filled.get(at(MIX), params=BUDGET).headers


@pytest.mark.parametrize(
    ("workload", "found"),
    [
        ("Code", "'Code'"),
        ("code:0+chat", "'code:0'"),
        ("code+chat:1001", "'chat:1001'"),
        ("code+code:2", "code twice"),
        ("+".join("abcdefghi"), "9 workloads"),
        ("code%20chat", "'code chat'"),
        ("code:7%20chat:3", "'code:7 chat:3'"),
        ("a" * 64, repr("a" * 64)),
        ("%00", r"'\x00'"),
    ],
)
def test_what_is_no_mix_is_said(filled: TestClient, at: Any, workload: str, found: str) -> None:
    requests = [
        filled.get(at(workload, "profiles")),
        filled.get(at(workload), params=BUDGET),
        filled.get(at(workload, end="/history"), params=BUDGET),
        filled.post(at(workload, "admin/manifests", "/pin"), json={"revision": "0" * 64}),
    ]
    for answer in requests:
        said = problem(answer, 422, "invalid_parameter")
        assert (said.field, said.found) == ("path.workload", found)
        assert said.expected
        assert "code-heavy:7+chat:3" in str(said.hint)


def test_an_unknown_workload_of_a_mix_is_named_with_the_nearest(filled: TestClient, at: Any) -> None:
    found = problem(filled.get(at("chat:3+mine:7"), params=BUDGET), 404, "unknown_workload")
    assert (found.found, found.expected) == ("mine", "chat, code-heavy, docs")
    assert "until then use" in str(found.hint)
    assert "/workloads/nearest" in str(found.hint)


def test_uploads_name_one_workload(client: TestClient, post: Post, make: Any) -> None:
    upload = json.loads(make.body(make.shape(), make.sessions(make.shape(), 1, 0)))
    upload["sessions"][0]["workload"] = MIX
    found = problem(post(json.dumps(upload).encode()), 422, "invalid_histogram")
    assert found.field == "sessions[0].workload"


@pytest.fixture
def aged(filled: TestClient, store: Store, make: Any) -> TestClient:
    """Half of all sessions came forty days ago."""
    old = [make.hash(n, side) for n in range(2) for side in ("calibration", "held_out")]
    with store.writing() as cursor:
        cursor.execute(
            "UPDATE parts SET received_day = ? WHERE session_hash IN ?",
            [datetime.now(UTC).date() - timedelta(days=40), old],
        )
    return filled


def test_a_window_is_chosen_by_whoever_asks(aged: TestClient, at: Any) -> None:
    def counted(name: str, **params: object) -> tuple[int, int]:
        profile = aged.get(at(name, "profiles"), params=params).json()
        manifest = aged.get(at(name), params={**BUDGET, **params}).json()
        assert profile["revision"] == manifest["profile_revision"]
        assert (profile["n_calibration"], profile["n_held_out"]) == (manifest["n_calibration"], manifest["n_held_out"])
        return manifest["n_calibration"], manifest["n_held_out"]

    assert counted("chat") == (4, 3)
    assert counted("chat", window_days=30) == (2, 1)
    assert counted("chat", window_days=60) == (4, 3)
    assert counted(MIX, window_days=30) == (4, 2)
    revisions = {
        tuple(params.items()): aged.get(at("chat", "profiles"), params=params).json()["revision"]
        for params in (
            {},
            {"window_days": 0},
            {"half_life_days": 0},
            {"window_days": 60},
            {"half_life_days": 30},
            {"half_life_days": "30.0"},
            {"window_days": 60, "half_life_days": 30},
        )
    }
    same = [revisions[()], revisions[("window_days", 0),], revisions[("half_life_days", 0),]]
    assert len(set(same)) == 1
    assert revisions[("half_life_days", 30),] == revisions[("half_life_days", "30.0"),]
    assert len(set(revisions.values())) == 4


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("window_days", "-1"),
        ("window_days", "1"),
        ("window_days", "31"),
        ("window_days", "1e3"),
        ("window_days", "9" * 400),
        ("window_days", ""),
        ("half_life_days", "-7"),
        ("half_life_days", "7.5"),
        ("half_life_days", "inf"),
        ("half_life_days", "nan"),
        ("half_life_days", "1e400"),
        ("half_life_days", "soon"),
    ],
)
def test_windows_that_nobody_can_choose(filled: TestClient, at: Any, parameter: str, value: str) -> None:
    for answer in (
        filled.get(at("chat", "profiles"), params={parameter: value}),
        filled.get(at(MIX), params={**BUDGET, parameter: value}),
    ):
        found = problem(answer, 422, "invalid_parameter")
        assert found.field == f"query.{parameter}"
        assert found.found
        assert found.expected
        assert found.hint


def test_the_past_is_of_the_services_own_window(aged: TestClient, at: Any, add: Any) -> None:
    usual = aged.get(at("chat"), params=BUDGET)
    revision = usual.json()["profile_revision"]
    chosen = aged.get(at("chat"), params={**BUDGET, "window_days": 30})
    assert chosen.json()["profile_revision"] != revision
    listed = aged.get(at("chat", end="/history"), params=BUDGET).json()
    assert [one["revision"] for one in listed["manifests"]] == [revision]
    pin = at("chat", "admin/manifests", "/pin")
    problem(aged.post(pin, json={"revision": chosen.json()["profile_revision"]}), 404, "unknown_revision")

    assert aged.post(pin, json={"revision": revision}).status_code == 200
    add()
    pinned = aged.get(at("chat"), params=BUDGET)
    assert (pinned.content, pinned.headers["spark-pinned"]) == (usual.content, revision)
    named = aged.get(at("chat"), params={**BUDGET, "window_days": 0, "half_life_days": 0})
    assert (named.content, named.headers["spark-pinned"]) == (usual.content, revision), "the same question"
    other = aged.get(at("chat"), params={**BUDGET, "window_days": 30})
    assert "spark-pinned" not in other.headers
    assert other.json()["n_calibration"] == chosen.json()["n_calibration"] + 1

    both = {**BUDGET, "window_days": 30, "revision": revision}
    assert problem(aged.get(at("chat"), params=both), 422, "invalid_parameter").field == "query.revision"
    for end in ("/history", "/diff"):
        found = problem(aged.get(at("chat", end=end), params={**BUDGET, "window_days": 30}), 422, "invalid_parameter")
        assert found.field in ("query.window_days", "query.from")
    assert problem(aged.delete(f"{pin}?window_days=30"), 422, "invalid_parameter").field == "query.window_days"


def test_chosen_windows_are_signed_and_ready_too(aged: TestClient, at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    query = {**BUDGET, "window_days": 30}
    first = aged.get(at("chat"), params=query)
    assert first.headers["spark-signature"].startswith("ed25519;")

    def refuse(*_: object) -> None:
        raise AssertionError("a placement")

    monkeypatch.setattr("spark_service.catalog.build_manifest", refuse)
    assert aged.get(at("chat"), params=query).content == first.content
    # Asked for anew after a write elsewhere, too.
    session = {"Content-Type": "application/json", "Idempotency-Key": "elsewhere"}
    assert aged.post("/api/v1/histograms", content=b"{}", headers=session).status_code == 422
    assert aged.get(at("chat:2"), params=query).content == first.content


def test_an_answer_of_a_chosen_window_is_good_for_a_day(store: Store, make: Any, at: Any) -> None:
    shape, today = make.shape(), [Windows().today()]
    store.add_upload(make.upload(shape, make.sessions(shape, 4, 1)), "key", "sha")
    app = create_app(store, open_access=True, windows=Windows(today=lambda: today[0]))
    with TestClient(app) as client:
        query = {"window_days": 7}
        assert client.get(at("code", "profiles"), params=query).json()["n_calibration"] == 4
        today[0] += 7
        problem(client.get(at("code", "profiles"), params=query), 404, "no_calibration_sessions")
        assert client.get(at("code", "profiles")).json()["n_calibration"] == 4


def test_too_many_new_mixes_are_put_off(filled: TestClient, at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert filled.get(at(MIX), params=BUDGET).status_code == 200
    spend = BuildBudget.spend
    monkeypatch.setattr(BuildBudget, "spend", lambda self, seconds: spend(self, seconds + 2 * BURST_SECONDS))
    assert filled.get(at("chat+docs"), params=BUDGET).status_code == 200
    answer = filled.get(at("chat+docs:2"), params=BUDGET)
    problem(answer, 429, "too_many_builds")
    assert int(answer.headers["retry-after"]) > 0
    problem(filled.get(at("chat", "profiles"), params={"window_days": 7}), 429, "too_many_builds")
    for known in (MIX, "chat+docs", "chat", "docs"):
        assert filled.get(at(known), params=BUDGET).status_code == 200
