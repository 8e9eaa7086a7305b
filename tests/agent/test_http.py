from __future__ import annotations

import datetime as dt
import gzip
import json
import socket
import subprocess
import sys
from email.utils import format_datetime

import pytest

from spark_agent.errors import (
    ConfigError,
    RefusedError,
    ServiceAnswerError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from spark_agent.http import ManifestAnswer, ServiceClient
from spark_schemas.profile import Profile

FINGERPRINT = "mf1-" + "a" * 32
ASKED = {"vram_bytes": 1000, "n_ctx": 64, "reserve_bytes": 7, "phase": "decode"}
MANIFEST_PATH = f"/api/v1/manifests/{FINGERPRINT}/chat"


@pytest.fixture
def client(service):
    with ServiceClient(service.url, "spk_1", timeout_s=120) as opened:
        yield opened


def profile(**changes: object) -> bytes:
    found = Profile(
        fingerprint=FINGERPRINT,
        workload="chat",
        phase="decode",
        revision="c" * 64,
        n_calibration=1,
        n_held_out=0,
        tokens_calibration=9,
        tokens_held_out=0,
        layers=(),
        curves=(),
        verdict=None,
        verdict_reason="too few",
    )
    return found.model_copy(update=changes).model_dump_json().encode()


def test_a_manifest_and_its_etag(service, client, make_reply, make_manifest):
    manifest = make_manifest()
    headers = {"Content-Type": "application/json; charset=utf-8", "ETag": '"v1"'}
    service.answers[MANIFEST_PATH] = make_reply(200, manifest.model_dump_json().encode(), headers)
    found = client.manifest(FINGERPRINT, "chat", **ASKED)
    assert found == ManifestAnswer(manifest, manifest.model_dump_json().encode(), '"v1"', None, None)
    signed = {"Spark-Signature": "a signature", "Spark-Pinned": "a revision", "Spark-Pinned-Signature": "its"}
    service.answers[MANIFEST_PATH] = make_reply(304, headers=signed)
    unchanged = client.manifest(FINGERPRINT, "chat", **ASKED, etag=found.etag)
    assert unchanged == ManifestAnswer(None, b"", '"v1"', "a signature", "a revision", "its")
    first, second = service.requests
    assert first.path == f"{MANIFEST_PATH}?vram_bytes=1000&n_ctx=64&reserve_bytes=7&phase=decode"
    assert "if-none-match" not in first.headers
    assert second.headers["if-none-match"] == '"v1"'
    assert first.headers["authorization"] == "Bearer spk_1"


def test_profiles(service, client, make_reply):
    service.answers["/api/v1/profiles"] = make_reply(200, b'{"profiles": []}')
    assert client.profiles().profiles == ()
    client.profiles(FINGERPRINT)
    assert [request.path for request in service.requests] == [
        "/api/v1/profiles",
        f"/api/v1/profiles?fingerprint={FINGERPRINT}",
    ]
    service.answers[f"/api/v1/profiles/{FINGERPRINT}/chat"] = make_reply(200, profile())
    assert client.profile(FINGERPRINT, "chat", "decode").verdict_reason == "too few"
    assert service.requests[-1].path.endswith("/chat?phase=decode")


def test_names_cannot_leave_their_place_in_the_path(service, client):
    with pytest.raises(ServiceRefusedError):
        client.profile("../../admin", "a/b?c", "decode")
    assert service.requests[-1].path == "/api/v1/profiles/..%2F..%2Fadmin/a%2Fb%3Fc?phase=decode"


def test_a_problem_is_passed_on_in_the_services_words(service, client, make_problem):
    members = {"hint": "create a token", "field": "token", "found": "expired", "expected": "valid"}
    service.script = [make_problem(401, "Not allowed", **members)]
    with pytest.raises(ServiceRefusedError) as caught:
        client.profiles()
    error = caught.value
    assert str(error).endswith("answered 401: Not allowed: as scripted (token: found expired, expected valid)")
    assert (error.status, error.hint, error.exit_code) == (401, "create a token", 1)
    assert error.problem is not None
    assert error.problem.code == "scripted"


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ("7", 7, 7),
        ("9" * 400, 10**8, 10**12),
        ("in an hour", 3500, 3600),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0, 0),
        ("Sun, 06 Nov 1994 08:49:37 -0000", 0, 0),
    ],
)
def test_retry_after_in_both_forms(service, client, make_problem, value, low, high):
    if value == "in an hour":
        value = format_datetime(dt.datetime.now(dt.UTC) + dt.timedelta(hours=1), usegmt=True)
    service.script = [make_problem(503, "Busy", {"Retry-After": value})]
    with pytest.raises(ServiceRefusedError) as caught:
        client.profiles()
    assert low <= caught.value.retry_after_s <= high


@pytest.mark.parametrize(
    ("content_type", "body"),
    [("text/html", b"<h1>Bad gateway</h1>"), ("application/problem+json", b"{}"), ("application/problem+json", b"<")],
)
def test_an_error_without_a_reason(service, client, make_reply, content_type, body):
    service.script = [make_reply(502, body, {"Content-Type": content_type, "Retry-After": "soon"})]
    with pytest.raises(ServiceRefusedError, match="answered 502 without a reason") as caught:
        client.profiles()
    assert (caught.value.problem, caught.value.retry_after_s) == (None, None)


@pytest.mark.parametrize(
    ("status", "body", "headers", "expected"),
    [
        (200, b"<html>", {"Content-Type": "text/html"}, "text/html, expected application/json"),
        (200, b"{}", {}, "nothing, expected application/json"),
        (200, b"<html>", None, "no valid ProfileList: the whole"),
        (200, b'{"profiles": 3}', None, "no valid ProfileList: profiles"),
        (200, b'{"profiles": [], "more": 1}', None, "no valid ProfileList: more"),
        (200, b"[" * 100_000, None, "no valid ProfileList"),
        (204, b"", None, "status 204, expected 200"),
        (304, b"", None, "status 304, expected 200"),
        (302, b"", {"Location": "http://elsewhere/"}, "a redirect to http://elsewhere/"),
        (307, b"", {}, "a redirect to nowhere"),
    ],
)
def test_answers_that_break_the_protocol(service, client, make_reply, status, body, headers, expected):
    service.script = [make_reply(status, body) if headers is None else make_reply(status, body, headers)]
    with pytest.raises(ServiceAnswerError) as caught:
        client.profiles()
    assert expected in str(caught.value)
    assert service.url in str(caught.value)
    assert caught.value.hint
    assert len(service.requests) == 1


def test_a_compressed_answer_is_not_unfolded(service, client, make_reply):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    service.script = [make_reply(200, gzip.compress(b'{"profiles": []}'), headers)]
    with pytest.raises(ServiceAnswerError, match="compressed"):
        client.profiles()


def test_a_huge_answer_is_cut_off(service, client, make_reply, monkeypatch):
    monkeypatch.setattr("spark_agent.http.MAX_ANSWER_BYTES", 100_000)
    service.script = [make_reply(200, b" " * 3_000_000)]
    with pytest.raises(ServiceAnswerError, match="more than 100000 bytes"):
        client.profiles()


@pytest.mark.parametrize(
    "changes", [{"fingerprint": "mf1-" + "d" * 32}, {"workload": "review"}, {"n_ctx": 65}, {"phase": "prefill"}]
)
def test_another_manifest_than_asked_for(service, client, make_reply, make_manifest, changes):
    service.script = [make_reply(200, make_manifest(**changes).model_dump_json().encode())]
    with pytest.raises(ServiceAnswerError, match="a manifest for"):
        client.manifest(FINGERPRINT, "chat", **ASKED)


def test_another_profile_than_asked_for(service, client, make_reply):
    service.script = [make_reply(200, profile(workload="review"))]
    with pytest.raises(ServiceAnswerError, match="a profile for"):
        client.profile(FINGERPRINT, "chat", "decode")


def test_nobody_answers():
    # Bound and not listening: connections are refused, and nobody else gets the port.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with ServiceClient(url) as client, pytest.raises(ServiceUnreachableError, match=url) as caught:
            client.profiles()
    assert "spark-service run" in (caught.value.hint or "")


def test_connection_closed_and_timeout(service, client, make_reply):
    service.script = [make_reply(None)]
    with pytest.raises(ServiceUnreachableError):
        client.profiles()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        ServiceClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1) as impatient,
        pytest.raises(ServiceUnreachableError, match="timed out"),
    ):
        impatient.profiles()


def test_a_proxy_is_not_used_for_this_machine(service, make_reply, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    service.answers["/api/v1/profiles"] = make_reply(200, b'{"profiles": []}')
    with ServiceClient(service.url) as client:
        assert client.profiles().profiles == ()
        client.close()
        assert client.profiles().profiles == ()
    assert "authorization" not in service.requests[0].headers


@pytest.mark.parametrize("url", ["http://spark.example", "http://10.0.0.1:8710", "http://127.0.0.1.example"])
def test_a_token_never_travels_in_the_open(url):
    with pytest.raises(RefusedError, match="unencrypted") as caught:
        ServiceClient(url, "spk_1")
    assert caught.value.exit_code == 3
    ServiceClient(url)


@pytest.mark.parametrize("url", ["https://spark.example", "http://localhost:1", "http://[::1]:1", "http://127.9.9.9"])
def test_a_token_may_travel_encrypted_or_not_at_all(url):
    assert ServiceClient(url, "spk_1").base_url == url


def test_an_address_that_is_none():
    with pytest.raises(ConfigError, match="'nowhere', expected http://HOST"):
        ServiceClient("nowhere")


def test_offline_contacts_nobody(service):
    client = ServiceClient(service.url, offline=True)
    with pytest.raises(RefusedError, match="SPARKMOE_OFFLINE"):
        client.profiles()
    assert service.requests == []


def test_importing_the_plumbing_loads_no_http_library():
    code = (
        "import sys, spark_agent.http, spark_agent.upload, spark_agent.spool, spark_agent.output, json;"
        "print(json.dumps(sorted({'httpx', 'rich', 'stamina', 'llama_cpp', 'starlette'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
