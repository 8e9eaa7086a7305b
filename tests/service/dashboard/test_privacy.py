"""What administrators do from the privacy page, and that it says what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spark_schemas.histogram import HistogramUpload, SessionHistogram
from spark_service.db.audit import entries_before, record
from spark_service.db.store import Store

ADMIN = "from-the-environment"


def test_every_uploaded_field_is_named(admin: Any, store: Store, make: Any) -> None:
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape, 3, 2)), "a", "a")
    view = admin.client.get("/privacy.json").json()
    names = {field["name"] for field in view["received"]["fields"]}
    uploaded = (set(HistogramUpload.model_fields) | set(SessionHistogram.model_fields)) - {"sessions"}
    assert names - {"Idempotency-Key"} == uploaded
    counts = {field["name"]: field["count"] for field in view["received"]["fields"]}
    assert (counts["session_hash"], counts["split"], counts["decode"], counts["prefill"]) == (5, 2, 5, 0)
    assert "5 sessions between" in admin.get("/privacy").text


def test_deleting_a_session_asks_first(admin: Any, store: Store, make: Any) -> None:
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape, 3, 2)), "a", "a")
    session_hash = make.hash(0)
    asked = admin.post("/privacy/delete", {"session_hash": f" {session_hash.upper()} "}, on="/privacy")
    assert asked.status_code == 200
    assert "1 histogram of it is stored, under code" in asked.text
    assert len(store.part_keys(shape.fingerprint, "decode")) == 5
    token = re.search(r'name="form_token" value="([^"]+)"', asked.text.partition("<main")[2])
    assert token is not None
    sent = {"form_token": token[1], "session_hash": session_hash, "confirmed": "yes"}
    done = admin.post("/privacy/delete", sent)
    assert "Removed 1 histogram." in done.text
    assert done.headers["cache-control"] == "no-store"
    assert len(store.part_keys(shape.fingerprint, "decode")) == 4
    # Loading the answer once more does nothing.
    again = admin.post("/privacy/delete", sent)
    assert again.status_code == 409
    with store.reading() as cursor:
        [entry, *_] = entries_before(cursor, None, 10).entries
    assert (entry.action, entry.object, entry.actor) == ("session.delete", session_hash, "environment")


@pytest.mark.parametrize("text", ["", "x" * 64, "0" * 63, "<script>", "' OR 1=1 --"])
def test_what_is_no_hash_deletes_nothing(admin: Any, text: str) -> None:
    answer = admin.post("/privacy/delete", {"session_hash": text, "confirmed": "yes"}, on="/privacy")
    assert answer.status_code == 422
    assert "<script>" not in answer.text.partition("<main")[2]


def test_a_token_is_made_shown_once_and_revoked(admin: Any, visit: Any) -> None:
    fields = {"name": "ann's laptop", "upload": "on", "read": "on", "expires_days": "30"}
    made = admin.post("/privacy/tokens", fields, on="/privacy/tokens")
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    found = re.search(r"spark_([0-9a-f]{12})_[A-Za-z0-9_-]{43}", made.text)
    assert found is not None
    assert found[0] not in admin.get("/privacy/tokens").text
    assert "ann&#39;s laptop" in admin.get("/privacy/tokens").text
    user = visit()
    assert user.log_in(found[0]).status_code == 303
    [told] = admin.client.get("/privacy/tokens.json").json()["tokens"]
    assert (told["id"], told["scope"], told["name"]) == (found[1], "upload read", "ann's laptop")
    asked = admin.post(f"/privacy/tokens/{found[1]}/revoke", {}, on="/privacy/tokens")
    assert "cannot be undone" in asked.text
    assert user.get("/").status_code == 200
    admin.post(f"/privacy/tokens/{found[1]}/revoke", {"confirmed": "yes"}, on="/privacy/tokens")
    assert user.get("/").status_code == 303
    assert "revoked on" in admin.get("/privacy/tokens").text


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, "Choose what the token may do"),
        ({"read": "on", "admin": "on"}, "Choose what the token may do"),
        ({"read": "on", "expires_days": "0"}, "found &#39;0&#39;"),
        ({"read": "on", "expires_days": "99999"}, "expected 1 to 3650"),
        ({"read": "on", "name": "é"}, "plain letters"),
        ({"read": "on", "name": "x" * 65}, "at most 64"),
    ],
)
def test_a_token_that_cannot_be_made(admin: Any, fields: dict[str, str], fault: str) -> None:
    answer = admin.post("/privacy/tokens", fields, on="/privacy/tokens")
    assert answer.status_code == 422
    assert fault in answer.text
    assert admin.client.get("/privacy/tokens.json").json()["tokens"] == []


def test_unknown_tokens_are_not_found(admin: Any) -> None:
    for fields in ({}, {"confirmed": "yes"}):
        assert admin.post("/privacy/tokens/000000000000/revoke", fields, on="/privacy/tokens").status_code == 404


def test_the_log_is_read_page_by_page(admin: Any, store: Store) -> None:
    with store.writing() as cursor:
        for index in range(120):
            record(cursor, "cli", "note.take", f"<i>{index}</i>\u202e", {"none": None, "text": "<b>"})
    seen: list[str] = []
    path: str | None = "/privacy/audit"
    while path is not None:
        html = admin.get(path).text.partition("<main")[2]
        assert "<i>" not in html
        assert "<b>" not in html
        assert "\u202e" not in html
        seen += re.findall(r"&lt;i&gt;(\d+)&lt;", html)
        older = re.search(r'rel="next" href="([^"]+)"', html)
        path = older[1] if older else None
    assert seen == [str(index) for index in reversed(range(120))]
    for text in ("0", "x", "-1", "9" * 30):
        assert admin.get(f"/privacy/audit?before={text}").status_code == 422


def test_thresholds_are_those_of_the_service(admin: Any) -> None:
    view = admin.client.get("/privacy.json").json()
    rules = {rule["name"]: rule["value"] for rule in view["rules"]}
    assert rules["Noise"] == "none"
    assert rules["Sessions behind a profile"] == "at least 1"
    assert view["retention_days"] == 0
    assert "Everything is kept" in admin.get("/privacy").text


def test_the_openapi_document_knows_no_pages(admin: Any) -> None:
    paths = admin.client.get("/api/openapi.json", headers={"Authorization": f"Bearer {ADMIN}"}).json()["paths"]
    assert not [path for path in paths if "privacy" in path or "login" in path or path == "/"]


def test_templates_never_mark_text_as_safe() -> None:
    import spark_service.dashboard as package

    for path in Path(package.__file__).with_name("templates").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe|autoescape\s+false|\|\s*tojson", text), path
