"""Histograms that age out of the database: read as before, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_service.db import aging
from spark_service.db.store import Store
from spark_service.errors import StorageError
from spark_service.executors import LocalExecutor
from spark_service.tallies import Tallies

FUTURE = datetime.now(UTC).date() + timedelta(days=2)
"""After every day of receipt, whatever the database's time zone."""
PHASES: list[Any] = ["prefill", "decode"]


def content(store: Store, fingerprint: str) -> dict[str, list[str]]:
    """All that the store gives back, as text."""
    found = {}
    for phase in PHASES:
        keys = store.part_keys(fingerprint, phase)
        parts = store.parts([key.content_id for key in keys], phase)
        assert [part.content_id for part in parts] == [key.content_id for key in keys]
        found[phase] = [repr(part) for part in parts]
    return found


def rows(store: Store, query: str) -> list[tuple[Any, ...]]:
    with store._database.cursor() as cursor:
        return cursor.execute(query).fetchall()


def age_all(store: Store) -> int:
    total = 0
    while moved := store.age_out(FUTURE):
        total += moved
    return total


def files(store: Store) -> list[str]:
    path = store._segments.path
    return sorted(file.name for file in path.iterdir()) if path.exists() else []


def registered(store: Store) -> list[str]:
    return [name for (name,) in rows(store, "SELECT name FROM segments ORDER BY name")]


@pytest.fixture
def filled(store: Store, make: Any, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(aging, "ROWS_PER_SEGMENT", 4)
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape, 5, 3, prefill=20)), "a", "a")
    other = make.shape(fingerprint="mf1-" + "0" * 31 + "2")
    store.add_upload(make.upload(other, make.sessions(other, 2, 1)), "b", "b")
    return store


def test_aged_histograms_are_read_as_before(filled: Store, make: Any) -> None:
    shape = make.shape()
    before = content(filled, shape.fingerprint)
    assert filled.age_out(date(2020, 1, 1)) == 0
    assert filled.age_out(FUTURE) == 4
    assert content(filled, shape.fingerprint) == before
    assert age_all(filled) == 2 * 8 + 3 - 4
    assert rows(filled, "SELECT count(*) FROM histograms") == [(0,)]
    assert rows(filled, "SELECT sum(n_rows) FROM segments") == [(19,)]
    assert content(filled, shape.fingerprint) == before
    assert files(filled) == registered(filled)
    # Sent again, they are known; new ones join them.
    sessions = make.sessions(shape, 6, 3, prefill=20)
    receipt = filled.add_upload(make.upload(shape, sessions), "c", "c")
    assert (receipt.accepted, receipt.duplicates) == (1, 8)
    assert len(content(filled, shape.fingerprint)["decode"]) == 9


def test_deletion_reaches_segments(filled: Store, make: Any) -> None:
    shape = make.shape()
    before = content(filled, shape.fingerprint)
    age_all(filled)
    for session_hash in (make.hash(0), make.hash(1), make.hash(0, "held_out")):
        # One part of each model.
        assert filled.delete_session(session_hash) == 2
        assert filled.delete_session(session_hash) == 0
        kept = content(filled, shape.fingerprint)
        for phase in PHASES:
            before[phase] = [text for text in before[phase] if session_hash not in text]
            assert kept[phase] == before[phase]
        assert files(filled) == registered(filled)
        assert rows(filled, "SELECT sum(n_rows) FROM segments") == rows(filled, "SELECT count(*) FROM segment_rows")
        for name in files(filled):
            with filled._segments.open(name) as segment:
                table = pa.concat_tables(segment.tables())
            known = rows(filled, f"SELECT content_id FROM segment_rows WHERE segment = '{name}' ORDER BY content_id")
            assert [(found,) for found in table["content_id"].to_pylist()] == known
    for side, count in (("calibration", 5), ("held_out", 3)):
        for index in range(count):
            filled.delete_session(make.hash(index, side))
    assert files(filled) == registered(filled) == []
    assert rows(filled, "SELECT count(*) FROM segment_rows") == [(0,)]


def test_a_day_can_be_taken_out_too(filled: Store, make: Any) -> None:
    age_all(filled)
    day = date(2020, 1, 1)
    chosen = sorted(key.content_id for key in filled.part_keys(make.fingerprint, "decode"))[2:5]
    database, folder = filled._database, filled._segments
    with database.transaction() as cursor:
        cursor.execute("UPDATE parts SET received_day = ? WHERE content_id IN ?", [day, chosen])
    rewritten = aging.rewrite_without(database, folder, "received_day", day)
    assert rewritten
    with database.transaction() as cursor:
        aging.take_out(cursor, "received_day", day, rewritten)
        cursor.execute("DELETE FROM parts WHERE received_day = ?", [day])
    for file in rewritten:
        folder.remove(file.old)
    assert files(filled) == registered(filled)
    for phase in PHASES:
        assert not {key.content_id for key in filled.part_keys(make.fingerprint, phase)} & set(chosen)
    assert len(content(filled, make.fingerprint)["decode"]) == 5


def tallied(store: Store, shape: Any) -> dict[str, bytes]:
    with store.writing() as cursor:
        cursor.execute("DELETE FROM tallies")
    counted = {phase: Tallies(store, LocalExecutor(1)).of(shape, phase) for phase in PHASES}
    return {f"{phase} {name}": one.tally.to_bytes() for phase in PHASES for name, one in counted[phase].items()}


def test_tallies_count_what_has_aged_out(filled: Store, make: Any) -> None:
    """Read whole, in part, and taken away."""
    shape = make.shape()
    expected = tallied(filled, shape)
    assert age_all(filled)
    assert tallied(filled, shape) == expected
    again = [make.session(shape, make.hash(index), seed=70 + index, prefill=9) for index in (1, 2)]
    filled.add_upload(make.upload(shape, again), "more", "more")
    updated = {phase: Tallies(filled, LocalExecutor(1)).of(shape, phase) for phase in PHASES}
    assert {f"{p} {n}": c.tally.to_bytes() for p in PHASES for n, c in updated[p].items()} == tallied(filled, shape)
    filled.delete_session(make.hash(2))
    left = {phase: Tallies(filled, LocalExecutor(1)).of(shape, phase) for phase in PHASES}
    assert {f"{p} {n}": c.tally.to_bytes() for p in PHASES for n, c in left[p].items()} == tallied(filled, shape)


def test_a_deletion_while_segments_are_counted(filled: Store, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = make.shape()
    age_all(filled)
    opened, folder = [], filled.segments
    real = type(folder).open

    def delete_first(self: Any, name: str) -> Any:
        opened.append(name)
        if len(opened) == 1:
            filled.delete_session(make.hash(0))
        return real(self, name)

    monkeypatch.setattr(type(folder), "open", delete_first)
    found = {name: one.tally.to_bytes() for name, one in Tallies(filled, LocalExecutor(1)).of(shape, "decode").items()}
    monkeypatch.undo()
    assert found == {
        name.split()[1]: data for name, data in tallied(filled, shape).items() if name.startswith("decode")
    }


def test_a_deletion_while_a_segment_is_written_wins(filled: Store, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write = filled._segments.write

    def write_and_delete(tables: Any, schema: Any) -> Any:
        done = write(tables, schema)
        filled.delete_session(make.hash(0))
        return done

    with monkeypatch.context() as patched:
        patched.setattr(filled._segments, "write", write_and_delete)
        filled.age_out(FUTURE)
    monkeypatch.undo()
    age_all(filled)
    assert files(filled) == registered(filled)
    assert make.hash(0) not in {key.session_hash for key in filled.part_keys(make.fingerprint, "decode")}
    assert len(content(filled, make.fingerprint)["prefill"]) == 7


@pytest.mark.parametrize("where", ["_register", "take_out"])
def test_an_error_on_the_way_changes_nothing(
    filled: Store, make: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = content(filled, make.fingerprint)

    def fail(*_: object) -> None:
        raise StorageError("no")

    if where == "take_out":
        age_all(filled)
        monkeypatch.setattr("spark_service.db.removal.take_out", fail)
        with pytest.raises(StorageError):
            filled.delete_session(make.hash(0))
    else:
        monkeypatch.setattr(aging, where, fail)
        with pytest.raises(StorageError):
            filled.age_out(FUTURE)
    assert content(filled, make.fingerprint) == before
    assert set(files(filled)) > set(registered(filled))
    assert filled.sweep_segments()
    assert files(filled) == registered(filled)
    assert content(filled, make.fingerprint) == before


def test_a_missing_segment_is_named(filled: Store, make: Any) -> None:
    age_all(filled)
    name = files(filled)[0]
    filled._segments.remove(name)
    [(fingerprint, phase)] = rows(filled, f"SELECT fingerprint, phase FROM segments WHERE name = '{name}'")
    with pytest.raises(StorageError, match=name):
        Tallies(filled, LocalExecutor(1)).of(make.shape(fingerprint=fingerprint), phase)


KILLED = """
import os, signal, sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from spark_service.db import aging
from spark_service.db.store import Store

aging.ROWS_PER_SEGMENT = 4
target, action = sys.argv[2], sys.argv[3]
store = Store.open(Path(sys.argv[1]), threads=1)
countdown = int(sys.argv[4])

def tracer(frame, event, argument):
    global countdown
    if Path(frame.f_code.co_filename).name in ("aging.py", "segments.py", "removal.py", "store.py", "connection.py"):
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return tracer

sys.settrace(tracer)
if action == "age":
    while store.age_out(datetime.now(UTC).date() + timedelta(days=2)):
        pass
else:
    store.delete_session(target)
sys.settrace(None)
os._exit(7)
"""


@settings(deadline=None, derandomize=True, max_examples=12)
@given(lines=st.integers(1, 400), action=st.sampled_from(["age", "delete"]))
def test_a_kill_at_any_line_loses_and_doubles_nothing(make: Any, lines: int, action: str) -> None:
    shape = make.shape([(4, 1, 1)])
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.duckdb"
        store = Store.open(path, threads=1)
        store.add_upload(make.upload(shape, make.sessions(shape, 4, 2, decode=10, prefill=5)), "a", "a")
        if action == "delete":
            age_all(store)
        before = content(store, shape.fingerprint)
        store.close()
        command = [sys.executable, "-c", KILLED, str(path), make.hash(0), action, str(lines)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ))
        assert done.returncode in (-signal.SIGKILL, 7), done.stderr
        store = Store.open(path, threads=1)
        try:
            without = {phase: [text for text in before[phase] if make.hash(0) not in text] for phase in PHASES}
            after = content(store, shape.fingerprint)
            # All of a deletion or nothing; of a move, nothing shows.
            assert after == before or (action == "delete" and after == without)
            assert files(store) == registered(store)
            stored = rows(
                store, "SELECT content_id, phase FROM histograms UNION ALL SELECT content_id, phase FROM segment_rows"
            )
            assert len(stored) == len(set(stored)) == len(after["prefill"]) + len(after["decode"])
        finally:
            store.close()
