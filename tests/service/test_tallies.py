"""What is counted, step by step, against everything counted anew."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pytest

from spark_runtime.calibration.sessions import Rows, merge_rows
from spark_runtime.calibration.tally import tally_of
from spark_schemas.split import split_of
from spark_service import session_stream
from spark_service import tallies as module
from spark_service.db.store import Store
from spark_service.db.tallies import TallyKey
from spark_service.executors import LocalExecutor
from spark_service.retention import apply_retention
from spark_service.session_stream import whole_sessions
from spark_service.tallies import Tallies


def anew(store: Store, shape: Any) -> dict[str, bytes]:
    with store.writing() as cursor:
        cursor.execute("DELETE FROM tallies")
    return now(Tallies(store, LocalExecutor(2)), shape)


def now(tallies: Tallies, shape: Any) -> dict[str, bytes]:
    return {name: counted.tally.to_bytes() for name, counted in tallies.of(shape, "decode").items()}


@pytest.mark.parametrize("seed", range(6))
def test_counting_what_is_new_gives_the_bits_of_counting_anew(
    seed: int, store: Store, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads, the same again, more of a session, deletions, a restart: in any order."""
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    monkeypatch.setattr(module, "_MOST_SINGLY", 6)
    rng = np.random.default_rng(seed)
    shape = make.shape()
    tallies = Tallies(store, LocalExecutor(2))
    for step in range(25):
        action = rng.choice(["upload", "more", "again", "delete", "restart", "look"])
        side = "held_out" if rng.random() < 0.4 else "calibration"
        numbers = rng.integers(0, 6, 1 + int(rng.integers(0, 8)))
        if action in {"upload", "more", "again"}:
            sessions = [
                make.session(
                    shape,
                    make.hash(int(number), side),
                    workload=str(rng.choice(["code", "chat"])),
                    seed=0 if action == "again" else step,
                    decode=20 + step,
                )
                for number in set(numbers.tolist())
            ]
            store.add_upload(make.upload(shape, sessions), f"{step}", f"{step}")
        elif action == "delete":
            store.delete_session(make.hash(int(numbers[0]), side))
        elif action == "restart":
            tallies = Tallies(store, LocalExecutor(1))
        else:
            now(tallies, shape)
    counted = now(tallies, shape)
    assert {name: data for name, data in counted.items() if data} == anew(store, shape)
    assert_no_session_is_on_both_sides(store, shape)


def assert_no_session_is_on_both_sides(store: Store, shape: Any) -> None:
    """From the stored rows: what calibrates and what judges are just the sessions of each side, all of their parts."""
    with store.reading() as cursor:
        rows = cursor.execute("SELECT workload, session_hash, split, content_id FROM parts").fetchall()
    assert all(split == split_of(session_hash) for _, session_hash, split, _ in rows)
    tallies = Tallies(store, LocalExecutor(1))
    for workload, one in tallies.of(shape, "decode").items():
        own = [(session_hash, content_id) for name, session_hash, _, content_id in rows if name == workload]
        for side in ("calibration", "held_out"):
            ids = [int(content_id, 16) for session_hash, content_id in own if split_of(session_hash) == side]
            assert one.tally.identity(side) == sum(ids) % 2**256  # type: ignore[arg-type]
        judges = {
            session_hash
            for batch in tallies.held_out(TallyKey(shape.fingerprint, workload, "decode"), one.number)
            for session_hash in batch.hashes
        }
        assert judges == {session_hash for session_hash, _ in own if split_of(session_hash) == "held_out"}


def test_deleting_takes_away_what_a_stored_tally_counts(store: Store, make: Any) -> None:
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape, 3, 2)), "1", "1")
    now(Tallies(store, LocalExecutor(1)), shape)
    # One more part, not counted yet, of the session that goes.
    store.add_upload(make.upload(shape, [make.session(shape, make.hash(1), seed=9)]), "2", "2")
    store.delete_session(make.hash(1))
    found = Tallies(store, LocalExecutor(1)).of(shape, "decode")["code"]
    assert found.tally.votes("calibration").n_sessions == 2
    assert found.tally.to_bytes() == anew(store, shape)["code"]


def test_a_damaged_tally_is_counted_anew(store: Store, make: Any) -> None:
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape, 2, 1)), "1", "1")
    first = now(Tallies(store, LocalExecutor(1)), shape)
    with store.writing() as cursor:
        cursor.execute("UPDATE tallies SET tally = 'nothing of the kind'::BLOB")
    assert now(Tallies(store, LocalExecutor(1)), shape) == first


def test_only_held_out_sessions_judge(store: Store, make: Any) -> None:
    shape = make.shape()
    parts = [make.session(shape, make.hash(n, "held_out"), seed=seed) for n in range(3) for seed in (1, 2)]
    store.add_upload(make.upload(shape, make.sessions(shape, 3, 0) + parts), "1", "1")
    tallies = Tallies(store, LocalExecutor(1))
    number = tallies.of(shape, "decode")["code"].number
    store.add_upload(make.upload(shape, make.sessions(shape, 0, 5)[4:]), "2", "2")
    key = TallyKey(shape.fingerprint, "code", "decode")
    batches = list(tallies.held_out(key, number))
    assert sorted(name for batch in batches for name in batch.hashes) == sorted(
        make.hash(n, "held_out") for n in range(3)
    )
    assert sum(batch.counts.sum() for batch in batches) == sum(
        sum(layer.counts) for session in parts for layer in session.decode.layers
    )


@pytest.mark.parametrize("in_memory_bytes", [0, 500, 2**26])
def test_sessions_come_whole_however_their_rows_are_spread(
    in_memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_stream, "IN_MEMORY_BYTES", in_memory_bytes)
    rng = np.random.default_rng(3)
    hashes = [f"{int(n):02x}".ljust(64, "0") for n in rng.integers(0, 40, 120)]
    rows = Rows(
        [f"{index:064x}" for index in range(120)],
        hashes,
        rng.integers(0, 9, 120),
        rng.integers(1, 500, 120),
        rng.integers(0, 50, (120, 5)) + 1,
        rng.integers(0, 50, (120, 7)),
    )
    repeated = {name for name in hashes if hashes.count(name) > 1}
    batches = [rows.take(np.arange(start, min(start + 7, 120))) for start in range(0, 120, 7)]
    found = list(whole_sessions(batches, repeated))
    names = [name for batch in found for name in batch.hashes]
    assert len(names) == len(set(names)) == len(set(hashes))
    total = tally_of((3, 2), found[0])
    for batch in found[1:]:
        total += tally_of((3, 2), batch)
    assert total.to_bytes() == tally_of((3, 2), merge_rows(rows)).to_bytes()
    assert all(batch.reuse is not None for batch in found)


def test_a_day_that_leaves_is_taken_away(store: Store, make: Any) -> None:
    """Whole sessions, and parts of sessions that stay."""
    shape, old = make.shape(), date(2026, 1, 2)
    first = make.sessions(shape, 4, 2) + make.sessions(shape, 2, 1, workload="chat")
    store.add_upload(make.upload(shape, first), "1", "1")
    with store.writing() as cursor:
        cursor.execute("UPDATE parts SET received_day = ?", [old])
    later = [make.session(shape, make.hash(n, side), seed=9) for n in range(2) for side in ("calibration", "held_out")]
    store.add_upload(make.upload(shape, later), "2", "2")
    tallies = Tallies(store, LocalExecutor(1))
    now(tallies, shape)
    # Not counted yet.
    store.add_upload(make.upload(shape, [make.session(shape, make.hash(7), seed=3)]), "3", "3")
    assert apply_retention(store, 30, date(2026, 6, 1), "cli") == {old: 9}
    counted = tallies.of(shape, "decode")
    assert counted["code"].tally.votes("calibration").n_sessions == 3
    assert counted["code"].tally.votes("held_out").n_sessions == 2
    found = now(tallies, shape)
    assert found["code"] == anew(store, shape)["code"]
    assert "chat" not in found
