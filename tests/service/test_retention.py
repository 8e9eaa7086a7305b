from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import duckdb
import pytest

from spark_service.db.audit import entries_after
from spark_service.db.store import Store
from spark_service.errors import StorageError
from spark_service.retention import apply_retention, overdue

TODAY = date(2026, 11, 29)


def received(store: Store, content_id: str, day: date) -> None:
    with store.writing() as cursor:
        cursor.execute("UPDATE parts SET received_day = ? WHERE content_id = ?", [day, content_id])


def count(store: Store, table: str) -> int:
    with store.reading() as cursor:
        [(rows,)] = cursor.execute(f"SELECT count(*) FROM {table}").fetchall()
    return int(rows)


@pytest.fixture
def sessions(store: Store, make: Any) -> list[Any]:
    """Eight sessions, received on as many days up to today."""
    shape = make.shape()
    made = make.sessions(shape, 4, 4, prefill=20)
    store.add_upload(make.upload(shape, made), "a", "a")
    for age, session in enumerate(made):
        received(store, session.content_id(shape.fingerprint), TODAY - timedelta(days=age))
    return list(made)


@pytest.mark.parametrize("days", range(1, 10))
def test_exactly_the_older_ones_go(store: Store, make: Any, sessions: list[Any], days: int) -> None:
    expected = {TODAY - timedelta(days=age): 1 for age in range(8) if age > days}
    assert overdue(store, days, TODAY) == expected
    assert count(store, "parts") == 8
    assert apply_retention(store, days, TODAY, "service") == expected
    kept = sessions[: days + 1]
    assert {key.session_hash for key in store.part_keys(make.fingerprint, "decode")} == {s.session_hash for s in kept}
    assert (count(store, "parts"), count(store, "histograms")) == (len(kept), 2 * len(kept))
    assert count(store, "deleted_sessions") == 0
    with store.reading() as cursor:
        entries = [entry for entry in entries_after(cursor, 0, 100).entries if entry.action == "retention.run"]
    assert [(entry.actor, entry.object, entry.detail) for entry in entries] == [
        ("service", day.isoformat(), {"removed": 1, "retention_days": days}) for day in sorted(expected)
    ]
    assert apply_retention(store, days, TODAY, "service") == {}


def test_zero_keeps_everything(store: Store, sessions: list[Any]) -> None:
    assert apply_retention(store, 0, TODAY + timedelta(days=10_000), "service") == {}
    assert count(store, "parts") == 8


def test_more_days_than_the_calendar_has(store: Store, sessions: list[Any]) -> None:
    assert apply_retention(store, 36_500, date(50, 1, 1), "service") == {}


def test_a_late_repeat_does_not_bring_it_back_but_new_counts_are_taken(
    store: Store, make: Any, sessions: list[Any]
) -> None:
    shape = make.shape()
    apply_retention(store, 3, TODAY, "service")
    for key in ("a", "b"):
        # The same bytes again, and the same histograms in another request.
        store.add_upload(make.upload(shape, sessions), key, key)
        assert count(store, "parts") == 4
    receipt = store.add_upload(make.upload(shape, [*sessions[4:], *sessions[:1]]), "c", "c")
    assert (receipt.accepted, receipt.duplicates) == (0, 5)
    # The conversation goes on: other counts under a hash that was seen before.
    more = make.session(shape, sessions[7].session_hash, seed=999)
    assert store.add_upload(make.upload(shape, [more]), "d", "d").accepted == 1
    assert count(store, "parts") == 5


def test_a_deletion_still_wins(store: Store, make: Any, sessions: list[Any]) -> None:
    apply_retention(store, 3, TODAY, "service")
    assert store.delete_session(sessions[7].session_hash) == 0
    more = make.session(make.shape(), sessions[7].session_hash, seed=999)
    assert store.add_upload(make.upload(make.shape(), [more]), "d", "d").accepted == 0


def test_a_failure_leaves_whole_days(
    store: Store, make: Any, sessions: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_service import retention

    real, calls = retention.record, 0

    def fail_at_the_third(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise duckdb.IOException("No space left on device")
        real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(retention, "record", fail_at_the_third)
        with pytest.raises(StorageError):
            apply_retention(store, 2, TODAY, "service")
    assert (count(store, "parts"), count(store, "histograms"), count(store, "expired_parts")) == (6, 12, 2)
    apply_retention(store, 2, TODAY, "service")
    assert (count(store, "parts"), count(store, "histograms"), count(store, "expired_parts")) == (3, 6, 5)
