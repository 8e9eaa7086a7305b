from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spark_agent.errors import SpoolError, SpoolFullError
from spark_agent.recorded import stretches
from spark_agent.spool import Spool
from spark_agent.spool_file import SCHEMA_VERSION
from spark_schemas.histogram import SessionHistogram
from spark_schemas.invariants import InvariantError


def test_a_row_is_kept_once(spool: Spool, make_model, make_session):
    model, session = make_model(), make_session(make_model())
    assert spool.add(model, session)
    assert not spool.add(model, session)
    [row] = spool.pending()
    assert (row.content_id, row.fingerprint) == (session.content_id(model.fingerprint), model.fingerprint)
    assert (row.tokens, row.parcel, row.attempts, row.last_error) == (50, None, 0, None)
    assert len(row.created_day) == len("2026-11-29")
    [body] = spool.bodies([row.id]) or []
    assert SessionHistogram.model_validate_json(body) == session
    assert spool.model(model.fingerprint) == model
    assert spool.stats().bytes == row.bytes == len(body)


def test_the_same_counts_of_another_model_are_another_row(spool: Spool, make_model, make_session):
    assert spool.add(make_model(), make_session(make_model()))
    assert spool.add(make_model(1), make_session(make_model()))


def test_untrue_counts_are_not_kept(spool: Spool, make_model, make_session):
    session = make_session(make_model())
    other_side = "held_out" if session.split == "calibration" else "calibration"
    with pytest.raises(InvariantError, match="split"):
        spool.add(make_model(), session.model_copy(update={"split": other_side}))
    assert spool.pending() == []


def test_uploaded_and_rejected_rows_do_not_come_back(spool: Spool, make_model, make_session):
    model = make_model()
    sessions = [make_session(model, seed) for seed in range(3)]
    for session in sessions:
        spool.add(model, session)
    first, second, third = spool.pending()
    spool.mark_failed([third.id], "no route", next_try=123.0)
    assert spool.stats().last_error == "no route"
    [failed] = [row for row in spool.pending() if row.attempts]
    assert (failed.id, failed.attempts, failed.next_try, failed.last_error) == (third.id, 1, 123.0, "no route")
    spool.mark_rejected([second.id], "does not add up")
    assert [(row.content_id, row.reason) for row in spool.rejected()] == [(second.content_id, "does not add up")]
    spool.mark_uploaded([first.id])
    assert not any(spool.add(model, session) for session in sessions)
    stats = spool.stats()
    assert (stats.pending, stats.rejected, stats.dropped, stats.last_error) == (1, 1, 0, None)


def test_uploaded_ids_are_bounded(spool: Spool, make_model, make_session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spark_agent.spool.UPLOADED_IDS_KEPT", 2)
    model = make_model()
    for seed in range(4):
        spool.add(model, make_session(model, seed))
        spool.mark_uploaded([row.id for row in spool.pending()])
    assert [spool.add(model, make_session(model, seed)) for seed in range(4)] == [True, True, False, False]


def test_ids_are_never_used_again(spool: Spool, make_model, make_session):
    model = make_model()
    spool.add(model, make_session(model, 0))
    [first] = spool.pending()
    spool.mark_uploaded([first.id])
    spool.add(model, make_session(model, 1))
    spool.mark_uploaded([first.id])  # Late, from another process.
    assert [row.id for row in spool.pending()] == [first.id + 1]
    assert spool.bodies([first.id, first.id + 1]) is None


def test_the_oldest_leave_first_and_are_counted_for_good(tmp_path: Path, make_model, make_session):
    model = make_model()
    sessions = [make_session(model, seed) for seed in range(6)]
    size = max(len(session.model_dump_json()) for session in sessions)
    path = tmp_path / "spool.db"
    with Spool.open(path, max_bytes=3 * size) as spool:
        for session in sessions[:3]:
            spool.add(model, session)
        spool.mark_rejected([spool.pending()[2].id], "bad")
        spool.seal(lambda rows: [rows[:2]])
        spool.add(model, sessions[3])
        assert (len(spool.pending()), spool.stats().rejected, spool.stats().dropped) == (3, 0, 1)
        # The oldest row goes together with the other half of its parcel.
        spool.add(model, sessions[4])
        assert [row.parcel for row in spool.pending()] == [None, None]
        with pytest.raises(SpoolFullError, match="holds at most"):
            spool.add(make_model(n_experts=400), make_session(make_model(n_experts=400), 9))
    with Spool.open(path) as spool:
        assert spool.stats().dropped == 3


def test_a_parcel_never_changes(spool: Spool, make_model, make_session):
    model = make_model()
    for seed in range(3):
        spool.add(model, make_session(model, seed))
    spool.seal(lambda rows: [rows[1:]])
    one, two, three = spool.pending()
    assert (one.parcel, two.parcel, three.parcel) == (None, two.id, two.id)
    spool.seal(lambda rows: [rows])
    assert [row.parcel for row in spool.pending()] == [one.id, two.id, two.id]


def test_purge_leaves_no_trace_but_the_uploaded_ids(spool: Spool, make_model, make_session):
    model = make_model(n_experts=200)
    sessions = [make_session(model, seed) for seed in range(20)]
    for session in sessions:
        spool.add(model, session)
    rows = spool.pending()
    spool.mark_uploaded([rows[0].id])
    spool.mark_rejected([rows[1].id], "bad")
    before = spool.path.stat().st_size + Path(f"{spool.path}-wal").stat().st_size
    assert spool.purge() == 19
    assert spool.stats().bytes == 0
    assert Path(f"{spool.path}-wal").stat().st_size == 0
    assert spool.path.stat().st_size < before / 4
    assert sessions[5].session_hash.encode() not in spool.path.read_bytes()
    assert not spool.add(model, sessions[0])
    assert spool.add(model, sessions[1])
    with pytest.raises(SpoolError, match="has no model"):
        spool.model(make_model(7).fingerprint)


def test_the_files_are_private(spool: Spool, make_model, make_session):
    spool.add(make_model(), make_session(make_model()))
    files = list(spool.path.parent.glob("spool.db*"))
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough to be one" * 40, b"SQLite format 3\0junk"]
)
def test_a_foreign_file_is_left_alone(tmp_path: Path, content: bytes):
    path = tmp_path / "spool.db"
    path.write_bytes(content)
    with pytest.raises(SpoolError, match="not a readable spool") as caught:
        Spool.open(path)
    assert str(path) in str(caught.value)
    assert "move the file away" in (caught.value.hint or "")
    assert path.read_bytes() == content


def alter(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_a_database_of_something_else_is_left_alone(tmp_path: Path):
    path = tmp_path / "spool.db"
    alter(path, "CREATE TABLE recipes (name TEXT)")
    content = path.read_bytes()
    with pytest.raises(SpoolError, match="database of something else"):
        Spool.open(path)
    assert path.read_bytes() == content


def test_a_newer_schema_is_refused(spool: Spool):
    alter(spool.path, f"PRAGMA user_version = {SCHEMA_VERSION + 6}")
    with pytest.raises(SpoolError, match="schema version 10, expected at most 4"):
        Spool.open(spool.path)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_spool_of_an_earlier_version_goes_on(spool: Spool, make_model, make_session, version: int):
    model = make_model()
    assert spool.add(model, make_session(model, 1))
    alter(spool.path, "DROP TABLE transcribed")
    if version < 3:
        alter(spool.path, "DROP TABLE served")
    if version == 1:
        alter(spool.path, "DROP TABLE recorded")
    alter(spool.path, f"PRAGMA user_version = {version}")
    spool.close()
    for _ in range(2):
        with Spool.open(spool.path) as opened:
            assert opened.stats().pending == 1
            assert opened.recorded(model.fingerprint, "a" * 64, "chat") == []
            assert not opened.was_served(model.fingerprint, [b"mark"])
    with Spool.open(spool.path) as opened:
        assert not opened.add(model, make_session(model, 1), stretches(bytes(32), [1, 2], [(0, 2)]))
        assert len(opened.recorded(model.fingerprint, make_session(model, 1).session_hash, "chat")) == 1


def test_what_leaves_unsent_may_be_recorded_again(tmp_path: Path, make_model, make_session):
    model = make_model()
    sessions = [make_session(model, seed) for seed in range(4)]
    room = 2 * max(len(session.model_dump_json()) for session in sessions)

    def known(spool: Spool) -> list[bool]:
        return [bool(spool.recorded(model.fingerprint, session.session_hash, "chat")) for session in sessions]

    with Spool.open(tmp_path / "small.db", max_bytes=room) as spool:
        for seed, session in enumerate(sessions):
            assert spool.add(model, session, stretches(bytes(32), [seed] * 600, [(0, 600)]))
        assert known(spool) == [False, False, True, True]
        spool.mark_uploaded([spool.pending()[0].id])
        spool.mark_rejected([spool.pending()[0].id], "bad")
        assert known(spool) == [False, False, True, True]
        assert spool.add(model, sessions[0], stretches(bytes(32), [0] * 600, [(0, 600)]))
        assert known(spool) == [True, False, True, True]
        spool.purge()
        assert known(spool) == [False, False, True, False], "what the service has stays known"


def test_what_was_moved_aside_may_be_tried_again(spool: Spool, make_model, make_session):
    model = make_model()
    for seed in range(3):
        assert spool.add(model, make_session(model, seed))
    before = {row.content_id: (row.tokens, row.bytes, row.session_hash) for row in spool.pending()}
    spool.seal(lambda rows: [rows])
    spool.mark_rejected([row.id for row in spool.pending()], "not today")
    alter(spool.path, "UPDATE rejected SET body = 'nonsense' WHERE id = 2")
    assert spool.restore_rejected() == 2
    rows = spool.pending()
    assert [row.parcel for row in rows] == [None, None]
    assert {(row.content_id, row.tokens, row.bytes, row.session_hash) for row in rows} <= {
        (key, *value) for key, value in before.items()
    }
    assert (spool.stats().rejected, spool.stats().last_error) == (1, None)
    assert spool.restore_rejected() == 0


def test_the_memory_of_recordings_is_bounded(spool: Spool, make_model, make_session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spark_agent.spool_recorded.STRETCHES_KEPT", 5)
    monkeypatch.setattr("spark_agent.spool_recorded.MARKS_KEPT_BYTES", 100)
    model = make_model()
    for seed in range(12):
        spool.add(model, make_session(model, seed), stretches(bytes(32), [seed] * 1000, [(0, 1000)]))
    known = [
        seed for seed in range(12) if spool.recorded(model.fingerprint, make_session(model, seed).session_hash, "chat")
    ]
    assert known == [9, 10, 11]


def test_damage_found_later_is_explained(tmp_path: Path, make_model, make_session):
    path = tmp_path / "spool.db"
    model = make_model()
    with Spool.open(path) as spool:
        for seed in range(30):
            spool.add(model, make_session(model, seed))
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))
    with Spool.open(path) as spool, pytest.raises(SpoolError, match="not a readable spool"):
        spool.pending()


def test_a_model_from_another_schema_is_explained(spool: Spool, make_model, make_session):
    model = make_model()
    spool.add(model, make_session(model))
    alter(spool.path, "UPDATE models SET body = '{}'")
    with pytest.raises(SpoolError, match="cannot read"):
        spool.model(model.fingerprint)
    spool.add(model, make_session(model, 1))
    assert spool.model(model.fingerprint) == model


def test_places_that_cannot_hold_a_spool(tmp_path: Path):
    with pytest.raises(SpoolError, match="cannot open the spool"):
        Spool.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match="cannot open the spool"):
        Spool.open(tmp_path / "file" / "spool.db")
    with pytest.raises(SpoolError, match="cannot open the spool"):
        Spool.open(Path("/dev/full/spool.db"))


def test_a_busy_spool_is_explained(spool: Spool, make_model, make_session):
    spool._connection.execute("PRAGMA busy_timeout = 50")
    other = sqlite3.connect(spool.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(SpoolError, match="held by another process"):
        spool.add(make_model(), make_session(make_model()))
    other.execute("ROLLBACK")
    other.close()
    assert spool.add(make_model(), make_session(make_model()))


def test_a_full_disk_loses_nothing(spool: Spool, make_model, make_session):
    model = make_model(n_experts=64)
    connection = spool._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 8}")
    accepted: list[int] = []

    def fill() -> None:
        for seed in range(100):
            assert spool.add(model, make_session(model, seed))
            accepted.append(seed)

    with pytest.raises(SpoolFullError, match="no room") as caught:
        fill()
    assert "free disk space" in (caught.value.hint or "")
    assert accepted
    assert len(spool.pending()) == len(accepted)
    # The process lives on: once there is room again, the same session is accepted.
    connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
    assert spool.add(model, make_session(model, len(accepted)))
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


FILL_UNDER_QUOTA = """
import resource, sys
from pathlib import Path
from spark_agent.spool import Spool
from spark_agent.errors import SpoolFullError
from spark_schemas.histogram import SessionHistogram
from spark_schemas.model import ModelShape
path, model, session = sys.argv[1:]
model, session = ModelShape.model_validate_json(model), SessionHistogram.model_validate_json(session)
with Spool.open(Path(path)) as spool:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    full = 0
    for number in range(400):
        try:
            spool.add(model, session.model_copy(update={"workload": f"w{number}"}))
        except SpoolFullError:
            full += 1
        else:
            print(number, flush=True)
    assert full > 100, full
"""


def test_a_quota_loses_nothing(tmp_path: Path, make_model, make_session):
    path, model = tmp_path / "spool.db", make_model()
    command = [sys.executable, "-c", FILL_UNDER_QUOTA, str(path)]
    command += [model.model_dump_json(), make_session(model).model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accepted = {f"w{number}" for number in done.stdout.split()}
    with Spool.open(path) as spool:
        assert {row.workload for row in spool.pending()} == accepted
        assert accepted


ADD_FOREVER = """
import sys
from pathlib import Path
from spark_agent.spool import Spool
from spark_schemas.histogram import SessionHistogram
from spark_schemas.model import ModelShape
path, prefix, limit, model, session = sys.argv[1:]
model, session = ModelShape.model_validate_json(model), SessionHistogram.model_validate_json(session)
with Spool.open(Path(path)) as spool:
    for number in range(int(limit)):
        assert spool.add(model, session.model_copy(update={"workload": f"{prefix}{number}"}))
        print(number, flush=True)
"""


def test_accepted_rows_survive_kill_9(tmp_path: Path, make_model, make_session):
    path, model = tmp_path / "spool.db", make_model()
    arguments = [str(path), "w", "1000000", model.model_dump_json(), make_session(model).model_dump_json()]
    for _ in range(2):
        path.unlink(missing_ok=True)
        Path(f"{path}-wal").unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", ADD_FOREVER, *arguments], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(25):
                process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
            acknowledged = 25 + len(process.stdout.read().splitlines())
        with Spool.open(path) as spool:
            kept = len(spool.pending())
            assert kept in {acknowledged, acknowledged + 1}


def test_processes_share_one_new_spool(tmp_path: Path, make_model, make_session):
    path, model = tmp_path / "spool.db", make_model()
    rest = ["10", model.model_dump_json(), make_session(model).model_dump_json()]
    running = [
        subprocess.Popen([sys.executable, "-c", ADD_FOREVER, str(path), name, *rest], stdout=subprocess.PIPE)
        for name in ("a", "b", "c")
    ]
    for process in running:
        with process:
            process.communicate()
        assert process.returncode == 0
    with Spool.open(path) as spool:
        assert len(spool.pending()) == 30


def test_threads_share_one_object(spool: Spool, make_model, make_session):
    model, failures = make_model(), []

    def work(start: int) -> None:
        try:
            for seed in range(start, start + 10):
                spool.add(model, make_session(model, seed))
                spool.stats()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 5, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(spool.pending()) == 20


def test_durability_is_set_for_power_cuts(spool: Spool):
    assert spool._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert spool._connection.execute("PRAGMA synchronous").fetchone() == (2,)
