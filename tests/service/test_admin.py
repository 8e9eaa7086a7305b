from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient

from spark_schemas.api import PROBLEM_MEDIA_TYPE, Problem
from spark_service.app import create_app
from spark_service.db.audit import AuditPage
from spark_service.db.store import Store
from spark_service.tokens import NewToken, TokenInfo, TokenList

TOKENS = "/api/v1/admin/tokens"
AUDIT = "/api/v1/admin/audit"
RETENTION = "/api/v1/admin/retention"


def problem(response: Any, status: int, code: str) -> Problem:
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE, response.text
    found = Problem.model_validate_json(response.content)
    assert (response.status_code, found.code) == (status, code), response.text
    return found


@pytest.fixture
def admin(store: Store) -> Iterator[TestClient]:
    app = create_app(store, token="shared")
    headers = {"Authorization": "Bearer shared"}
    with TestClient(app, headers=headers, raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture
def aged(store: Store, make: Any) -> date:
    """Three sessions, one of them received 40 days ago."""
    store.add_upload(make.upload(make.shape(), make.sessions(make.shape(), 3, 0)), "a", "a")
    old = datetime.now(UTC).date() - timedelta(days=40)
    with store.writing() as cursor:
        cursor.execute("UPDATE parts SET received_day = ? WHERE session_hash = ?", [old, make.hash(0)])
    return old


def make(admin: TestClient, **body: object) -> NewToken:
    answer = admin.post(TOKENS, json={"scope": "read", **body})
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return NewToken.model_validate_json(answer.content)


def entries(admin: TestClient) -> list[tuple[str, str, str]]:
    page = AuditPage.model_validate_json(admin.get(AUDIT).content)
    return [(entry.actor, entry.action, entry.object) for entry in page.entries]


def test_a_tokens_life(admin: TestClient) -> None:
    made = make(admin, scope="upload read", name="laptop", expires_days=7)
    used = {"Authorization": f"Bearer {made.token}"}
    assert admin.get("/api/v1/profiles", headers=used).status_code == 200
    [listed] = TokenList.model_validate_json(admin.get(TOKENS).content).tokens
    assert listed == TokenInfo.model_validate(made.model_dump(exclude={"token"}))
    assert made.token[-43:] not in admin.get(TOKENS).text
    answer = admin.post(f"{TOKENS}/{made.id}/rotate", json={})
    rotated = NewToken.model_validate_json(answer.content)
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    assert rotated.id == made.id
    assert rotated.token != made.token
    problem(admin.get("/api/v1/profiles", headers=used), 401, "unauthorized")
    used = {"Authorization": f"Bearer {rotated.token}"}
    assert admin.get("/api/v1/profiles", headers=used).status_code == 200
    answer = admin.delete(f"{TOKENS}/{made.id}")
    assert TokenInfo.model_validate_json(answer.content).revoked_at is not None
    problem(admin.get("/api/v1/profiles", headers=used), 401, "unauthorized")
    problem(admin.post(f"{TOKENS}/{made.id}/rotate", json={}), 409, "token_ended")
    assert entries(admin) == [("environment", f"token.{action}", made.id) for action in ("create", "rotate", "revoke")]
    assert made.token[-43:] not in admin.get(AUDIT).text


def test_a_token_may_make_tokens_and_is_named_for_it(admin: TestClient) -> None:
    first = make(admin, scope="admin", expires_days=None)
    assert first.expires_at is None
    answer = admin.post(TOKENS, json={"scope": "read"}, headers={"Authorization": f"Bearer {first.token}"})
    second = NewToken.model_validate_json(answer.content)
    assert entries(admin) == [("environment", "token.create", first.id), (first.id, "token.create", second.id)]


@pytest.mark.parametrize(
    ("body", "status", "code", "field"),
    [
        (b"", 400, "invalid_json", None),
        (b"{", 400, "invalid_json", None),
        (b"\xff", 400, "invalid_json", None),
        (b'{"scope": "\\ud800"}', 400, "invalid_json", None),
        (b"[]", 422, "invalid_parameter", "body"),
        (b"{}", 422, "invalid_parameter", "body.scope"),
        (b'{"scope": "root"}', 422, "invalid_parameter", "body.scope"),
        (b'{"scope": "read", "expires_days": NaN}', 422, "invalid_parameter", "body.expires_days"),
        (b'{"scope": "read", "expires_days": 1e99}', 422, "invalid_parameter", "body.expires_days"),
        (b'{"scope": "read", "expires_days": %d}' % 10**400, 422, "invalid_parameter", "body.expires_days"),
        (b'{"scope": "read", "name": "a\\u0000b"}', 422, "invalid_parameter", "body.name"),
        (b'{"scope": "read", "name": "\'; DROP TABLE tokens; --"}', 201, None, None),
        (b'{"scope": "read", "days": 1}', 422, "invalid_parameter", "body.days"),
        (b" " * 5000, 413, "body_too_large", "body"),
    ],
)
def test_bodies(admin: TestClient, body: bytes, status: int, code: str | None, field: str | None) -> None:
    answer = admin.post(TOKENS, content=body, headers={"Content-Type": "application/json"})
    if code is None:
        assert answer.status_code == status
    else:
        assert problem(answer, status, code).field == field
    assert len(TokenList.model_validate_json(admin.get(TOKENS).content).tokens) == (code is None)


def test_other_media_types_are_refused(admin: TestClient) -> None:
    """What a form of a foreign web page could send."""
    for content_type in ("text/plain", "application/x-www-form-urlencoded"):
        answer = admin.post(TOKENS, content=b'{"scope": "admin"}', headers={"Content-Type": content_type})
        problem(answer, 415, "unsupported_media_type")


@pytest.mark.parametrize("token_id", ["abc", "0123456789AB", "0" * 13, "..%2Faudit", "%00"])
def test_ids_that_are_none(admin: TestClient, token_id: str) -> None:
    for answer in (admin.delete(f"{TOKENS}/{token_id}"), admin.post(f"{TOKENS}/{token_id}/rotate", json={})):
        assert answer.status_code in (404, 422)
    problem(admin.delete(f"{TOKENS}/{'0' * 12}"), 404, "unknown_token")
    problem(admin.post(f"{TOKENS}/{'0' * 12}/rotate", json={}), 404, "unknown_token")


def test_an_open_service_gives_no_lasting_secret_away(client: TestClient) -> None:
    problem(client.post(TOKENS, json={"scope": "admin"}), 403, "open_service")
    problem(client.post(f"{TOKENS}/{'0' * 12}/rotate", json={}), 403, "open_service")
    assert client.get(TOKENS).json() == {"tokens": []}


def test_writes_are_recorded_with_counts_and_actors(admin: TestClient, make: Any) -> None:
    shape = make.shape()
    agent = NewToken.model_validate_json(admin.post(TOKENS, json={"scope": "upload"}).content)
    headers = {"Authorization": f"Bearer {agent.token}", "Content-Type": "application/json", "Idempotency-Key": "a"}
    sessions = make.sessions(shape, 2, 1)
    for _ in range(2):
        # The second is a repeat: nothing is written.
        assert admin.post("/api/v1/histograms", content=make.body(shape, sessions), headers=headers).status_code == 202
    gone = make.hash(0)
    for _ in range(2):
        admin.delete(f"/api/v1/sessions/{gone}")
    page = AuditPage.model_validate_json(admin.get(AUDIT).content)
    told = [(entry.actor, entry.action, entry.object, entry.detail) for entry in page.entries[1:]]
    assert told == [
        (agent.id, "upload.accept", shape.fingerprint, {"uploads": 1, "accepted": 3, "duplicates": 0}),
        ("environment", "session.delete", gone, {"removed": 1}),
        ("environment", "session.delete", gone, {"removed": 0}),
    ]
    assert all(session.session_hash not in admin.get(AUDIT).text for session in sessions[1:])


def test_pages_of_the_audit_log(admin: TestClient) -> None:
    made = [make(admin).id for _ in range(7)]
    seen: list[str] = []
    after: int | None = 0
    while after is not None:
        page = AuditPage.model_validate_json(admin.get(AUDIT, params={"after": after, "limit": 3}).content)
        assert 1 <= len(page.entries) <= 3
        seen += [entry.object for entry in page.entries]
        after = page.next_after
    assert seen == made
    assert AuditPage.model_validate_json(admin.get(AUDIT, params={"after": 10**9}).content).entries == []


@pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=0", "limit=1001", "before=1", f"after={10**30}"])
def test_bad_audit_queries(admin: TestClient, query: str) -> None:
    problem(admin.get(f"{AUDIT}?{query}"), 422, "invalid_parameter")


@pytest.mark.parametrize("dry_run", [True, False])
def test_retention(admin: TestClient, store: Store, aged: date, dry_run: bool) -> None:
    answer = admin.post(RETENTION, json={"retention_days": 30, "dry_run": dry_run})
    assert (answer.status_code, answer.json()) == (
        200,
        {"retention_days": 30, "dry_run": dry_run, "parts": 1, "parts_by_day": {aged.isoformat(): 1}},
    )
    left = admin.post(RETENTION, json={"retention_days": 30, "dry_run": True}).json()
    assert left["parts"] == (1 if dry_run else 0)
    removals = [entry for entry in entries(admin) if entry[1] == "retention.run"]
    assert removals == ([] if dry_run else [("environment", "retention.run", aged.isoformat())])


def test_what_the_service_keeps_is_the_default(store: Store, aged: date) -> None:
    app = create_app(store, token="shared", retention_days=3)
    with TestClient(app, headers={"Authorization": "Bearer shared"}) as client:
        answer = client.post(RETENTION, json={}).json()
    assert (answer["retention_days"], answer["parts_by_day"]) == (3, {aged.isoformat(): 1})


@pytest.mark.usefixtures("aged")
def test_without_a_number_of_days_nothing_goes(admin: TestClient, store: Store) -> None:
    found = problem(admin.post(RETENTION, json={}), 422, "no_retention")
    assert found.field == "body.retention_days"
    assert "SPARKMOE_SERVICE_RETENTION_DAYS" in (found.hint or "")
    with store.reading() as cursor:
        assert cursor.execute("SELECT count(*) FROM parts").fetchall() == [(3,)]


@pytest.mark.parametrize("days", [0, -1, 36_501, "30", 1.5, True])
def test_days_that_cannot_be(admin: TestClient, days: object) -> None:
    found = problem(admin.post(RETENTION, json={"retention_days": days}), 422, "invalid_parameter")
    assert found.field == "body.retention_days"
