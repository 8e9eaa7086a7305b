from __future__ import annotations

import logging
import threading
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from spark_service.db.store import Store
from spark_service.errors import StorageError
from spark_service.segment_mover import last_day_to_keep, segment_mover


def test_days_are_counted_back() -> None:
    assert last_day_to_keep(30, date(2026, 3, 1)) == date(2026, 1, 30)


def test_old_histograms_move_at_the_start(store: Store, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape, 2, 1)), "a", "a")
    old, young = (f"'{datetime.now(UTC).date() - timedelta(days=days)}'::DATE" for days in (8, 6))
    with store._database.transaction() as cursor:
        cursor.execute(f"UPDATE parts SET received_day = {young}")
        cursor.execute(f"UPDATE parts SET received_day = {old} WHERE session_hash = '{make.hash(0)}'")
    done = threading.Event()
    age_out = store.age_out

    def watched(before: date) -> int:
        moved = age_out(before)
        if not moved:
            done.set()
        return moved

    monkeypatch.setattr(store, "age_out", watched)
    with segment_mover(store, 7):
        assert done.wait(60)
    with store._database.cursor() as cursor:
        assert cursor.execute("SELECT count(*) FROM segment_rows").fetchall() == [(1,)]
        assert cursor.execute("SELECT count(*) FROM histograms").fetchall() == [(2,)]


def test_never_means_never(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Store, "age_out")
    # Of other tests some may end meanwhile.
    before = set(threading.enumerate())
    with segment_mover(store, 0):
        assert set(threading.enumerate()) <= before


def test_an_error_is_logged_and_the_next_attempt_comes(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = []
    enough = threading.Event()

    def fail(_: date) -> int:
        attempts.append(1)
        if len(attempts) == 3:
            enough.set()
        raise StorageError("disk on fire")

    monkeypatch.setattr(store, "age_out", fail)
    with caplog.at_level(logging.ERROR), segment_mover(store, 7, interval_seconds=0.001):
        assert enough.wait(60)
    assert "disk on fire" in caplog.text
