from __future__ import annotations

import base64
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spark_service.tokens import (
    NewToken,
    Scope,
    Token,
    TokenInfo,
    TokenRequest,
    TokenRotation,
    digest,
    grant_of,
    holds,
    join_token,
    new_id,
    new_secret,
    split_token,
)

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SECONDS = st.integers(-3, 3)


def token(**changes: object) -> Token:
    fields: dict[str, object] = {
        "token_id": "0123456789ab",
        "name": "laptop",
        "scope": "read",
        "secret_sha256": digest("current"),
        "created_at": NOW,
    }
    return Token(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_secret_is_256_random_bits_that_need_no_escaping() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    for secret in secrets:
        assert len(base64.urlsafe_b64decode(secret + "=")) == 32
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", secret)


def test_what_is_joined_splits_again() -> None:
    for _ in range(100):
        token_id, secret = new_id(), new_secret()
        text = join_token(token_id, secret)
        assert text == f"spark_{token_id}_{secret}"
        assert split_token(text) == (token_id, secret)


@given(st.text(max_size=80) | st.from_regex(r"spark_[0-9a-f]{0,13}_?[A-Za-z0-9_-]{0,44}\n?", fullmatch=True))
def test_only_the_exact_form_splits(text: str) -> None:
    parts = split_token(text)
    assert (parts is not None) == bool(re.fullmatch(r"spark_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", text))
    if parts is not None:
        assert join_token(*parts) == text


@given(
    expires=st.none() | SECONDS,
    revoked=st.none() | SECONDS,
    previous_ends=st.none() | SECONDS,
    secret=st.sampled_from(["current", "previous", "other"]),
)
def test_which_secrets_open_a_token(
    expires: int | None, revoked: int | None, previous_ends: int | None, secret: str
) -> None:
    def at(seconds: int | None) -> datetime | None:
        return None if seconds is None else NOW + timedelta(seconds=seconds)

    made = token(
        expires_at=at(expires),
        revoked_at=at(revoked),
        previous_sha256=None if previous_ends is None else digest("previous"),
        previous_ends_at=at(previous_ends),
    )
    usable = revoked is None and (expires is None or expires > 0)
    in_grace = previous_ends is not None and previous_ends > 0
    assert made.usable(NOW) == usable
    assert made.admits(digest(secret), NOW) == (usable and (secret == "current" or (secret == "previous" and in_grace)))


@pytest.mark.parametrize(
    ("scopes", "grant", "held"),
    [
        (["upload"], "upload", {"upload"}),
        (["read", "read"], "read", {"read"}),
        (["read", "upload"], "upload read", {"upload", "read"}),
        (["admin"], "admin", {"upload", "read", "admin"}),
        (["admin", "read"], None, set()),
        (["upload", "root"], None, set()),
        ([], None, set()),
    ],
)
def test_grants_hold_their_scopes_and_no_other(scopes: list[str], grant: str | None, held: set[str]) -> None:
    found = grant_of(scopes)
    assert found == grant
    every: list[Scope] = ["upload", "read", "admin"]
    if found is not None:
        assert {scope for scope in every if holds(found, scope)} == held


def test_nothing_secret_is_told_but_to_the_creator() -> None:
    made = token(previous_sha256=digest("previous"), previous_ends_at=NOW)
    told = TokenInfo.of(made).model_dump_json()
    assert "sha256" not in told
    assert set(TokenInfo.model_fields) == set(TokenInfo.of(made).model_dump())
    shown = NewToken.with_secret(made, "s" * 43)
    assert shown.token == f"spark_0123456789ab_{'s' * 43}"
    assert TokenInfo.of(made).model_dump().items() <= shown.model_dump().items()
    assert TokenInfo.of(replace(made, name="")).name == ""


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"scope": "root"},
        {"scope": "read upload"},
        {"scope": "read", "name": "a" * 65},
        {"scope": "read", "name": " a"},
        {"scope": "read", "name": "a\nb"},
        {"scope": "read", "name": "ä"},
        {"scope": "read", "expires_days": 0},
        {"scope": "read", "expires_days": 3651},
        {"scope": "read", "expires_days": True},
        {"scope": "read", "expires_days": "7"},
        {"scope": "read", "days": 7},
    ],
)
def test_requests_that_are_none(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TokenRequest.model_validate(fields)


@pytest.mark.parametrize(
    "fields",
    [{"grace_seconds": -1}, {"grace_seconds": 2**40}, {"grace_seconds": 1.5}, {"expires_days": "soon"}, {"grace": 1}],
)
def test_rotations_that_are_none(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TokenRotation.model_validate(fields)
