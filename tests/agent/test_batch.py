from __future__ import annotations

import sqlite3

from spark_agent.batch import Batch, Unreadable, build_batches, plan
from spark_agent.spool import Spool
from spark_schemas.histogram import MAX_SESSIONS_PER_UPLOAD, HistogramUpload
from spark_schemas.invariants import check_upload


def batches(spool: Spool, minimum: int = 0, **options: int) -> list[Batch]:
    found = list(build_batches(spool, plan(spool.pending(), minimum)[0], **options))
    assert all(isinstance(item, Batch) for item in found)
    return [item for item in found if isinstance(item, Batch)]


def test_one_model_per_request_and_bounded(spool: Spool, make_model, make_session):
    models = [make_model(seed) for seed in (0, 1)]
    for model in models:
        for seed in range(3):
            spool.add(model, make_session(model, seed))
    found = batches(spool)
    assert sorted(batch.model.fingerprint for batch in found) == sorted(model.fingerprint for model in models)
    assert {len(batch.sessions) for batch in found} == {3}
    limit = min(len(batch.body()) for batch in found) - 1
    assert [len(batch.sessions) for batch in batches(spool, max_body_bytes=limit)] == [2, 1, 2, 1]
    assert all(len(batch.body()) <= limit for batch in batches(spool, max_body_bytes=limit))
    # A histogram larger than the limit still travels, alone.
    assert [len(batch.sessions) for batch in batches(spool, max_body_bytes=10)] == [1] * 6
    for batch in found:
        check_upload(HistogramUpload.model_validate_json(batch.body()))


def test_no_more_sessions_than_the_service_takes(spool: Spool, make_model, make_session):
    model = make_model()
    session = make_session(model)
    for number in range(MAX_SESSIONS_PER_UPLOAD + 1):
        spool.add(model, session.model_copy(update={"workload": f"w{number}"}))
    assert [len(batch.sessions) for batch in batches(spool)] == [MAX_SESSIONS_PER_UPLOAD, 1]


def test_sealing_changes_no_byte(spool: Spool, make_model, make_session):
    model = make_model()
    for seed in range(12):
        spool.add(model, make_session(model, seed))
    before = [batch.body() for batch in batches(spool, 120)]
    spool.seal(lambda rows: [parcel.rows for parcel in plan(rows, 120)[0]])
    assert [batch.body() for batch in batches(spool, 120)] == before
    # New rows make new parcels; sealed ones stay.
    sealed = {session for batch in batches(spool, 120) for session in batch.sessions}
    for seed in range(12, 20):
        spool.add(model, make_session(model, seed))
    assert sealed < {session for batch in batches(spool, 120) for session in batch.sessions}


def test_a_higher_minimum_holds_sealed_parcels_back(spool: Spool, make_model, make_session):
    model = make_model()
    spool.add(model, make_session(model))
    spool.seal(lambda rows: [parcel.rows for parcel in plan(rows, 10)[0]])
    assert plan(spool.pending(), 2000) == ([], spool.pending())
    assert len(plan(spool.pending(), 10)[0]) == 1


def test_rows_that_vanish_or_break_meanwhile(spool: Spool, make_model, make_session):
    model = make_model()
    for seed in range(3):
        spool.add(model, make_session(model, seed))
    parcels, _ = plan(spool.pending(), 0)
    spool.mark_uploaded(parcels[0].ids)
    connection = sqlite3.connect(spool.path)
    with connection:
        connection.execute("UPDATE sessions SET body = '{}' WHERE id = ?", parcels[1].ids)
    connection.close()
    unreadable, batch = build_batches(spool, parcels)
    assert isinstance(unreadable, Unreadable)
    assert unreadable.ids == parcels[1].ids
    assert "cannot be read" in unreadable.reason
    assert isinstance(batch, Batch)
    assert batch.ids == parcels[2].ids


def test_a_request_does_not_tell_in_which_order_sessions_were(spool: Spool, make_model, make_session):
    model = make_model()
    for seed in range(20):
        assert spool.add(model, make_session(model, seed))
    (batch,) = build_batches(spool, plan(spool.pending(), 1)[0])
    assert isinstance(batch, Batch)
    hashes = [session.session_hash for session in batch.sessions]
    assert hashes == sorted(hashes)
    assert [parcel.rows[0].session_hash for parcel in batch.parcels] == hashes
    assert list(batch.ids) != sorted(batch.ids)
