from __future__ import annotations

import logging
from datetime import UTC, date, datetime, timedelta
from typing import Any

import duckdb
import pytest

from spark_service.db.drift import save_state
from spark_service.db.store import Store
from spark_service.drift import State
from spark_service.drift_watch import all_drift
from spark_service.housekeeping import Housekeeping
from spark_service.keyring import Keyring
from spark_service.tokens import TokenRequest, join_token


def parts(store: Store, make: Any) -> int:
    return len(store.part_keys(make.fingerprint, "decode"))


@pytest.fixture
def aged(store: Store, make: Any) -> date:
    """Three parts, received two days before the day returned."""
    store.add_upload(make.upload(make.shape(), make.sessions(make.shape(), 3, 0)), "a", "a")
    with store.writing() as cursor:
        cursor.execute("UPDATE parts SET received_day = ?", [date(2026, 11, 27)])
    return date(2026, 11, 29)


def test_retention_comes_once_a_day(store: Store, make: Any, aged: date) -> None:
    keeper = Housekeeping(store, Keyring(store), 2)
    keeper.work(aged)
    assert parts(store, make) == 3
    keeper.work(aged + timedelta(days=1))
    assert parts(store, make) == 0


def test_a_refusing_database_is_asked_again(
    store: Store, make: Any, aged: date, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = Keyring(store)
    token, secret = keyring.create(TokenRequest(scope="read"), "cli")
    assert keyring.authenticate(join_token(token.token_id, secret))
    keeper = Housekeeping(store, keyring, 1)

    def fail(*_: object) -> None:
        raise duckdb.IOException("No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr("spark_service.keyring.record", fail)
        patched.setattr("spark_service.retention.record", fail)
        keeper.work(aged)
    assert [entry.getMessage().split(":")[0] for entry in caplog.records] == ["last use of tokens", "retention"]
    assert parts(store, make) == 3
    keeper.work(aged)
    assert parts(store, make) == 0
    assert keyring.tokens()[0].last_used_day is not None


def test_it_works_at_once_and_stores_the_last_uses_at_the_end(store: Store, make: Any, aged: date) -> None:
    keyring, day = Keyring(store), datetime.now(UTC).date()
    token, secret = keyring.create(TokenRequest(scope="read"), "cli")
    with Housekeeping(store, keyring, 1, interval_seconds=3600):
        assert keyring.authenticate(join_token(token.token_id, secret))
    assert parts(store, make) == 0
    assert Keyring(store).tokens()[0].last_used_day in {day, datetime.now(UTC).date()}


def test_it_looks_out_for_drift_and_a_refusing_database_is_asked_again(
    store: Store, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = make.shape()
    sessions = [make.live(shape, one, profile=make.profile()) for one in make.sessions(shape, 3, 0)]
    store.add_upload(make.upload(shape, sessions), "a", "a")
    with store.writing() as cursor:
        save_state(cursor, shape.fingerprint, "code", State(state="moved", since_day=0))
    store.add_upload(make.upload(shape, make.sessions(shape, 8, 5)), "b", "b")
    keeper = Housekeeping(store, Keyring(store), 0)

    def fail(*_: object) -> None:
        raise duckdb.IOException("No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr("spark_service.drift_watch.record", fail)
        keeper.work(date(2026, 11, 29))
    assert [entry.getMessage().split(":")[0] for entry in caplog.records] == ["drift"]
    [state] = all_drift(store).workloads
    assert (state.state, state.rebuilt) == ("moved", False)
    keeper.work(date(2026, 11, 29))
    [state] = all_drift(store).workloads
    assert (state.state, state.rebuilt) == ("moved", True)
