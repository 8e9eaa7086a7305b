from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import httpx2
import pytest
import zstandard
from starlette.testclient import TestClient

from spark_schemas.api import PROBLEM_MEDIA_TYPE, Problem, ProfileList, UploadReceipt
from spark_schemas.manifest import PlacementManifest
from spark_schemas.profile import Profile
from spark_service.app import create_app
from spark_service.db.migrate import available
from spark_service.db.store import Store
from spark_service.group_commit import GroupCommit, Limits
from spark_service.inflate import SMALL_BYTES, BodyLimits

MANIFEST = "/api/v1/manifests/{fingerprint}/{workload}"
Post = Callable[..., httpx2.Response]


def problem(response: httpx2.Response, status: int, code: str) -> Problem:
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE, response.text
    found = Problem.model_validate_json(response.content)
    assert (response.status_code, found.status, found.code) == (status, status, code), response.text
    assert found.title
    assert found.detail
    return found


@pytest.fixture
def filled(client: TestClient, post: Post, make: Any) -> TestClient:
    shape = make.shape()
    assert post(make.body(shape, make.sessions(shape))).status_code == 202
    return client


def test_upload_profile_manifest(client: TestClient, post: Post, make: Any) -> None:
    shape = make.shape()
    answer = post(make.body(shape, make.sessions(shape)))
    assert answer.status_code == 202
    assert UploadReceipt.model_validate_json(answer.content) == UploadReceipt(accepted=8, duplicates=0)
    listed = ProfileList.model_validate_json(client.get("/api/v1/profiles").content).profiles
    assert [(found.workload, found.verdict) for found in listed] == [("code", "profile")]
    profile = Profile.model_validate_json(client.get(f"/api/v1/profiles/{shape.fingerprint}/code").content)
    assert profile.revision == listed[0].revision
    path = MANIFEST.format(fingerprint=shape.fingerprint, workload="code")
    answer = client.get(path, params={"vram_bytes": 4000, "n_ctx": 100, "reserve_bytes": 10})
    manifest = PlacementManifest.model_validate_json(answer.content)
    assert manifest.bytes.vram_total <= 4000
    assert answer.headers["etag"] == f'"{hashlib.sha256(answer.content).hexdigest()}"'


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_compressed_uploads(post: Post, make: Any, encoding: str) -> None:
    shape = make.shape()
    body = make.body(shape, make.sessions(shape, 1, 0))
    packed = zstandard.ZstdCompressor().compress(body) if encoding == "zstd" else gzip.compress(body)
    assert post(packed, Content_Encoding=encoding).json() == {"accepted": 1, "duplicates": 0}
    # The key belongs to the content, however it is packed.
    assert post(body).json() == {"accepted": 1, "duplicates": 0}


def test_idempotency(client: TestClient, post: Post, make: Any) -> None:
    shape = make.shape()
    body = make.body(shape, make.sessions(shape, 2, 0))
    first, again = post(body, "a"), post(body, "a")
    assert first.content == again.content
    assert post(body, "b").json() == {"accepted": 0, "duplicates": 2}
    other = make.body(shape, make.sessions(shape, 1, 0))
    found = problem(post(other, "a"), 422, "idempotency_key_reused")
    assert found.field == "header.Idempotency-Key"
    missing = client.post("/api/v1/histograms", content=body, headers={"Content-Type": "application/json"})
    problem(missing, 400, "idempotency_key_missing")
    problem(post(body, "x" * 256), 400, "idempotency_key_invalid")


def test_bad_uploads(client: TestClient, post: Post, make: Any) -> None:
    shape = make.shape()
    body = make.body(shape, make.sessions(shape, 1, 0))
    problem(post(body, Content_Type="text/plain"), 415, "unsupported_media_type")
    refused = post(body, Content_Encoding="br")
    problem(refused, 415, "unsupported_encoding")
    assert refused.headers["accept-encoding"] == "zstd, gzip, identity"
    problem(post(body, Content_Encoding="zstd"), 400, "bad_encoding")
    problem(post(b"{"), 400, "invalid_json")
    found = problem(post(body.replace(b'"tokens":300', b'"tokens":301', 1)), 422, "invalid_histogram")
    assert found.field == "sessions[0].decode.layers[0].tokens"
    assert (found.found, found.expected) == ("300", "exactly the phase's 301")
    other = make.shape(core_bytes=5)
    assert post(body).status_code == 202
    found = problem(post(make.body(other, make.sessions(other, 1, 0)), "key-2"), 409, "model_mismatch")
    assert (found.field, found.found, found.expected) == ("model.core_bytes", "5", "1000")
    # A refused upload does not use up its key.
    assert post(make.body(shape, make.sessions(shape, 2, 0)), "key-2").json() == {"accepted": 1, "duplicates": 1}


def test_limits(store: Store, make: Any) -> None:
    shape = make.shape()
    body = make.body(shape, make.sessions(shape, 1, 0))
    app = create_app(store, open_access=True, limits=BodyLimits(body_bytes=len(body), inflated_bytes=len(body)))
    headers = {"Idempotency-Key": "a", "Content-Type": "application/json"}
    with TestClient(app) as client:

        def post(content: Any, **more: str) -> httpx2.Response:
            return client.post("/api/v1/histograms", content=content, headers={**headers, **more})

        problem(post(body + b" "), 413, "body_too_large")
        problem(post(iter([body, b" "])), 413, "body_too_large")
        bomb = zstandard.ZstdCompressor().compress(body + b" " * 10_000_000)
        problem(post(bomb, **{"Content-Encoding": "zstd"}), 413, "body_too_large")
        assert post(body).status_code == 202


def test_deletion(filled: TestClient, make: Any) -> None:
    gone = make.hash(0)
    answer = filled.delete(f"/api/v1/sessions/{gone}")
    assert (answer.status_code, answer.json()) == (200, {"session_hash": gone, "removed": 1})
    assert filled.delete(f"/api/v1/sessions/{gone}").json()["removed"] == 0
    assert filled.get(f"/api/v1/profiles/{make.fingerprint}/code").json()["n_calibration"] == 3
    problem(filled.delete("/api/v1/sessions/abc"), 422, "invalid_parameter")


def test_entity_tags(filled: TestClient, make: Any) -> None:
    path = MANIFEST.format(fingerprint=make.fingerprint, workload="code") + "?vram_bytes=4000&n_ctx=100"
    etag = filled.get(path).headers["etag"]
    for header in (etag, f"W/{etag}", f'"x", {etag}', f'"a,b" ,W/{etag}', "*"):
        answer = filled.get(path, headers={"If-None-Match": header})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag)
    for header in ('"x"', etag.strip('"'), etag[:-1], ""):
        assert filled.get(path, headers={"If-None-Match": header}).status_code == 200
    assert filled.get(path + "&reserve_bytes=900").headers["etag"] != etag
    filled.delete(f"/api/v1/sessions/{make.hash(0)}")
    assert filled.get(path, headers={"If-None-Match": etag}).status_code == 200


def test_what_is_not_there(filled: TestClient, make: Any) -> None:
    query = {"vram_bytes": 4000, "n_ctx": 100}
    stranger = "mf1-" + "f" * 32
    for template in ("/api/v1/profiles/{fingerprint}/{workload}", MANIFEST):
        params: dict[str, Any] = query if template == MANIFEST else {}
        path = template.format(fingerprint=stranger, workload="code")
        problem(filled.get(path, params=params), 404, "unknown_model")
        found = problem(filled.get(path, params={**params, "sibling": make.sibling}), 404, "unknown_model")
        assert make.fingerprint in str(found.hint)
        path = template.format(fingerprint=make.fingerprint, workload="chat")
        assert problem(filled.get(path, params=params), 404, "unknown_workload").expected == "code"
        path = template.format(fingerprint=make.fingerprint, workload="code")
        problem(filled.get(path, params={**params, "phase": "prefill"}), 404, "no_calibration_sessions")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("n_ctx=100", "query.vram_bytes"),
        ("vram_bytes=4000", "query.n_ctx"),
        ("vram_bytes=4000&n_ctx=0", "query.n_ctx"),
        ("vram_bytes=4e3&n_ctx=100", "query.vram_bytes"),
        ("vram_bytes=9007199254740993&n_ctx=100", "query.vram_bytes"),
        ("vram_bytes=4000&n_ctx=100&reserve_bytes=-1", "query.reserve_bytes"),
        ("vram_bytes=4000&n_ctx=100&phase=both", "query.phase"),
        ("vram_bytes=4000&n_ctx=100&reserve=1", "query.reserve"),
        ("vram_bytes=4000&n_ctx=100&sibling=x", "query.sibling"),
    ],
)
def test_bad_queries(filled: TestClient, make: Any, query: str, field: str) -> None:
    path = MANIFEST.format(fingerprint=make.fingerprint, workload="code")
    assert problem(filled.get(f"{path}?{query}"), 422, "invalid_parameter").field == field


def test_bad_paths(filled: TestClient, make: Any) -> None:
    query = "?vram_bytes=4000&n_ctx=100"
    found = problem(filled.get(f"/api/v1/manifests/mf1-x/code{query}"), 422, "invalid_parameter")
    assert (found.field, found.found) == ("path.fingerprint", "'mf1-x'")
    problem(filled.get(f"/api/v1/manifests/{make.fingerprint}/-a{query}"), 422, "invalid_parameter")
    problem(filled.get("/api/v1/profiles?fingerprint=x"), 422, "invalid_parameter")


def test_budgets_that_cannot_work(filled: TestClient, make: Any) -> None:
    path = MANIFEST.format(fingerprint=make.fingerprint, workload="code")
    found = problem(filled.get(f"{path}?vram_bytes=2099&n_ctx=100"), 422, "budget_too_small")
    assert found.hint == "smallest change that fits: vram_bytes=2100 or n_ctx=99"
    problem(filled.get(f"{path}?vram_bytes=4000&n_ctx=5000"), 422, "context_too_long")


@pytest.mark.parametrize(
    "path", ["/docs", "/redoc", "/api", "/api/v1", "/api/v1/histograms/", "/healthz/", "/nothing.json", "/%ff"]
)
def test_unknown_paths(client: TestClient, path: str) -> None:
    problem(client.get(path), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/api/v1/histograms", "POST"), ("POST", "/healthz", "GET"), ("PUT", "/api/v1/profiles", "GET")],
)
def test_wrong_methods(client: TestClient, method: str, path: str, allowed: str) -> None:
    answer = client.request(method, path)
    assert problem(answer, 405, "method_not_allowed").expected is None
    assert answer.headers["allow"] == allowed


def test_every_operation_documents_problems(client: TestClient) -> None:
    schema = client.get("/api/openapi.json").json()
    names = schema["components"]["schemas"]
    assert {"HistogramUpload", "SessionHistogram", "Problem", "Profile", "PlacementManifest", "UploadReceipt"} <= set(
        names
    )
    text = client.get("/api/openapi.json").text
    assert set(re.findall(r"#/components/schemas/([\w-]+)", text)) <= set(names)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            content = operation["responses"]["default"]["content"]
            assert content == {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}, path
    assert set(schema["paths"]) == {
        "/healthz",
        "/readyz",
        "/version",
        "/api/v1/histograms",
        "/api/v1/sessions/{session_hash}",
        "/api/v1/profiles",
        "/api/v1/profiles/{fingerprint}/{workload}",
        "/api/v1/manifests/{fingerprint}/{workload}",
        "/api/v1/admin/backup",
        "/api/v1/admin/backups/{name}",
        "/api/v1/admin/tokens",
        "/api/v1/admin/tokens/{token_id}",
        "/api/v1/admin/tokens/{token_id}/rotate",
        "/api/v1/admin/audit",
        "/api/v1/admin/retention",
        "/api/v1/manifests/{fingerprint}/{workload}/diff",
        "/api/v1/manifests/{fingerprint}/{workload}/history",
        "/api/v1/admin/manifests/{fingerprint}/{workload}/pin",
        "/api/v1/signing-key",
        "/api/v1/workloads/nearest",
        "/api/v1/drift",
        "/api/v1/admin/drift/{fingerprint}/{workload}",
    }


def test_probes(client: TestClient, store: Store) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ok"}
    assert client.get("/version").json()["schema_version"] == len(available())
    store.close()
    assert client.get("/healthz").status_code == 200
    unready = client.get("/readyz")
    problem(unready, 503, "storage_unavailable")
    assert unready.headers["retry-after"] == "5"


def test_a_bug_is_a_problem_too(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret path")

    monkeypatch.setattr(Store, "require_ready", fail)
    answer = client.get("/readyz")
    problem(answer, 500, "internal_error")
    assert answer.headers["connection"] == "close"
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (duckdb.IOException("No space left on device"), 507, "storage_full"),
        (duckdb.OutOfMemoryException("could not allocate"), 507, "storage_full"),
        (duckdb.IOException("Input/output error"), 503, "storage_unavailable"),
        (duckdb.FatalException("database has been invalidated"), 503, "storage_unavailable"),
    ],
)
def test_a_failing_database_stores_nothing_and_the_service_lives_on(
    client: TestClient, post: Post, make: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    shape = make.shape()
    body = make.body(shape, make.sessions(shape, 2, 0))

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        # Between the two tables: half of the upload is written by then.
        patched.setattr("spark_service.db.store.histograms_table", fail)
        answer = post(body)
        problem(answer, status, code)
        assert "service.duckdb" not in answer.text
    assert client.get("/readyz").status_code == 200
    assert post(body).json() == {"accepted": 2, "duplicates": 0}


@pytest.fixture
def guarded(store: Store) -> Iterator[TestClient]:
    with TestClient(create_app(store, token="s3cret-token"), raise_server_exceptions=False) as opened:
        yield opened


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic s3cret-token",
        "s3cret-token",
        "Bearer s3cret-tokenx",
        "Bearer ä",
    ],
)
@pytest.mark.parametrize("path", ["/api/v1/profiles", "/api/openapi.json", "/api/nowhere", "/api"])
def test_a_token_guards_the_api(guarded: TestClient, header: str | None, path: str) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = guarded.get(path, headers=headers)
    problem(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert "s3cret" not in answer.text


def test_the_token_opens_all_and_only_the_life_sign_needs_none(guarded: TestClient) -> None:
    for scheme in ("Bearer", "bearer"):
        assert guarded.get("/api/v1/profiles", headers={"Authorization": f"{scheme} s3cret-token"}).status_code == 200
        for path in ("/readyz", "/version"):
            assert guarded.get(path, headers={"Authorization": f"{scheme} s3cret-token"}).status_code == 200
            problem(guarded.get(path), 401, "unauthorized")
    assert guarded.get("/healthz").status_code == 200
    problem(guarded.post("/api/v1/histograms", content=b"x"), 401, "unauthorized")


def test_restart_keeps_everything(tmp_path: Path, make: Any) -> None:
    shape = make.shape()
    body = make.body(shape, make.sessions(shape))
    headers = {"Idempotency-Key": "a", "Content-Type": "application/json"}
    seen = []
    for _ in range(2):
        store = Store.open(tmp_path / "a.duckdb", threads=1)
        with TestClient(create_app(store, open_access=True)) as client:
            assert client.post("/api/v1/histograms", content=body, headers=headers).json()["accepted"] == 8
            seen.append(client.get(f"/api/v1/profiles/{shape.fingerprint}/code").content)
        store.close()
    assert seen[0] == seen[1]


def test_large_and_small_bodies_are_read_alike(post: Post, make: Any) -> None:
    shape = make.shape([(2048, 2, 1)] * 8)
    body = make.body(shape, [make.session(shape, make.hash(number), decode=2) for number in range(2)])
    assert len(body) > SMALL_BYTES / 2
    large = make.body(shape, [make.session(shape, make.hash(number), decode=2) for number in range(6)])
    assert len(large) > SMALL_BYTES
    assert post(body, "a").json() == {"accepted": 2, "duplicates": 0}
    assert post(large, "b").json() == {"accepted": 4, "duplicates": 2}
    for number, raw in enumerate((body, large)):
        spoilt = raw.replace(b'"tokens":2', b'"tokens":3', 1)
        found = problem(post(spoilt, f"c{number}"), 422, "invalid_histogram")
        assert found.field == "sessions[0].decode.layers[0].tokens"


def test_uploads_that_find_too_many_waiting_are_told_when_to_retry(
    client: TestClient, post: Post, store: Store, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = make.shape()
    monkeypatch.setattr(store, "_group_commit", GroupCommit(store.add_batch, Limits(waiting_rows=0)))
    answer = post(make.body(shape, make.sessions(shape, 1, 0)))
    problem(answer, 503, "overloaded")
    assert answer.headers["retry-after"] == "1"
