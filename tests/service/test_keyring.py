from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import duckdb
import pytest

from spark_service.db.audit import entries_after
from spark_service.db.store import Store
from spark_service.errors import RequestError, StorageError
from spark_service.keyring import Keyring
from spark_service.tokens import Token, TokenRequest, TokenRotation, join_token

START = datetime(2026, 11, 29, 12, 0, 0, 999_999, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keyring(store: Store, clock: Clock) -> Keyring:
    return Keyring(store, clock)


def make(keyring: Keyring, **request: object) -> tuple[Token, str]:
    token, secret = keyring.create(TokenRequest.model_validate({"scope": "read", **request}), "cli")
    return token, join_token(token.token_id, secret)


def actions(store: Store) -> list[tuple[str, str, str]]:
    with store.reading() as cursor:
        return [(entry.actor, entry.action, entry.object) for entry in entries_after(cursor, 0, 1000).entries]


def test_what_is_made_opens_and_survives_a_restart(keyring: Keyring, store: Store, clock: Clock) -> None:
    token, text = make(keyring, name="laptop", expires_days=7)
    assert keyring.authenticate(text) == token
    again = Keyring(store, clock)
    assert again.tokens() == keyring.tokens() == [token]
    assert again.authenticate(text) == token
    assert token.expires_at == START.replace(microsecond=0) + timedelta(days=7)


def test_no_secret_is_at_rest(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.duckdb"
    store = Store.open(path, threads=1)
    keyring = Keyring(store, clock)
    token, text = make(keyring)
    _, secret = keyring.rotate(token.token_id, TokenRotation(grace_seconds=60), "cli")
    keyring.authenticate(join_token(token.token_id, secret))
    keyring.flush_uses()
    store.close()
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert token.token_id.encode() in kept
    for one in (text[-43:], secret):
        assert one.encode() not in kept


@pytest.mark.parametrize("change", ["id", "secret", "last letter", "nothing before", "cut"])
def test_near_misses_do_not_open(keyring: Keyring, change: str) -> None:
    token, text = make(keyring)
    other, other_text = make(keyring)
    secret, other_secret = text[-43:], other_text[-43:]
    near = {
        "id": join_token(other.token_id, secret),
        "secret": join_token(token.token_id, other_secret),
        "last letter": text[:-1] + ("A" if text[-1] != "A" else "B"),
        "nothing before": secret,
        "cut": text[:-1],
    }[change]
    assert keyring.authenticate(near) is None
    assert keyring.authenticate(text) is not None


def test_an_unknown_id_does_not_open(keyring: Keyring) -> None:
    assert keyring.authenticate(join_token("0" * 12, "a" * 43)) is None
    # Not even with what it is compared with.
    assert keyring.authenticate(join_token("", "a" * 43)) is None


def test_it_ends_when_it_expires(keyring: Keyring, clock: Clock) -> None:
    token, text = make(keyring, expires_days=1)
    assert token.expires_at is not None
    clock.now = token.expires_at - timedelta(microseconds=1)
    assert keyring.authenticate(text) is not None
    assert keyring.any_usable()
    clock.now = token.expires_at
    assert keyring.authenticate(text) is None
    assert not keyring.any_usable()
    with pytest.raises(RequestError, match="expired") as caught:
        keyring.rotate(token.token_id, TokenRotation(), "cli")
    assert (caught.value.status, caught.value.code) == (409, "token_ended")


def test_it_ends_when_it_is_revoked(keyring: Keyring, store: Store, clock: Clock) -> None:
    token, text = make(keyring)
    _, new = keyring.rotate(token.token_id, TokenRotation(grace_seconds=1000), "cli")
    revoked = keyring.revoke(token.token_id, "cli")
    assert revoked.revoked_at is not None
    for ring in (keyring, Keyring(store, clock)):
        assert ring.authenticate(text) is None
        assert ring.authenticate(join_token(token.token_id, new)) is None
    clock.now += timedelta(days=1)
    assert keyring.revoke(token.token_id, "cli") == revoked
    with pytest.raises(RequestError, match="revoked"):
        keyring.rotate(token.token_id, TokenRotation(), "cli")
    assert [action for _, action, _ in actions(store)] == ["token.create", "token.rotate", "token.revoke"]


@pytest.mark.parametrize("grace_seconds", [0, 60])
def test_a_rotation_ends_the_old_secret_after_its_grace(
    keyring: Keyring, store: Store, clock: Clock, grace_seconds: int
) -> None:
    token, old = make(keyring)
    rotated, secret = keyring.rotate(token.token_id, TokenRotation(grace_seconds=grace_seconds), "cli")
    new = join_token(token.token_id, secret)
    assert (rotated.scope, rotated.expires_at) == (token.scope, token.expires_at)
    clock.now = START.replace(microsecond=0) + timedelta(seconds=grace_seconds, microseconds=-1)
    for ring in (keyring, Keyring(store, clock)):
        assert ring.authenticate(new) is not None
        assert (ring.authenticate(old) is not None) == bool(grace_seconds)
    clock.now += timedelta(microseconds=1)
    assert keyring.authenticate(new) is not None
    assert keyring.authenticate(old) is None


def test_only_the_last_secret_before_has_a_grace(keyring: Keyring) -> None:
    token, first = make(keyring)
    grace = TokenRotation(grace_seconds=60)
    texts = [first, *(join_token(token.token_id, keyring.rotate(token.token_id, grace, "x")[1]) for _ in range(2))]
    assert [keyring.authenticate(text) is not None for text in texts] == [False, True, True]
    keyring.rotate(token.token_id, TokenRotation(), "x")
    assert [keyring.authenticate(text) for text in texts] == [None] * 3


@pytest.mark.parametrize(("expires_days", "days"), [("unchanged", 365), ("never", None), (30, 40)])
def test_a_rotation_may_move_the_end(keyring: Keyring, clock: Clock, expires_days: object, days: int | None) -> None:
    token, _ = make(keyring)
    clock.now += timedelta(days=10)
    rotated, _ = keyring.rotate(token.token_id, TokenRotation.model_validate({"expires_days": expires_days}), "cli")
    assert rotated.expires_at == (None if days is None else token.created_at + timedelta(days=days))


def test_unknown_ids(keyring: Keyring) -> None:
    for change in (
        lambda: keyring.revoke("x" * 1000, "cli"),
        lambda: keyring.rotate("x" * 1000, TokenRotation(), "cli"),
    ):
        with pytest.raises(RequestError) as caught:
            change()
        assert (caught.value.status, caught.value.code) == (404, "unknown_token")
        assert len(caught.value.message) < 200


def test_the_day_of_use_is_kept_and_the_first_use_is_recorded(keyring: Keyring, store: Store, clock: Clock) -> None:
    token, text = make(keyring)
    unused, _ = make(keyring)

    def days() -> dict[str, date | None]:
        return {one.token_id: one.last_used_day for one in Keyring(store, clock).tokens()}

    keyring.authenticate(text)
    assert days() == {token.token_id: None, unused.token_id: None}
    keyring.flush_uses()
    assert days() == {token.token_id: START.date(), unused.token_id: None}
    clock.now += timedelta(days=2)
    for _ in range(3):
        keyring.authenticate(text)
        keyring.flush_uses()
    assert days() == {token.token_id: START.date() + timedelta(days=2), unused.token_id: None}
    first_uses = [entry for entry in actions(store) if entry[1] == "token.first_use"]
    assert first_uses == [(token.token_id, "token.first_use", token.token_id)]


def test_a_change_that_cannot_be_stored_is_none(
    keyring: Keyring, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, text = make(keyring)
    keyring.authenticate(text)
    before = (keyring.tokens(), actions(store))

    def fail(*_: object) -> None:
        raise duckdb.IOException("No space left on device")

    with monkeypatch.context() as patched:
        # After the change itself: half of it is written by then.
        patched.setattr("spark_service.keyring.record", fail)
        for change in (
            lambda: make(keyring),
            lambda: keyring.revoke(token.token_id, "cli"),
            lambda: keyring.rotate(token.token_id, TokenRotation(), "cli"),
            keyring.flush_uses,
        ):
            with pytest.raises(StorageError):
                change()
    assert (keyring.tokens(), actions(store)) == before
    assert Keyring(store, clock).tokens() == before[0]
    assert keyring.authenticate(text) is not None
    keyring.flush_uses()
    assert keyring.tokens()[0].last_used_day == START.date()


def test_nobody_undoes_a_revocation_by_rotating_at_the_same_time(
    keyring: Keyring, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, _ = make(keyring)
    writing = store.writing

    with ThreadPoolExecutor(1) as pool:
        revocations = []

        @contextmanager
        def interrupted(**how: bool) -> Iterator[duckdb.DuckDBPyConnection]:
            # A revocation arrives when the rotation has read the token and has not stored it.
            monkeypatch.setattr(store, "writing", writing)
            revocations.append(pool.submit(keyring.revoke, token.token_id, "other"))
            # It must not get in between; if it can, it is done by the end of this.
            wait(revocations, timeout=0.3)
            with writing(**how) as cursor:
                yield cursor

        monkeypatch.setattr(store, "writing", interrupted)
        keyring.rotate(token.token_id, TokenRotation(grace_seconds=60), "cli")
        revocations[0].result(30)
    for ring in (keyring, Keyring(store, clock)):
        [kept] = ring.tokens()
        assert kept.revoked_at is not None
        assert not kept.usable(clock.now)
