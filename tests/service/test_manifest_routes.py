"""Manifests over HTTP: signed, remembered, rolled back, compared, and the workload that is nearest."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from starlette.testclient import TestClient

from spark_runtime.placement import cold_hit_rates, greedy_slots, hot_set, layer_sizes, residency_budget
from spark_schemas.api import PROBLEM_MEDIA_TYPE, Problem
from spark_schemas.manifest import PlacementManifest
from spark_schemas.manifest_api import NearestWorkloads, Pin, ServedHistory
from spark_schemas.manifest_diff import ManifestDiff, diff_manifests
from spark_schemas.profile import Profile
from spark_schemas.signature import PinSignature, Signature, SigningKeyInfo, pin_message
from spark_service.app import create_app
from spark_service.db.history import ManifestHistory
from spark_service.db.store import Store
from spark_service.errors import StorageError
from spark_service.signing import KEY_NAME, Signer

Post = Callable[..., httpx2.Response]
BUDGET = {"vram_bytes": 3500, "n_ctx": 100}
NEAREST = "/api/v1/workloads/nearest"
JSON = {"Content-Type": "application/json"}


def problem(response: httpx2.Response, status: int, code: str) -> Problem:
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE, response.text
    found = Problem.model_validate_json(response.content)
    assert (response.status_code, found.status, found.code) == (status, status, code), response.text
    return found


@pytest.fixture
def path(make: Any) -> str:
    return f"/api/v1/manifests/{make.fingerprint}/code"


@pytest.fixture
def pin_path(make: Any) -> str:
    return f"/api/v1/admin/manifests/{make.fingerprint}/code/pin"


@pytest.fixture
def filled(client: TestClient, post: Post, make: Any) -> TestClient:
    shape = make.shape()
    assert post(make.body(shape, make.sessions(shape))).status_code == 202
    return client


@pytest.fixture
def add(post: Post, make: Any) -> Callable[..., None]:
    """Upload one more session, so that the profile has another revision."""
    shape = make.shape()
    numbers = iter(range(1000))

    def more(taste: int = 5, workload: str = "code") -> None:
        number = next(numbers)
        session = make.session(shape, make.hash(50 + number), seed=900 + number, taste=taste, workload=workload)
        assert post(make.body(shape, [session]), f"more-{workload}-{number}").json()["accepted"] == 1

    return more


def verified(client: TestClient, answer: httpx2.Response) -> PlacementManifest:
    """The manifest of an answer whose signature is over exactly its bytes."""
    info = SigningKeyInfo.model_validate_json(client.get("/api/v1/signing-key").content)
    signature = Signature.parse(answer.headers["spark-signature"])
    assert signature.key_id == info.key_id
    Ed25519PublicKey.from_public_bytes(base64.b64decode(info.key)).verify(signature.value, answer.content)
    return PlacementManifest.model_validate_json(answer.content)


def revision_of(client: TestClient, path: str) -> str:
    return str(client.get(path, params=BUDGET).json()["profile_revision"])


def test_every_manifest_is_signed(filled: TestClient, path: str, tmp_path: Path) -> None:
    first = filled.get(path, params=BUDGET)
    verified(filled, first)
    ready = filled.get(path, params=BUDGET)
    assert (ready.content, dict(ready.headers)) == (first.content, dict(first.headers))
    unchanged = filled.get(path, params=BUDGET, headers={"If-None-Match": first.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert unchanged.headers["spark-signature"] == first.headers["spark-signature"]
    old = verified(filled, filled.get(path, params={**BUDGET, "revision": first.json()["profile_revision"]}))
    assert old == PlacementManifest.model_validate_json(first.content)
    # A key rotated by another process signs the next answer, though no byte of the body changes.
    Signer(tmp_path).rotate()
    rotated = filled.get(path, params=BUDGET)
    verified(filled, rotated)
    assert rotated.headers["etag"] == first.headers["etag"]
    assert rotated.headers["spark-signature"] != first.headers["spark-signature"]


def test_nothing_is_sent_unsigned(filled: TestClient, path: str, tmp_path: Path) -> None:
    filled.get(path, params=BUDGET)
    (tmp_path / KEY_NAME).chmod(0o644)
    (tmp_path / KEY_NAME).write_bytes(b"damaged")
    answer = filled.get(path, params=BUDGET)
    problem(answer, 503, "signing_key_unavailable")
    assert str(tmp_path) not in answer.text
    assert filled.get("/api/v1/profiles").status_code == 200


def test_a_read_is_never_older_than_the_last_write(filled: TestClient, path: str, add: Any, make: Any) -> None:
    profile = f"/api/v1/profiles/{make.fingerprint}/code"

    def seen() -> tuple[int, int, int]:
        listed = filled.get("/api/v1/profiles").json()["profiles"][0]
        return tuple(
            found["n_calibration"]
            for found in (filled.get(path, params=BUDGET).json(), filled.get(profile).json(), listed)
        )

    assert seen() == seen() == (4, 4, 4)
    for number in (5, 6):
        add()
        assert seen() == seen() == (number,) * 3
    filled.delete(f"/api/v1/sessions/{make.hash(0)}")
    assert seen() == (5,) * 3


def test_ready_answers_read_no_database(
    filled: TestClient, path: str, store: Store, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [f"{path}?vram_bytes=3500&n_ctx=100", f"/api/v1/profiles/{make.fingerprint}/code", "/api/v1/profiles"]
    before = [filled.get(one).content for one in paths]

    def refuse(*_: object) -> None:
        raise AssertionError("a query")

    with monkeypatch.context() as patched:
        patched.setattr(store._database, "_new_cursor", refuse)
        assert [filled.get(one).content for one in paths] == before


def test_a_write_elsewhere_costs_no_placement(
    filled: TestClient, path: str, make: Any, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = filled.get(path, params=BUDGET).content
    held_out = make.session(make.shape(), make.hash(70, "held_out"), workload="chat", seed=5)
    body = make.body(make.shape(), [held_out])
    filled.post("/api/v1/histograms", content=body, headers={**JSON, "Idempotency-Key": "elsewhere"})

    def refuse(*_: object) -> None:
        raise AssertionError("a placement")

    monkeypatch.setattr("spark_service.catalog.build_manifest", refuse)
    assert filled.get(path, params=BUDGET).content == before


def test_history(filled: TestClient, path: str, add: Any) -> None:
    problem(filled.get(f"{path}/history", params=BUDGET), 404, "no_history")
    bodies = []
    for _ in range(3):
        bodies.append(filled.get(path, params=BUDGET).content)
        filled.get(path, params=BUDGET)
        add()
    listed = ServedHistory.model_validate_json(filled.get(f"{path}/history", params=BUDGET).content)
    revisions = [PlacementManifest.model_validate_json(body).profile_revision for body in reversed(bodies)]
    assert [one.revision for one in listed.manifests] == revisions
    assert [one.body_bytes for one in listed.manifests] == [len(body) for body in reversed(bodies)]
    for revision, body in zip(reversed(revisions), bodies, strict=True):
        assert filled.get(path, params={**BUDGET, "revision": revision}).content == body
    found = problem(filled.get(path, params={**BUDGET, "revision": "0" * 64}), 404, "unknown_revision")
    assert found.field == "query.revision"
    assert revisions[0] in str(found.expected)
    other = {**BUDGET, "vram_bytes": 3600}
    problem(filled.get(path, params={**other, "revision": revisions[0]}), 404, "unknown_revision")
    problem(filled.get(path, params={**BUDGET, "revision": "x"}), 422, "invalid_parameter")


def test_rollback(filled: TestClient, path: str, pin_path: str, add: Any) -> None:
    first = filled.get(path, params=BUDGET)
    add()
    second = filled.get(path, params=BUDGET)
    assert second.content != first.content
    revision = first.json()["profile_revision"]
    found = problem(filled.post(pin_path, json={"revision": "0" * 64}), 404, "unknown_revision")
    assert revision in str(found.expected)
    assert "spark-pinned" not in filled.get(path, params=BUDGET).headers

    pinned = Pin.model_validate_json(filled.post(pin_path, json={"revision": revision}).content)
    assert pinned.revision == revision
    for _ in range(2):
        back = filled.get(path, params=BUDGET)
        assert (back.content, back.headers["spark-pinned"]) == (first.content, revision)
        verified(filled, back)
        said = PinSignature.parse(back.headers["spark-pinned-signature"])
        manifest = PlacementManifest.model_validate_json(back.content)
        message = pin_message(manifest.fingerprint, manifest.workload, "decode", revision, said.day)
        key = SigningKeyInfo.model_validate_json(filled.get("/api/v1/signing-key").content)
        assert (said.key_id, abs((said.day - dt.datetime.now(dt.UTC).date()).days) <= 1) == (key.key_id, True)
        Ed25519PublicKey.from_public_bytes(base64.b64decode(key.key)).verify(said.value, message)
    add()
    assert filled.get(path, params=BUDGET).content == first.content, "whatever is newer"
    unchanged = filled.get(path, params=BUDGET, headers={"If-None-Match": first.headers["etag"]})
    assert (unchanged.status_code, unchanged.headers["spark-pinned"]) == (304, revision)
    assert PinSignature.parse(unchanged.headers["spark-pinned-signature"]).key_id == said.key_id
    assert filled.get(f"{path}/history", params=BUDGET).json()["pinned"] == revision
    # The profile itself stays the newest.
    profile = filled.get(path.replace("manifests", "profiles"))
    assert Profile.model_validate_json(profile.content).revision != revision

    assert filled.delete(pin_path).json()["revision"] is None
    assert filled.delete(pin_path).status_code == 200
    newest = filled.get(path, params=BUDGET)
    assert newest.json()["n_calibration"] == 6
    assert "spark-pinned" not in newest.headers


def test_a_pinned_revision_is_placed_for_budgets_it_was_never_asked_for(
    filled: TestClient, path: str, pin_path: str, add: Any
) -> None:
    wider = {**BUDGET, "vram_bytes": 3900}
    first, meant = filled.get(path, params=BUDGET), None
    revision = first.json()["profile_revision"]
    add()
    add()
    filled.post(pin_path, json={"revision": revision})
    meant = PlacementManifest.model_validate_json(first.content)
    answer = filled.get(path, params=wider)
    found = verified(filled, answer)
    assert answer.headers["spark-pinned"] == found.profile_revision == revision
    assert [layer.prior for layer in found.layers] == [layer.prior for layer in meant.layers]
    assert sum(layer.slots for layer in found.layers) > sum(layer.slots for layer in meant.layers)
    assert found.expected is None, "today's held-out sessions did not judge it"
    assert filled.get(path, params={**wider, "revision": revision}).content == answer.content
    problem(filled.get(path, params={**BUDGET, "vram_bytes": 100}), 422, "budget_too_small")


def test_a_deletion_ends_a_pin(filled: TestClient, path: str, pin_path: str, make: Any) -> None:
    revision = revision_of(filled, path)
    filled.post(pin_path, json={"revision": revision})
    filled.delete(f"/api/v1/sessions/{make.hash(0)}")
    answer = filled.get(path, params=BUDGET)
    assert (answer.json()["n_calibration"], "spark-pinned" in answer.headers) == (3, False)
    problem(filled.get(path, params={**BUDGET, "revision": revision}), 404, "unknown_revision")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"[" * 4000, "body"),
        (b"\xff", "body"),
        (b"{}", "body.revision"),
        (b'{"revision": "x"}', "body.revision"),
        (b'{"revision": NaN}', "body.revision"),
        (b'{"revision": null}', "body.revision"),
        (f'{{"revision": "{"0" * 64}", "x": 1}}'.encode(), "body.x"),
    ],
)
def test_bad_pins(filled: TestClient, pin_path: str, body: bytes, field: str) -> None:
    found = problem(filled.post(pin_path, content=body, headers=JSON), 422, "invalid_pin")
    assert found.field == field
    assert found.hint


def test_a_pin_is_small_and_json(filled: TestClient, pin_path: str) -> None:
    problem(filled.post(pin_path, content=b" " * 4097, headers=JSON), 413, "body_too_large")
    problem(filled.post(pin_path, content=iter([b" "] * 4097), headers=JSON), 413, "body_too_large")
    problem(filled.post(pin_path, content=b"{}"), 415, "unsupported_media_type")
    problem(filled.post(f"{pin_path}?x=1", content=b"{}", headers=JSON), 422, "invalid_parameter")


def test_diff(filled: TestClient, path: str, add: Any) -> None:
    first = filled.get(path, params=BUDGET)
    add(taste=9)
    second = filled.get(path, params=BUDGET)
    sides = {"from": first.json()["profile_revision"], "to": second.json()["profile_revision"]}
    answer = filled.get(f"{path}/diff", params={**BUDGET, **sides})
    meant = diff_manifests(*(PlacementManifest.model_validate_json(one.content) for one in (first, second)))
    assert ManifestDiff.model_validate_json(answer.content) == meant
    found = problem(filled.get(f"{path}/diff", params={**BUDGET, **sides, "to": "0" * 64}), 404, "unknown_revision")
    assert found.field == "query.to"
    found = problem(filled.get(f"{path}/diff", params={**BUDGET, "to": "0" * 64}), 422, "invalid_parameter")
    assert found.field == "query.from"


def test_the_history_is_bounded(store: Store, make: Any, path: str) -> None:
    shape = make.shape()
    with TestClient(create_app(store, open_access=True, history_per_key=2)) as client:
        for number in range(4):
            session = make.session(shape, make.hash(number), seed=number)
            store.add_upload(make.upload(shape, [session]), str(number), str(number))
            assert client.get(path, params=BUDGET).status_code == 200
        assert len(client.get(f"{path}/history", params=BUDGET).json()["manifests"]) == 2


def test_a_full_disk_stops_no_reader(
    filled: TestClient, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, add: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("no room left")

    with monkeypatch.context() as patched:
        patched.setattr(ManifestHistory, "record", fail)
        answer = filled.get(path, params=BUDGET)
    verified(filled, answer)
    assert "not recorded for rollback: no room left" in caplog.text
    # Made up for by the next one that is not ready.
    add(workload="chat")
    assert filled.get(path, params=BUDGET).status_code == 200
    assert filled.get(f"{path}/history", params=BUDGET).status_code == 200


def test_the_guard_stands_before_ready_answers(store: Store, make: Any, path: str) -> None:
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape)), "a", "a")
    with TestClient(create_app(store, token="s3cret-token")) as client:
        allowed = {"Authorization": "Bearer s3cret-token"}
        assert client.get(path, params=BUDGET, headers=allowed).status_code == 200
        problem(client.get(path, params=BUDGET), 401, "unauthorized")
        assert client.get(path, params=BUDGET, headers=allowed).status_code == 200


@pytest.fixture
def tastes(client: TestClient, post: Post, make: Any) -> TestClient:
    """Workloads of three tastes, one of them close to another."""
    shape = make.shape()
    for workload, taste in (("code", 1), ("chat", 2), ("docs", 3)):
        sessions = make.sessions(shape, 4, 2, workload=workload, taste=taste)
        assert post(make.body(shape, sessions), workload).status_code == 202
    return client


def ask(client: TestClient, body: bytes, **params: str) -> httpx2.Response:
    return client.post(NEAREST, content=body, headers=JSON, params=params)


@pytest.mark.parametrize(("taste", "nearest"), [(1, "code"), (2, "chat"), (3, "docs")])
def test_the_nearest_workload_is_the_one_of_the_same_taste(
    tastes: TestClient, make: Any, taste: int, nearest: str
) -> None:
    shape = make.shape()
    session = make.session(shape, make.hash(80), workload="mine", taste=taste, seed=77)
    found = NearestWorkloads.model_validate_json(ask(tastes, make.body(shape, [session])).content)
    assert found.workloads[0].workload == nearest
    assert {one.workload for one in found.workloads} == {"code", "chat", "docs"}
    rates = [one.cold_hit_rate for one in found.workloads]
    assert rates == sorted(rates)
    assert found.workloads[0].mismatch == 0.0
    assert found.oracle_cold_hit_rate <= rates[0]
    # The same numbers from the profiles alone.
    sizes = layer_sizes(shape)
    counts = [np.array([layer.counts]) for layer in session.decode.layers]
    for one in found.workloads:
        profile = tastes.get(f"/api/v1/profiles/{shape.fingerprint}/{one.workload}").json()
        shares = [np.array(layer["shares"]) for layer in profile["layers"]]
        slots = greedy_slots(shares, sizes, residency_budget(sizes, found.residency))
        assert one.cold_hit_rate == cold_hit_rates(counts, hot_set(shares, slots))[0]
        assert one.mismatch == pytest.approx(one.cold_hit_rate - rates[0])


def test_what_was_asked_about_is_not_kept(tastes: TestClient, make: Any, store: Store) -> None:
    shape = make.shape()
    before = (store.generation, store.workloads(shape.fingerprint), tastes.get("/api/v1/profiles").content)
    body = make.body(shape, [make.session(shape, make.hash(80), workload="mine")])
    assert ask(tastes, body).status_code == 200
    assert (store.generation, store.workloads(shape.fingerprint), tastes.get("/api/v1/profiles").content) == before


def test_bad_questions_for_the_nearest(tastes: TestClient, make: Any) -> None:
    shape = make.shape()
    one = make.session(shape, make.hash(80), workload="mine")
    two = make.session(shape, make.hash(81), workload="mine")
    problem(ask(tastes, make.body(shape, [one, two])), 422, "one_session_expected")
    problem(ask(tastes, make.body(shape, [one]), phase="prefill"), 422, "counts_unusable")
    problem(ask(tastes, make.body(shape, [one]), phase="x"), 422, "invalid_parameter")
    problem(ask(tastes, b"{"), 400, "invalid_json")
    problem(tastes.post(NEAREST, content=b"{}"), 415, "unsupported_media_type")
    stranger = make.shape(fingerprint="mf1-" + "f" * 32)
    problem(ask(tastes, make.body(stranger, [one])), 404, "unknown_model")
    narrow = make.shape(((8, 2, 100), (16, 2, 100), (8, 1, 50)))
    body = make.body(narrow, [make.session(narrow, make.hash(80), workload="mine")])
    assert problem(ask(tastes, body), 422, "counts_unusable").expected == f"the 3 layers of {shape.fingerprint}"


def test_an_unknown_workloads_answer_names_the_most_general_one(tastes: TestClient, make: Any) -> None:
    answer = tastes.get(f"/api/v1/manifests/{make.fingerprint}/mine", params=BUDGET)
    hint = str(problem(answer, 404, "unknown_workload").hint)
    assert "record sessions of it and upload them" in hint
    assert "on 4 held-out sessions of 2 other workloads" in hint
    assert f"POST {NEAREST}" in hint
    assert len(hint) < 500, "clients show no more"


def test_a_lone_workload_is_offered_as_unmeasured(filled: TestClient, make: Any) -> None:
    answer = filled.get(f"/api/v1/profiles/{make.fingerprint}/mine")
    assert "until then one of code may do, though nothing measures which" in str(
        problem(answer, 404, "unknown_workload").hint
    )
