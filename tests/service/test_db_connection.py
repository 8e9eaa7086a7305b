from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path

import duckdb
import pytest

from spark_service.db.connection import Database
from spark_service.errors import (
    DatabaseError,
    DatabaseFormatError,
    StorageError,
    StorageFullError,
)


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond a size: writes fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / "a.duckdb", memory="256MB", threads=1)
    yield opened
    opened.close()


def test_settings_are_pinned(database: Database) -> None:
    names = [
        "autoinstall_known_extensions",
        "autoload_known_extensions",
        "enable_external_access",
        "lock_configuration",
        "python_enable_replacements",
        "threads",
    ]
    with database.cursor() as cursor:
        rows = dict(cursor.execute("SELECT name, value FROM duckdb_settings()").fetchall())
    assert [rows[name] for name in names] == ["false", "false", "false", "true", "false", "1"]


def test_days_are_those_of_utc_wherever_the_machine_is(tmp_path: Path) -> None:
    """At any moment it is another day in one of these two zones than in UTC."""
    code = (
        "import sys; from pathlib import Path; from spark_service.db.connection import Database\n"
        "with Database(Path(sys.argv[1])).cursor() as cursor:\n"
        "    print(*cursor.execute('SELECT current_date, CAST(now() AS DATE)').fetchone())\n"
    )
    for number, zone in enumerate(("Pacific/Kiritimati", "Etc/GMT+12")):
        before = datetime.now(UTC).date()
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / f"{number}.duckdb")],
            env={**os.environ, "TZ": zone},
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        found = {date.fromisoformat(day) for day in done.stdout.split()}
        assert found <= {before, datetime.now(UTC).date()}, zone


@pytest.mark.parametrize(
    "sql", ["SELECT * FROM read_text('{file}')", "COPY (SELECT 1) TO '{file}'", "SET threads = 4", "INSTALL httpfs"]
)
def test_sql_reaches_no_other_file(database: Database, tmp_path: Path, sql: str) -> None:
    other = tmp_path / "other.txt"
    other.write_text("secret")
    with pytest.raises(StorageError), database.cursor() as cursor:
        cursor.execute(sql.format(file=other))
    assert other.read_text() == "secret"


def test_a_transaction_rolls_back_on_any_exception(database: Database) -> None:
    with database.transaction() as cursor:
        cursor.execute("CREATE TABLE t (a INTEGER)")

    def fail() -> None:
        with database.transaction() as cursor:
            cursor.execute("INSERT INTO t VALUES (1)")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with database.cursor() as cursor:
        assert cursor.execute("SELECT count(*) FROM t").fetchall() == [(0,)]


def test_threads_have_cursors_of_their_own(database: Database) -> None:
    wrong: list[object] = []

    def count(number: int) -> None:
        for _ in range(20):
            with database.cursor() as cursor:
                cursor.execute("SELECT ? FROM range(100)", [number])
                if set(cursor.fetchall()) != {(number,)}:
                    wrong.append(number)

    threads = [threading.Thread(target=count, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_second_process_is_told_who_owns_the_file(database: Database) -> None:
    code = (
        "import sys, pathlib\n"
        "from spark_service.db.connection import Database\n"
        "from spark_service.errors import DatabaseLockedError\n"
        "try: Database(pathlib.Path(sys.argv[1]))\n"
        "except DatabaseLockedError as error: print(error.message, '|', error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(database.path)], capture_output=True, text=True, check=True, timeout=240
    )
    assert str(database.path) in done.stdout
    assert f"process {os.getpid()} (python" in done.stdout
    assert f"| stop process {os.getpid()}" in done.stdout


def test_a_foreign_file_is_refused_untouched(tmp_path: Path) -> None:
    text, sqlite = tmp_path / "text.duckdb", tmp_path / "sqlite.duckdb"
    text.write_bytes(b"hello world" * 1000)
    connection = sqlite3.connect(sqlite)
    connection.execute("CREATE TABLE a (b)")
    connection.close()
    for path in (text, sqlite):
        before = path.read_bytes()
        with pytest.raises(DatabaseFormatError, match="not a DuckDB database"):
            Database(path)
        assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.duckdb"
    database = Database(path)
    with database.transaction() as cursor:
        cursor.execute("CREATE TABLE t AS SELECT range AS a FROM range(100000)")
    database.close()
    content = bytearray(path.read_bytes())
    content[12288:12400] = b"x" * 112
    path.write_bytes(content[:9000] if damage == "cut" else content)
    with pytest.raises(DatabaseFormatError, match="is damaged"):
        Database(path)


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="Is a directory"):
        Database(tmp_path)


def test_closing_twice_is_harmless_and_use_afterwards_an_error(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.duckdb")
    database.close()
    database.close()
    with pytest.raises(StorageError, match="is closed"), database.cursor():
        pass


def test_a_full_disk_stores_nothing_and_passes(database: Database) -> None:
    with database.transaction() as cursor:
        cursor.execute("CREATE TABLE t (a VARCHAR)")
    insert = "INSERT INTO t SELECT md5(range::VARCHAR) FROM range(100000)"
    with full_disk(100_000), pytest.raises(StorageFullError, match="no room left"), database.transaction() as cursor:
        cursor.execute(insert)
    with database.cursor() as cursor:
        assert cursor.execute("SELECT count(*) FROM t").fetchall() == [(0,)]
    with database.transaction() as cursor:
        cursor.execute(insert)


def test_the_database_is_opened_again_after_a_fatal_error(database: Database) -> None:
    with database.transaction() as cursor:
        cursor.execute("CREATE TABLE t (a VARCHAR)")
        cursor.execute("INSERT INTO t SELECT md5(range::VARCHAR) FROM range(100000)")
    # A checkpoint that cannot be written makes DuckDB give up the whole database.
    with full_disk(50_000), pytest.raises(StorageFullError), database.cursor() as cursor:
        cursor.execute("CHECKPOINT")
    with database.cursor() as cursor:
        assert cursor.execute("SELECT count(*) FROM t").fetchall() == [(100_000,)]


def test_failing_to_open_again_stays_an_error_of_the_request(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError), database.cursor():
        raise duckdb.FatalException("invalidated")
    path = database.path.read_bytes()
    database.path.write_bytes(b"not a database at all")
    for _ in range(2):
        with pytest.raises(StorageError, match="not a DuckDB database"), database.cursor():
            pass
    database.path.write_bytes(path)
    with database.cursor() as cursor:
        assert cursor.execute("SELECT 1").fetchall() == [(1,)]


INSERT = "INSERT INTO t SELECT md5(range::VARCHAR) FROM range(100000)"


def test_a_long_log_is_folded_in_by_the_commit_that_made_it_long(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = database.path.with_name("a.duckdb.wal")
    with database.transaction() as cursor:
        cursor.execute("CREATE TABLE t (a VARCHAR)")
    assert log.exists()
    monkeypatch.setattr("spark_service.db.connection.CHECKPOINT_WAL_BYTES", 1_000_000)
    with database.frozen(), database.transaction() as cursor:
        cursor.execute(INSERT)
    # The file was being copied: the log waits for the next commit.
    assert log.stat().st_size > 1_000_000
    with database.transaction() as cursor:
        cursor.execute("INSERT INTO t VALUES ('x')")
    assert not log.exists()


def test_a_checkpoint_without_room_does_not_fail_what_was_committed(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spark_service.db.connection.CHECKPOINT_WAL_BYTES", 1_000_000)
    with database.transaction() as cursor:
        cursor.execute("CREATE TABLE t (a VARCHAR)")
        cursor.execute(INSERT)
    with full_disk(3_700_000):
        with database.transaction() as cursor:
            cursor.execute(INSERT)
        assert "checkpoint of" in caplog.text
        with database.cursor() as cursor:
            assert cursor.execute("SELECT count(*) FROM t").fetchall() == [(200_000,)]
    with database.transaction() as cursor:
        cursor.execute(INSERT)
    assert not database.path.with_name("a.duckdb.wal").exists()
    database.close()
    again = Database(database.path, read_only=True)
    with again.cursor() as cursor:
        assert cursor.execute("SELECT count(*) FROM t").fetchall() == [(300_000,)]
    with pytest.raises(StorageError, match="read-only"), again.transaction() as cursor:
        cursor.execute("DELETE FROM t")
    again.close()
