from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_schemas.histogram import HistogramUpload, LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.ids import MAX_COUNT
from spark_schemas.invariants import check_upload
from spark_schemas.split import split_of
from spark_service.db.batch import KeyedUpload
from spark_service.db.connection import Database
from spark_service.db.migrate import available, migrate
from spark_service.db.store import Store
from spark_service.errors import RequestError, SparkServiceError
from spark_service.packed import pack_upload


def add(store: Store, upload: HistogramUpload, key: str = "key-1", body: str = "") -> tuple[int, int]:
    receipt = store.add_upload(upload, key, body or key)
    return receipt.accepted, receipt.duplicates


def rows(store: Store, query: str) -> list[tuple[Any, ...]]:
    with store._database.cursor() as cursor:
        return cursor.execute(query).fetchall()


def test_counts_come_back_as_they_were(store: Store, make: Any) -> None:
    shape = make.shape()
    sessions = make.sessions(shape, 2, 1, prefill=30)
    assert add(store, make.upload(shape, sessions)) == (3, 0)
    for phase in ("prefill", "decode"):
        stored = store.parts([key.content_id for key in store.part_keys(shape.fingerprint, phase)], phase)
        expected = sorted(make.parts(shape, sessions, phase), key=lambda part: part.content_id)
        assert [part.content_id for part in stored] == [part.content_id for part in expected]
        for one, other in zip(stored, expected, strict=True):
            assert (one.workload, one.session_hash, one.tokens) == (other.workload, other.session_hash, other.tokens)
            assert (one.reuse is None) == (phase == "prefill")
            for got, sent in zip((*one.counts, *(one.reuse or ())), (*other.counts, *(other.reuse or ())), strict=True):
                assert got.dtype == np.int64
                np.testing.assert_array_equal(got, sent)
    assert store.model(shape.fingerprint) == shape
    assert store.workloads(shape.fingerprint) == ["code"]


def test_the_largest_legal_counts_are_kept(store: Store, make: Any) -> None:
    shape = make.shape([(2, 2, 1)])
    session_hash = make.hash(0)
    counts = (MAX_COUNT, MAX_COUNT)
    session = SessionHistogram(
        session_hash=session_hash,
        split=split_of(session_hash),
        workload="code",
        decode=PhaseHistogram(tokens=MAX_COUNT, layers=(LayerCounts(block=1, tokens=MAX_COUNT, counts=counts),)),
        reuse=(LayerReuse(block=1, distances=(MAX_COUNT, MAX_COUNT - 2, 2)),),
    )
    upload = make.upload(shape, [session])
    check_upload(upload)
    add(store, upload)
    [part] = store.parts([session.content_id(shape.fingerprint)], "decode")
    assert part.tokens == MAX_COUNT
    assert part.counts[0].tolist() == list(counts)
    assert part.reuse is not None
    assert part.reuse[0].tolist() == [MAX_COUNT, MAX_COUNT - 2, 2]


def test_the_same_key_and_body_give_the_same_receipt(store: Store, make: Any) -> None:
    shape = make.shape()
    upload = make.upload(shape, make.sessions(shape, 2, 0))
    assert add(store, upload) == (2, 0)
    assert add(store, upload) == (2, 0)
    assert rows(store, "SELECT count(*) FROM histograms") == [(2,)]


def test_the_same_key_with_another_body_is_refused(store: Store, make: Any) -> None:
    shape = make.shape()
    upload = make.upload(shape, make.sessions(shape, 1, 0))
    add(store, upload)
    with pytest.raises(RequestError) as caught:
        add(store, upload, body="other")
    assert (caught.value.status, caught.value.code) == (422, "idempotency_key_reused")


def test_the_same_counts_under_another_key_are_duplicates(store: Store, make: Any) -> None:
    shape = make.shape()
    sessions = make.sessions(shape, 2, 1)
    add(store, make.upload(shape, sessions[:2]))
    assert add(store, make.upload(shape, sessions), "key-2") == (1, 2)
    assert add(store, make.upload(shape, [sessions[0]] * 3), "key-3") == (0, 3)
    assert rows(store, "SELECT count(*), count(DISTINCT content_id) FROM histograms") == [(3, 3)]


def test_the_same_counts_twice_in_one_upload_are_one(store: Store, make: Any) -> None:
    shape = make.shape()
    session = make.session(shape, make.hash(0))
    assert add(store, make.upload(shape, [session, session])) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"context_length": 8192}, "model.context_length"),
        ({"core_bytes": 1001}, "model.core_bytes"),
        ({"layers": [(12, 2, 100), (16, 2, 101), (8, 1, 50)]}, "model.layers[1].expert_bytes"),
        ({"layers": [(12, 2, 100), (16, 2, 100)], "n_blocks": 4}, "model.layers"),
    ],
)
def test_another_shape_under_a_known_fingerprint_is_refused(
    store: Store, make: Any, changes: dict[str, Any], field: str
) -> None:
    shape, other = make.shape(), make.shape(**changes)
    add(store, make.upload(shape, make.sessions(shape, 1, 0)))
    with pytest.raises(RequestError) as caught:
        add(store, make.upload(other, make.sessions(other, 2, 0, decode=50)), "key-2")
    assert (caught.value.status, caught.value.code, caught.value.field) == (409, "model_mismatch", field)
    assert store.model(shape.fingerprint) == shape
    assert rows(store, "SELECT count(*) FROM parts") == [(1,)]
    assert rows(store, "SELECT idempotency_key FROM uploads") == [("key-1",)]


def test_a_models_name_is_only_a_label(store: Store, make: Any) -> None:
    shape, renamed = make.shape(), make.shape(name="other")
    add(store, make.upload(shape, make.sessions(shape, 1, 0)))
    assert add(store, make.upload(renamed, make.sessions(shape, 1, 0)), "key-2") == (0, 1)


def test_a_deleted_session_stays_away(store: Store, make: Any) -> None:
    shape = make.shape()
    session_hash = make.hash(0)
    parts = [make.session(shape, session_hash, seed=seed) for seed in range(2)]
    elsewhere = make.session(shape, session_hash, workload="chat")
    kept = make.session(shape, make.hash(1))
    add(store, make.upload(shape, [*parts, elsewhere, kept]))
    assert store.delete_session(session_hash) == 3
    assert store.delete_session(session_hash) == 0
    assert [key.session_hash for key in store.part_keys(shape.fingerprint, "decode")] == [kept.session_hash]
    assert rows(store, "SELECT count(*) FROM histograms") == [(1,)]
    assert store.workloads(shape.fingerprint) == ["code"]
    assert add(store, make.upload(shape, parts), "key-2") == (0, 2)
    assert add(store, make.upload(shape, [make.session(shape, session_hash, seed=9)]), "key-3") == (0, 1)


def test_no_session_is_ever_on_both_sides(store: Store, make: Any) -> None:
    """From the stored rows, after uploads, repeats, parts, another workload and deletions."""
    shape = make.shape()
    sessions = make.sessions(shape, 4, 3)
    more_parts = make.sessions(shape, 4, 3, decode=77)
    elsewhere = make.sessions(shape, 4, 3, workload="chat")

    def check() -> None:
        sides = rows(store, "SELECT session_hash, list(DISTINCT split) FROM parts GROUP BY session_hash")
        assert sides
        for session_hash, splits in sides:
            assert splits == [split_of(session_hash)]

    for number, batch in enumerate((sessions, more_parts, elsewhere, sessions[:3] + elsewhere[:2])):
        add(store, make.upload(shape, batch), f"key-{number}")
        check()
    for session in (sessions[0], sessions[-1]):
        store.delete_session(session.session_hash)
        check()
    add(store, make.upload(shape, sessions), "again")
    check()
    assert rows(store, "SELECT count(DISTINCT session_hash), count(*) FROM parts") == [(5, 15)]


def test_siblings_are_those_with_sessions(store: Store, make: Any) -> None:
    first = make.shape()
    second = make.shape(fingerprint="mf1-" + "0" * 31 + "2")
    add(store, make.upload(first, make.sessions(first, 1, 0)))
    add(store, make.upload(second, make.sessions(second, 1, 0, workload="chat")), "key-2")
    assert store.siblings(first.sibling) == [first.fingerprint, second.fingerprint]
    assert store.siblings(first.sibling, "chat") == [second.fingerprint]
    assert store.siblings("ms1-" + "f" * 32) == []


def test_an_upload_that_fails_leaves_nothing(store: Store, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = make.shape()
    upload = make.upload(shape, make.sessions(shape, 2, 0))

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("spark_service.db.store.histograms_table", fail)
        with pytest.raises(MemoryError):
            store.add_upload(upload, "key-1", "key-1")
    assert rows(store, "SELECT (SELECT count(*) FROM parts), (SELECT count(*) FROM models)") == [(0, 0)]
    assert add(store, upload) == (2, 0)


def test_a_failing_open_lets_go_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise SparkServiceError("no")

    with monkeypatch.context() as patched:
        patched.setattr("spark_service.db.store.migrate", fail)
        with pytest.raises(SparkServiceError):
            Store.open(tmp_path / "a.duckdb")
    Store.open(tmp_path / "a.duckdb", threads=1).close()


def test_ready_once_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("spark_service.db.store.migrate", lambda _: ())
        unmigrated = Store.open(tmp_path / "a.duckdb")
    with pytest.raises(SparkServiceError, match="migrations missing: 0001_histograms"):
        unmigrated.require_ready()
    unmigrated.close()
    migrated = Store.open(tmp_path / "a.duckdb")
    migrated.require_ready()
    migrated.close()


def test_many_threads_write_and_read(store: Store, make: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    shape = make.shape([(4, 1, 1)])
    uploads = [make.upload(shape, [make.session(shape, make.hash(number), decode=10)]) for number in range(8)]
    send: Callable[[int], tuple[int, int]] = lambda number: add(store, uploads[number % 8], f"key-{number}")  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        receipts = list(pool.map(send, range(24)))
    assert sum(accepted for accepted, _ in receipts) == 8
    assert len(store.part_keys(shape.fingerprint, "decode")) == 8


def test_submitted_uploads_are_committed_before_the_database_closes(tmp_path: Path, make: Any) -> None:
    shape = make.shape([(4, 1, 1)])
    opened = Store.open(tmp_path / "a.duckdb", threads=1)
    uploads = [make.upload(shape, [make.session(shape, make.hash(number), decode=10)]) for number in range(5)]
    futures = [
        opened.submit_upload(KeyedUpload(pack_upload(upload), str(number), str(number)))
        for number, upload in enumerate(uploads)
    ]
    opened.close()
    assert [future.result(0).accepted for future in futures] == [1] * 5
    reopened = Store.open(tmp_path / "a.duckdb", threads=1)
    assert len(reopened.part_keys(shape.fingerprint, "decode")) == 5
    reopened.close()


def test_counts_from_before_they_were_packed_are_moved_over(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "a.duckdb"
    shape = make.shape()
    sessions = make.sessions(shape, 2, 1, prefill=30)
    database = Database(path, threads=1)
    migrate(database, available()[:1])
    with database.transaction() as cursor:
        cursor.execute("INSERT INTO models VALUES (?, ?, ?)", [shape.fingerprint, shape.sibling, "{}"])
        for session in sessions:
            content_id = session.content_id(shape.fingerprint)
            cursor.execute(
                "INSERT INTO parts (content_id, fingerprint, workload, session_hash, split) VALUES (?, ?, ?, ?, ?)",
                [content_id, shape.fingerprint, session.workload, session.session_hash, session.split],
            )
            for phase, part in (("prefill", session.prefill), ("decode", session.decode)):
                reuse = [count for layer in session.reuse for count in layer.distances] if phase == "decode" else None
                cursor.execute(
                    "INSERT INTO histograms VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [
                        content_id,
                        phase,
                        part.tokens,
                        [layer.block for layer in part.layers],
                        [len(layer.counts) for layer in part.layers],
                        [layer.tokens for layer in part.layers],
                        [count for layer in part.layers for count in layer.counts],
                        reuse,
                    ],
                )
    database.close()
    for _ in range(2):
        moved = Store.open(path, threads=1)
        for phase in ("prefill", "decode"):
            stored = moved.parts([key.content_id for key in moved.part_keys(shape.fingerprint, phase)], phase)
            expected = sorted(make.parts(shape, sessions, phase), key=lambda part: part.content_id)
            assert [repr(part) for part in stored] == [repr(part) for part in expected]
        assert rows(moved, "SELECT count(*) FROM histograms") == [(6,)]
        moved.close()


def test_every_write_raises_the_generation_before_it_is_acknowledged(store: Store, make: Any) -> None:
    shape = make.shape()
    seen = [store.generation]

    def rose() -> bool:
        seen.append(store.generation)
        return seen[-1] > seen[-2]

    upload = make.upload(shape, make.sessions(shape, 2, 1))
    store.add_upload(upload, "a", "a")
    assert rose()
    store.delete_session(make.hash(0))
    assert rose()
    # What a refused write left is for the database to say: readers look again.
    with pytest.raises(RequestError):
        store.add_upload(upload, "a", "another body")
    assert rose()
    store.part_keys(shape.fingerprint, "decode")
    store.workloads(shape.fingerprint)
    with store.reading() as cursor:
        cursor.execute("SELECT 1").fetchall()
    with store.writing(counted=False):
        pass
    assert not rose()
    with store.writing():
        assert not rose(), "not before the end"
    assert rose()
