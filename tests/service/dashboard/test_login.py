"""Who gets in, how long, and that no other site can send a form for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spark_service.credentials import Client, Credentials
from spark_service.dashboard.forms import FormGuard
from spark_service.dashboard.logins import LIFETIME_SECONDS, MAX_LOGINS, Logins
from spark_service.dashboard.paths import is_page, safe_next
from spark_service.errors import FormError
from spark_service.keyring import Keyring
from spark_service.tokens import TokenRotation, join_token

ADMIN = "from-the-environment"
PAGES = ("/", "/privacy", "/privacy/audit", "/privacy/tokens")


def test_pages_ask_for_a_login_and_lead_back(visit: Callable[..., Any]) -> None:
    visitor = visit()
    for path in PAGES:
        answer = visitor.get(path)
        assert answer.status_code == 303
        visitor.client.cookies.clear()
    assert visitor.get("/privacy?x=1").headers["location"] == "/login?next=%2Fprivacy%3Fx%3D1"
    answer = visitor.log_in(ADMIN, next="/privacy")
    assert (answer.status_code, answer.headers["location"]) == (303, "/privacy")
    assert visitor.get("/privacy").status_code == 200


def test_twins_have_the_permissions_of_their_pages(visit: Callable[..., Any], token: Callable[..., Any]) -> None:
    client = visit().client
    for path, scope in (("/index.json", "read"), ("/.json", "read"), ("/privacy.json", "read"),
                        ("/privacy/audit.json", "admin"), ("/privacy/tokens.json", "admin")):  # fmt: skip
        assert client.get(path).status_code == 401
        for grant in ("upload", "read", "admin"):
            allowed = grant == "admin" or grant == scope
            answer = client.get(path, headers={"Authorization": f"Bearer {token(grant)[1]}"})
            assert answer.status_code == (200 if allowed else 403), (path, grant)
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_cookie_is_out_of_reach(visit: Callable[..., Any]) -> None:
    told = visit().log_in(ADMIN).headers["set-cookie"]
    assert told.startswith("spark_login=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(told.split("; "))
    assert "Secure" not in told
    secure = visit("https://testserver")
    told = secure.post("/login", {"token": ADMIN}, on="/login", origin="https://testserver").headers["set-cookie"]
    assert told.startswith("__Host-spark_login=")
    assert "Secure" in told.split("; ")
    assert ADMIN not in told


def test_a_cookie_opens_pages_alone(admin: Any) -> None:
    assert admin.get("/privacy/tokens").status_code == 200
    for path in ("/api/v1/profiles", "/api/v1/admin/tokens", "/version"):
        assert admin.client.get(path).status_code == 401


def test_readers_see_no_administration(reader: Any) -> None:
    assert reader.get("/privacy").status_code == 200
    assert 'session_hash"' not in reader.get("/privacy").text.partition("Deleting a session")[2]
    for path in ("/privacy/audit", "/privacy/tokens"):
        answer = reader.get(path)
        assert answer.status_code == 403
        assert "expected admin" in answer.text
    answer = reader.post("/privacy/delete", {"session_hash": "0" * 64, "confirmed": "yes"}, on="/privacy")
    assert answer.status_code == 403


def test_tokens_that_only_upload_do_not_log_in(visit: Callable[..., Any], token: Callable[..., Any]) -> None:
    visitor = visit()
    answer = visitor.log_in(token("upload")[1])
    assert answer.status_code == 403
    assert "scope read" in answer.text
    assert visitor.get("/").status_code == 303


@pytest.mark.parametrize("how", ["revoked", "rotated", "logged out"])
def test_a_login_ends_with_its_token(
    visit: Callable[..., Any], token: Callable[..., Any], keyring: Keyring, how: str
) -> None:
    token_id, text = token("read")
    visitor = visit()
    visitor.log_in(text)
    assert visitor.get("/").status_code == 200
    if how == "revoked":
        keyring.revoke(token_id, "cli")
    elif how == "rotated":
        keyring.rotate(token_id, TokenRotation(), "cli")
    else:
        cookie = visitor.client.cookies["spark_login"]
        assert visitor.post("/logout", {}, on="/privacy").headers["location"] == "/login"
        visitor.client.cookies.set("spark_login", cookie)  # somebody kept it
    assert visitor.get("/").status_code == 303


def test_wrong_tokens_are_put_off(visit: Callable[..., Any]) -> None:
    visitor = visit()
    assert [visitor.log_in(f"wrong-{index}").status_code for index in range(7)] == [401] * 5 + [429] * 2
    answer = visitor.log_in("wrong")
    assert int(answer.headers["retry-after"]) >= 1
    assert "wrong tokens" in answer.text
    # Who has a valid one is let in all the same.
    assert visitor.log_in(ADMIN).status_code == 303


@pytest.mark.parametrize("origin", ["http://evil.example", "http://testserver:81", "null", "http://testserver.evil"])
def test_forms_of_other_sites_do_nothing(admin: Any, visit: Callable[..., Any], origin: str) -> None:
    stolen = admin.form_token("/privacy/tokens")
    answer = admin.post("/privacy/tokens", {"form_token": stolen, "read": "on"}, origin=origin)
    assert answer.status_code == 403
    assert "expected a page of this service" in answer.text
    stranger = visit()
    answer = stranger.post("/login", {"form_token": stranger.form_token("/login"), "token": ADMIN}, origin=origin)
    assert answer.status_code == 403
    assert admin.client.get("/privacy/tokens.json").json()["tokens"] == []


def test_forms_need_the_token_of_their_page(admin: Any, reader: Any) -> None:
    other = reader.form_token("/privacy")
    before = admin.client.get("/privacy/tokens.json").json()
    for token in ("", "x", "0" * 32 + "." + "0" * 64, other):
        answer = admin.post("/privacy/tokens", {"form_token": token, "read": "on"})
        assert answer.status_code == 403
        assert "no valid token" in answer.text
    assert admin.client.get("/privacy/tokens.json").json() == before


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        ("{}", "application/json", 415),
        ("a=1&a=2", "application/x-www-form-urlencoded", 400),
        ("nothing", "application/x-www-form-urlencoded", 400),
        ("a=%FF", "application/x-www-form-urlencoded", 400),
        ("a=" + "x" * 9000, "application/x-www-form-urlencoded", 413),
    ],
)
def test_damaged_forms(visit: Callable[..., Any], content: str, media_type: str, status: int) -> None:
    answer = visit().client.post("/login", content=content, headers={"Content-Type": media_type})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize(
    "path", ["//evil.example", "/\\evil.example", "https://evil.example", "/login", "/logout", "/api/v1", "/x\n", ""]
)
def test_nobody_is_led_elsewhere(path: str) -> None:
    assert safe_next(path) == "/"


def test_where_pages_are() -> None:
    assert all(map(is_page, ("/", "/.json", "/index.json", "/profiles/x/y", "/privacy.json", "/static/0/a.js")))
    assert not any(map(is_page, ("", "//", "//privacy", "/api/v1/profiles", "/healthz", "/privacyx", "/team/privacy")))


def test_a_login_runs_out(keyring: Keyring) -> None:
    now = [0.0]
    logins = Logins(Credentials(keyring, ADMIN), clock=lambda: now[0])
    client = Client("environment", "environment", "admin")
    cookie = logins.open(client, ADMIN)
    now[0] = LIFETIME_SECONDS - 1
    assert logins.find(cookie) == client
    now[0] += 1
    assert logins.find(cookie) is None
    assert len(logins) == 0
    first = logins.open(client, ADMIN)
    for _ in range(MAX_LOGINS):
        logins.open(client, ADMIN)
    assert (logins.find(first), len(logins)) == (None, MAX_LOGINS)


def test_a_form_is_good_for_one_change() -> None:
    guard = FormGuard()
    token = guard.issue("somebody")
    guard.require(token, "somebody")
    guard.require(token, "somebody")  # a form with a mistake is sent again
    guard.spend(token)
    with pytest.raises(FormError, match="sent and done before"):
        guard.require(token, "somebody")
    with pytest.raises(FormError, match="no valid token"):
        FormGuard().require(guard.issue("somebody"), "somebody")


def test_rotating_with_grace_keeps_the_login_until_the_old_secret_ends(
    visit: Callable[..., Any], token: Callable[..., Any], keyring: Keyring
) -> None:
    token_id, text = token("read")
    visitor = visit()
    visitor.log_in(text)
    rotated, secret = keyring.rotate(token_id, TokenRotation(grace_seconds=3600), "cli")
    assert visitor.get("/").status_code == 200
    assert visit().log_in(join_token(rotated.token_id, secret)).status_code == 303
