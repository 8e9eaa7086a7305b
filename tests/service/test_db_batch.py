"""A batch is its uploads one after the other, whatever they are."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spark_schemas.api import UploadReceipt
from spark_service.db.batch import KeyedUpload, Known, StoredReceipt, plan_batch
from spark_service.db.store import Store
from spark_service.errors import RequestError
from spark_service.packed import pack_upload

NOTHING = Known({}, {}, frozenset(), frozenset())


def keyed(make: Any, shape: Any, numbers: list[int], key: str, body: str = "") -> KeyedUpload:
    sessions = [make.session(shape, make.hash(number), decode=10) for number in numbers]
    return KeyedUpload(pack_upload(make.upload(shape, sessions)), key, body or f"{shape.core_bytes}{numbers}")


def words(outcome: UploadReceipt | RequestError) -> object:
    return (outcome.status, outcome.code, outcome.message) if isinstance(outcome, RequestError) else outcome


def test_repeats_within_a_batch(make: Any) -> None:
    shape = make.shape()
    first = keyed(make, shape, [0, 1], "a")
    batch = plan_batch(
        [first, first, keyed(make, shape, [0], "a"), keyed(make, shape, [1, 2, 2], "b")],
        NOTHING,
    )
    assert [words(outcome) for outcome in batch.outcomes[::3]] == [
        UploadReceipt(accepted=2, duplicates=0),
        UploadReceipt(accepted=1, duplicates=2),
    ]
    assert batch.outcomes[1] == batch.outcomes[0]
    refused = batch.outcomes[2]
    assert isinstance(refused, RequestError)
    assert (refused.status, refused.code) == (422, "idempotency_key_reused")
    assert len(batch.sessions) == 3
    assert list(batch.receipts) == ["a", "b"]


def test_a_contradicting_model_keeps_only_its_own_upload_out(make: Any) -> None:
    shape, other = make.shape(), make.shape(core_bytes=5)
    uploads = [keyed(make, shape, [0], "a"), keyed(make, other, [1], "b"), keyed(make, shape, [2], "c")]
    batch = plan_batch(uploads, NOTHING)
    refused = batch.outcomes[1]
    assert isinstance(refused, RequestError)
    assert (refused.status, refused.code, refused.field) == (409, "model_mismatch", "model.core_bytes")
    assert list(batch.receipts) == ["a", "c"]
    assert list(batch.models.values()) == [shape]
    # Against what is stored, too; and a refused upload does not use up its key.
    known = Known({}, {shape.fingerprint: shape}, frozenset(), frozenset())
    batch = plan_batch([uploads[1], keyed(make, shape, [1], "b")], known)
    assert [isinstance(outcome, RequestError) for outcome in batch.outcomes] == [True, False]
    assert not batch.models


def test_what_is_known_is_left_alone(make: Any) -> None:
    shape = make.shape()
    upload = keyed(make, shape, [0, 1, 2], "a", "body")
    ids = [session.content_id for session in upload.upload.sessions]
    receipt = UploadReceipt(accepted=7, duplicates=0)
    known = Known({"z": StoredReceipt("body", receipt)}, {}, {ids[0]}, {make.hash(1)})
    batch = plan_batch([upload, KeyedUpload(upload.upload, "z", "body")], known)
    assert batch.outcomes == [UploadReceipt(accepted=1, duplicates=2), receipt]
    assert list(batch.sessions) == [ids[2]]
    assert list(batch.receipts) == ["a"]


@settings(deadline=None, derandomize=True, max_examples=15)
@given(data=st.data())
def test_any_partition_into_batches_gives_the_same(make: Any, data: st.DataObject) -> None:
    """The real store: uploads one by one against the same uploads in batches, with deletions between them."""
    shapes = [make.shape([(4, 1, 1)]), make.shape([(4, 1, 1)], core_bytes=5), make.shape([(4, 1, 1)], name="other")]
    step = st.tuples(
        st.sampled_from(shapes),
        st.lists(st.integers(0, 4), min_size=1, max_size=3),
        st.sampled_from("abcdef"),
        st.booleans(),
    )
    steps = data.draw(st.lists(step | st.integers(0, 4), min_size=1, max_size=10))
    with tempfile.TemporaryDirectory() as folder:
        single = Store.open(Path(folder) / "single.duckdb", memory="256MB", threads=1)
        batched = Store.open(Path(folder) / "batched.duckdb", memory="256MB", threads=1)
        try:
            waiting: list[KeyedUpload] = []
            expected: list[object] = []

            def commit() -> None:
                assert [words(outcome) for outcome in batched.add_batch(waiting)] == expected
                waiting.clear()
                expected.clear()

            for one in steps:
                if isinstance(one, int):
                    commit()
                    assert single.delete_session(make.hash(one)) == batched.delete_session(make.hash(one))
                    continue
                shape, numbers, key, now = one
                upload = keyed(make, shape, numbers, key)
                waiting.append(upload)
                expected += [words(outcome) for outcome in single.add_batch([upload])]
                if now:
                    commit()
            commit()
            tables = ("models", "parts", "histograms", "uploads", "deleted_sessions")
            for table in tables:
                rows = []
                for store in (single, batched):
                    with store._database.cursor() as cursor:
                        rows.append(sorted(map(repr, cursor.execute(f"SELECT * FROM {table}").fetchall())))
                assert rows[0] == rows[1], table
        finally:
            single.close()
            batched.close()
