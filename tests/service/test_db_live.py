"""Measurements are kept with their part, and go with it."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

from spark_service.db.live import live_misses, live_parts
from spark_service.db.store import Store
from spark_service.retention import apply_retention


def kept(store: Store, fingerprint: str) -> dict[str, Any]:
    with store.reading() as cursor:
        return live_misses(cursor, fingerprint)


def test_what_was_measured_comes_back(store: Store, make: Any) -> None:
    shape = make.shape()
    first, second, third, judge = make.sessions(shape, 2, 2)
    measured = [make.live(shape, first, 0.25), make.live(shape, second, profile=make.profile("chat:2+code:1")), third]
    measured.append(make.live(shape, judge, profile=make.profile()))
    receipt = store.add_upload(make.upload(shape, measured), "key", "a")
    assert (receipt.accepted, receipt.duplicates) == (4, 0)
    assert kept(store, shape.fingerprint) == {
        one.content_id(shape.fingerprint): one.live for one in measured if one.live is not None
    }
    with store.reading() as cursor:
        rows = live_parts(cursor, shape.fingerprint, "code")
        assert len(live_parts(cursor, shape.fingerprint, "chat")) == 0
    assert (rows.hashes, rows.profile_workloads) == ((judge.session_hash,), ("code",)), "what may be published"
    assert {date(1970, 1, 1) + timedelta(days=day) for day in rows.days.tolist()} <= {
        datetime.now(UTC).date(),
        datetime.now(UTC).date() - timedelta(days=1),
    }


def test_the_same_counts_keep_their_first_measurement(store: Store, make: Any) -> None:
    shape = make.shape()
    [session] = make.sessions(shape, 1, 0)
    content_id = session.content_id(shape.fingerprint)
    store.add_upload(make.upload(shape, [make.live(shape, session, 0.25)]), "one", "a")
    receipt = store.add_upload(make.upload(shape, [make.live(shape, session, 0.5), session]), "two", "b")
    assert (receipt.accepted, receipt.duplicates) == (0, 2)
    assert kept(store, shape.fingerprint) == {content_id: make.live(shape, session, 0.25).live}


def test_they_stay_when_counts_age_and_go_with_their_session(store: Store, make: Any) -> None:
    shape = make.shape()
    sessions = [make.live(shape, one) for one in make.sessions(shape, 3, 0)]
    store.add_upload(make.upload(shape, sessions), "key", "a")
    while store.age_out(date(9999, 1, 1)):
        pass
    assert len(kept(store, shape.fingerprint)) == 3
    store.delete_session(sessions[0].session_hash)
    assert len(kept(store, shape.fingerprint)) == 2
    apply_retention(store, 1, datetime.now(UTC).date() + timedelta(days=9), "service")
    with store.reading() as cursor:
        assert cursor.execute("SELECT count(*) FROM live").fetchall() == [(0,)]
