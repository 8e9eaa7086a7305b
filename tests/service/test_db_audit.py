from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_schemas.api import UploadReceipt
from spark_service.db.audit import entries_after, record, record_uploads
from spark_service.db.moments import from_utc, to_utc
from spark_service.db.store import Store


def test_an_entry_comes_back_as_it_was(store: Store) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    with store.writing() as cursor:
        record(cursor, "cli", "thing.do", "an ö'object\"", {"b": 1, "a": "x\n'", "none": None})
    with store.reading() as cursor:
        [entry] = entries_after(cursor, 0, 10).entries
    assert (entry.actor, entry.action, entry.object) == ("cli", "thing.do", "an ö'object\"")
    assert entry.detail == {"a": "x\n'", "b": 1, "none": None}
    assert before <= entry.recorded_at <= datetime.now(UTC)
    assert entry.recorded_at.microsecond == 0


def test_one_commits_uploads_are_summed_by_actor_and_model(store: Store) -> None:
    stored = [
        ("a", "mf1-1", UploadReceipt(accepted=2, duplicates=1)),
        ("b", "mf1-1", UploadReceipt(accepted=1, duplicates=0)),
        ("a", "mf1-1", UploadReceipt(accepted=0, duplicates=4)),
        ("a", "mf1-2", UploadReceipt(accepted=0, duplicates=0)),
    ]
    with store.writing() as cursor:
        record_uploads(cursor, stored)
        record_uploads(cursor, [])
    with store.reading() as cursor:
        entries = entries_after(cursor, 0, 10).entries
    assert {entry.action for entry in entries} == {"upload.accept"}
    counted = [[entry.detail[key] for key in ("uploads", "accepted", "duplicates")] for entry in entries]
    assert [(entry.actor, entry.object, *counts) for entry, counts in zip(entries, counted, strict=True)] == [
        ("a", "mf1-1", 2, 2, 5),
        ("b", "mf1-1", 1, 1, 0),
        ("a", "mf1-2", 1, 0, 0),
    ]


def test_what_is_rolled_back_is_not_recorded(store: Store) -> None:
    def fail() -> None:
        with store.writing() as cursor:
            record(cursor, "cli", "thing.do", "x", {})
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    with store.writing() as cursor:
        record(cursor, "cli", "thing.do", "y", {})
    with store.reading() as cursor:
        assert [entry.object for entry in entries_after(cursor, 0, 10).entries] == ["y"]


def test_numbers_ascend_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "a.duckdb"
    for number in range(3):
        store = Store.open(path, threads=1)
        with store.writing() as cursor:
            record(cursor, "cli", "thing.do", str(number), {})
        with store.reading() as cursor:
            page = entries_after(cursor, 0, 10)
        store.close()
    assert [entry.object for entry in page.entries] == ["0", "1", "2"]
    assert page.entries[0].entry < page.entries[1].entry < page.entries[2].entry


@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-9)), timezone(timedelta(hours=5.5))])))
def test_moments_keep_their_second(moment: datetime) -> None:
    try:
        utc = moment.astimezone(UTC)
    except OverflowError:
        return
    assert to_utc(from_utc(moment)) == utc.replace(microsecond=0)
