from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from spark_schemas.api import PROBLEM_MEDIA_TYPE, Problem
from spark_service.app import create_app
from spark_service.auth import UPLOAD_PATHS, needed_scope
from spark_service.db.store import Store
from spark_service.keyring import Keyring
from spark_service.rate_limit import Rate, Rates
from spark_service.tokens import TokenRequest, TokenRotation, join_token

SHARED = "shared-secret"
GRANTS = ["upload", "read", "upload read", "admin"]
SESSION = f"/api/v1/sessions/{'0' * 64}"
REQUESTS = [
    ("GET", "/readyz", "any"),
    ("GET", "/version", "any"),
    ("GET", "/api/openapi.json", "any"),
    ("POST", "/api/v1/histograms", "upload"),
    ("GET", "/api/v1/profiles", "read"),
    ("GET", "/api/v1/profiles/mf1-0/code", "read"),
    ("GET", "/api/v1/manifests/mf1-0/code", "read"),
    ("GET", "/nowhere", "read"),
    ("DELETE", SESSION, "admin"),
    ("GET", "/api/v1/admin", "admin"),
    ("GET", "/api/v1/admin/tokens", "admin"),
    ("POST", "/api/v1/admin/tokens", "admin"),
    ("DELETE", "/api/v1/admin/tokens/0123456789ab", "admin"),
    ("POST", "/api/v1/admin/tokens/0123456789ab/rotate", "admin"),
    ("GET", "/api/v1/admin/audit", "admin"),
    ("PUT", "/api/v1/profiles", "admin"),
    ("POST", "/api/v1/profiles", "admin"),
    ("OPTIONS", "/api/v1/histograms", "admin"),
]


def problem(response: Any, status: int, code: str) -> Problem:
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE, response.text
    found = Problem.model_validate_json(response.content)
    assert (response.status_code, found.code) == (status, code), response.text
    return found


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


@pytest.fixture
def keyring(store: Store) -> Keyring:
    return Keyring(store)


@pytest.fixture
def guarded(store: Store, keyring: Keyring) -> Iterator[TestClient]:
    app = create_app(store, token=SHARED, keyring=keyring)
    with TestClient(app, raise_server_exceptions=False) as opened:
        yield opened


def make(keyring: Keyring, scope: str) -> tuple[str, str]:
    token, secret = keyring.create(TokenRequest.model_validate({"scope": scope}), "cli")
    return token.token_id, join_token(token.token_id, secret)


@pytest.mark.parametrize(("method", "path", "needed"), REQUESTS)
def test_every_scope_on_every_route(guarded: TestClient, keyring: Keyring, method: str, path: str, needed: str) -> None:
    for grant in GRANTS:
        answer = guarded.request(method, path, headers=bearer(make(keyring, grant)[1]))
        if needed == "any" or needed in grant.split() or grant == "admin":
            assert answer.status_code not in (401, 403), (grant, answer.text)
        else:
            found = problem(answer, 403, "wrong_scope")
            assert (found.found, found.expected) == (grant, needed)
            assert f'scope="{needed}"' in answer.headers["www-authenticate"]
    assert guarded.request(method, path, headers=bearer(SHARED)).status_code not in (401, 403)
    problem(guarded.request(method, path), 401, "unauthorized")


def test_the_life_sign_alone_is_free(guarded: TestClient) -> None:
    assert guarded.get("/healthz").json() == {"status": "ok"}
    for path in ("/healthz/", "/healthz/x", "/index.json", "/%2Fhealthz"):
        problem(guarded.get(path), 401, "unauthorized")
    assert guarded.get("/", follow_redirects=False).headers["location"] == "/login"


def test_the_openapi_document_says_what_needs_which_scope(guarded: TestClient) -> None:
    schema = guarded.get("/api/openapi.json", headers=bearer(SHARED)).json()
    [(name, scheme)] = schema["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    told = {
        (method.upper(), path): operation["security"]
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    }
    assert told["GET", "/healthz"] == []
    assert told["GET", "/version"] == [{name: []}]
    assert told["POST", "/api/v1/histograms"] == [{name: ["upload"]}]
    assert told["GET", "/api/v1/profiles"] == [{name: ["read"]}]
    assert told["DELETE", "/api/v1/sessions/{session_hash}"] == [{name: ["admin"]}]


def test_outsiders_cannot_tell_tokens_apart(guarded: TestClient, keyring: Keyring) -> None:
    revoked_id, revoked = make(keyring, "admin")
    keyring.revoke(revoked_id, "cli")
    rotated_id, old = make(keyring, "admin")
    keyring.rotate(rotated_id, TokenRotation(), "cli")
    unknown = join_token("0" * 12, "a" * 43)
    answers = [guarded.get("/api/v1/profiles")]
    answers += [guarded.get("/api/v1/profiles", headers=bearer(text)) for text in (revoked, old, unknown, "nonsense")]
    for answer in answers:
        problem(answer, 401, "unauthorized")
        assert (answer.content, answer.headers["www-authenticate"]) == (
            answers[0].content,
            answers[0].headers["www-authenticate"],
        )


def test_a_change_holds_from_the_next_request_on(guarded: TestClient, keyring: Keyring) -> None:
    token_id, text = make(keyring, "read")
    assert guarded.get("/api/v1/profiles", headers=bearer(text)).status_code == 200
    _, secret = keyring.rotate(token_id, TokenRotation(), "cli")
    problem(guarded.get("/api/v1/profiles", headers=bearer(text)), 401, "unauthorized")
    new = bearer(join_token(token_id, secret))
    assert guarded.get("/api/v1/profiles", headers=new).status_code == 200
    keyring.revoke(token_id, "cli")
    problem(guarded.get("/api/v1/profiles", headers=new), 401, "unauthorized")


def test_a_valid_token_costs_no_query(guarded: TestClient, keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = make(keyring, "read")

    def fail(*_: object) -> None:
        raise AssertionError("asked the database")

    for name in ("reading", "writing"):
        monkeypatch.setattr(Store, name, fail)
    assert guarded.get("/version", headers=bearer(text)).status_code == 200
    problem(guarded.get("/version", headers=bearer(join_token("0" * 12, "a" * 43))), 401, "unauthorized")


@given(st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]), st.text(max_size=30))
def test_what_nobody_thought_of_needs_more_than_upload(method: str, rest: str) -> None:
    assert needed_scope(method, f"/api/v1/admin/{rest}") == "admin"
    path = f"/api/v1/{rest}"
    needed = needed_scope(method, path)
    assert (needed == "upload") == (method == "POST" and path in UPLOAD_PATHS)
    if method not in ("GET", "HEAD", "POST"):
        assert needed == "admin"


def limited(store: Store, keyring: Keyring, **changes: Any) -> TestClient:
    # So slow that no test is slow enough to refill a bucket.
    slow = Rate(0.001, 3)
    rates = Rates(reads=slow, uploads=slow, failures=slow)
    return TestClient(create_app(store, keyring=keyring, rates=rates, **changes), raise_server_exceptions=False)


def test_rates_by_token_and_kind(store: Store, keyring: Keyring) -> None:
    (_, first), (_, second) = make(keyring, "upload read"), make(keyring, "upload read")
    with limited(store, keyring) as client:

        def read(text: str) -> Any:
            return client.get("/api/v1/profiles", headers=bearer(text))

        assert [read(first).status_code for _ in range(3)] == [200] * 3
        answer = read(first)
        problem(answer, 429, "too_many_requests")
        assert 990 < int(answer.headers["retry-after"]) <= 1000
        # Neither another token nor another kind of request pays for it, and no life sign does.
        assert read(second).status_code == 200
        writes = [client.post("/api/v1/histograms", headers=bearer(first)).status_code for _ in range(4)]
        assert writes == [400, 400, 400, 429]
        assert [client.get("/healthz").status_code for _ in range(5)] == [200] * 5


def test_failures_are_put_off_but_never_a_valid_token(store: Store, keyring: Keyring) -> None:
    _, text = make(keyring, "read")
    with limited(store, keyring) as client:
        guesses = [client.get("/api/v1/profiles", headers=bearer(f"guess {number}")) for number in range(5)]
        assert [answer.status_code for answer in guesses] == [401, 401, 401, 429, 429]
        assert int(guesses[-1].headers["retry-after"]) >= 1
        assert client.get("/api/v1/profiles", headers=bearer(text)).status_code == 200


def test_rates_by_network_without_tokens(store: Store, keyring: Keyring) -> None:
    app = limited(store, keyring, open_access=True).app

    def read(host: str) -> int:
        with TestClient(app, client=(host, 1)) as client:
            return client.get("/version").status_code

    # An IPv6 host has a whole network of addresses.
    assert [read(f"2001:db8::{number}") for number in range(4)] == [200, 200, 200, 429]
    assert [read("2001:db8:0:1::1"), read("192.0.2.1"), read("testclient")] == [200] * 3
    assert [read("192.0.2.2") for _ in range(4)] == [200, 200, 200, 429]


def test_open_access_asks_for_nothing(store: Store, keyring: Keyring) -> None:
    with TestClient(create_app(store, keyring=keyring, token=SHARED, open_access=True)) as client:
        for headers in ({}, bearer("nonsense"), bearer(make(keyring, "read")[1])):
            assert client.delete(SESSION, headers=headers).status_code == 200
