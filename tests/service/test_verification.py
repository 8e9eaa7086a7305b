from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from spark_service.db.checksums import table_sums
from spark_service.db.connection import Database
from spark_service.db.store import Store
from spark_service.errors import MigrationError
from spark_service.verification import MAX_NAMED, Report, verify

Sql = Callable[[str], None]


@pytest.fixture
def data(tmp_path: Path, make: Any) -> Path:
    """Two models, parts of sessions, both phases, a deletion."""
    store = Store.open(tmp_path / "service.duckdb", memory="256MB", threads=1)
    first, second = make.shape(), make.shape([(5, 2, 7)], fingerprint="mf1-" + "0" * 31 + "2")
    sessions = [make.live(first, one, profile=make.profile()) for one in make.sessions(first, 4, 2, prefill=20)]
    store.add_upload(make.upload(first, sessions), "key-1", "a")
    store.add_upload(make.upload(first, make.sessions(first, 2, 2, decode=0, prefill=31)), "key-2", "b")
    store.add_upload(make.upload(second, make.sessions(second, 3, 1)), "key-3", "c")
    store.delete_session(sessions[0].session_hash)
    store.close()
    return tmp_path


@pytest.fixture
def sql(data: Path) -> Sql:
    """Change the database behind the service's back."""

    def execute(text: str) -> None:
        with duckdb.connect(str(data / "service.duckdb")) as connection:
            connection.execute(text)

    return execute


def look(path: Path) -> Report:
    return verify(path, memory="256MB", threads=1)


def faults(report: Report) -> dict[str, int]:
    return {check.name: check.faults for check in report.checks if check.faults}


def test_what_uploads_left_has_no_faults(data: Path) -> None:
    report = look(data)
    assert faults(report) == {}
    assert {check.name: check.checked for check in report.checks} == {
        "models": 2,
        "splits": 11,
        "counts and content ids": 11,
        "orphans": 6,
        "segments": 0,
    }
    assert report == look(data / "service.duckdb")


# Every row of a table that a hostile or failing hand could touch, and what notices it.
CHANGES = [
    ("UPDATE parts SET split = CASE split WHEN 'held_out' THEN 'calibration' ELSE 'held_out' END", "splits", 11),
    ("UPDATE parts SET workload = 'other'", "counts and content ids", 11),
    ("UPDATE parts SET session_hash = reverse(session_hash)", "counts and content ids", 11),
    ("UPDATE parts SET session_hash = 'x'", "splits", 11),
    ("UPDATE parts SET fingerprint = 'mf1-00000000000000000000000000000003'", "splits", 11),
    ("DELETE FROM models WHERE sibling = (SELECT min(sibling) FROM models)", "splits", 11),
    ("UPDATE models SET sibling = 'other'", "models", 2),
    ("UPDATE models SET shape_json = '{}'", "models", 2),
    ("UPDATE models SET shape_json = replace(shape_json, '\"top_k\":2', '\"top_k\":1')", "counts and content ids", 11),
    ("UPDATE histograms SET counts = counts || counts", "counts and content ids", 11),
    ("UPDATE histograms SET counts = counts[2:] || '\\xFF'::BLOB", "counts and content ids", 11),
    ("UPDATE histograms SET counts = counts || '\\x00'::BLOB", "counts and content ids", 11),
    ("UPDATE histograms SET counts = counts[2:]", "counts and content ids", 11),
    ("UPDATE histograms SET counts = ''", "counts and content ids", 11),
    ("UPDATE histograms SET tokens = tokens + 1", "counts and content ids", 11),
    ("UPDATE histograms SET tokens = 0", "counts and content ids", 11),
    ("UPDATE histograms SET layer_tokens = layer_tokens[2:]", "counts and content ids", 11),
    ("UPDATE histograms SET blocks = list_transform(blocks, lambda x: x + 1)", "counts and content ids", 11),
    ("UPDATE histograms SET n_experts = list_reverse(n_experts) || [1]", "counts and content ids", 11),
    ("UPDATE histograms SET reuse = NULL WHERE phase = 'decode'", "counts and content ids", 7),
    ("UPDATE histograms SET reuse = reuse[2:] || '\\xFF'::BLOB WHERE phase = 'decode'", "counts and content ids", 7),
    ("UPDATE live SET selections = selections + 1", "counts and content ids", 5),
    ("UPDATE live SET cold_hits = selections + 1", "counts and content ids", 5),
    ("UPDATE live SET resident_bytes = 1000000000", "counts and content ids", 5),
    ("UPDATE live SET resident_bytes = 0", "counts and content ids", 5),
    ("UPDATE live SET profile_workload = NULL", "counts and content ids", 5),
    ("UPDATE live SET profile_revision = upper(profile_revision)", "counts and content ids", 5),
    ("INSERT INTO live SELECT * REPLACE (md5(content_id) AS content_id) FROM live", "orphans", 5),
    ("DELETE FROM histograms WHERE phase = 'prefill'", "orphans", 3),
    ("DELETE FROM histograms", "orphans", 11),
    ("DELETE FROM parts", "orphans", 11),
    ("INSERT INTO deleted_sessions SELECT DISTINCT session_hash FROM parts ON CONFLICT DO NOTHING", "orphans", 11),
]


@pytest.mark.parametrize(("change", "check", "at_least"), CHANGES, ids=[change for change, _, _ in CHANGES])
def test_every_change_is_noticed_and_named(data: Path, sql: Sql, change: str, check: str, at_least: int) -> None:
    before = look(data)
    sql(change)
    report = look(data)
    assert faults(report)[check] >= at_least
    named = next(found.named for found in report.checks if found.name == check)
    assert 0 < len(named) <= MAX_NAMED
    assert all(text.startswith(("part ", "model ", "histogram ", "measurement ")) for text in named)
    assert report.tables != before.tables


def test_faults_are_counted_and_the_first_are_named(data: Path, sql: Sql) -> None:
    sql("INSERT INTO deleted_sessions SELECT md5(range::VARCHAR) FROM range(3)")
    sql(
        "INSERT INTO parts BY NAME SELECT md5(range::VARCHAR) AS content_id, fingerprint, workload, "
        "session_hash, split FROM range(50), (SELECT * FROM parts LIMIT 1)"
    )
    orphans = next(check for check in look(data).checks if check.name == "orphans")
    assert (orphans.faults, len(orphans.named)) == (50, MAX_NAMED)


def test_changed_migrations_are_refused(data: Path, sql: Sql) -> None:
    sql("UPDATE schema_migrations SET sha256 = 'x'")
    with pytest.raises(MigrationError, match="migration 1 was applied with checksum x"):
        look(data)


def test_an_unclean_end_is_read_without_changing_anything(data: Path, make: Any) -> None:
    store = Store.open(data / "service.duckdb", memory="256MB", threads=1)
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape, 6, 0, workload="late")), "late", "late")
    copy = data / "copy"
    copy.mkdir()
    for name in ("service.duckdb", "service.duckdb.wal"):
        (copy / name).write_bytes((data / name).read_bytes())
    store.close()
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    report = look(copy)
    assert (faults(report), report.tables["parts"].rows) == ({}, 16)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


@pytest.fixture
def aged(data: Path) -> list[Path]:
    """Some histograms in segments, some in the database."""
    store = Store.open(data / "service.duckdb", memory="256MB", threads=1)
    while store.age_out(date(9999, 1, 1)):
        pass
    store.close()
    found = sorted((data / "segments").iterdir())
    assert len(found) > 1
    return found


def test_segments_hold_counts_like_the_database(data: Path, aged: list[Path], sql: Sql) -> None:
    report = look(data)
    assert faults(report) == {}
    assert next(check.checked for check in report.checks if check.name == "segments") == len(aged)
    assert next(check.checked for check in report.checks if check.name == "counts and content ids") == 11
    sql("UPDATE parts SET workload = 'other'")
    assert faults(look(data)) == {"counts and content ids": 11}


def test_damaged_segments_are_named(data: Path, aged: list[Path]) -> None:
    whole = aged[0].read_bytes()
    for damage in (whole[:100], b"", whole[: len(whole) // 2] + whole[len(whole) // 2 + 1 :], whole + b" "):
        aged[0].write_bytes(damage)
        named = [text for check in look(data).checks if check.name == "segments" for text in check.named]
        assert [text for text in named if text.startswith(f"segment {aged[0].name}: ")]
    aged[0].unlink()
    assert faults(look(data)).keys() == {"counts and content ids", "segments"}


def test_an_older_schema_is_read_as_far_as_it_goes(data: Path, sql: Sql) -> None:
    sql("DELETE FROM schema_migrations WHERE version > 1")
    report = look(data)
    assert (report.complete, report.schema_version, faults(report)) == (False, 1, {})
    assert {check.name for check in report.checks} == {"models", "splits"}


def test_sums_do_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"({number}, 'n{number}', [{number}, {number + 1}]::UBIGINT[], NULL)" for number in range(600)]
    sums = []
    for name, order in (("a", rows), ("b", [rows[index] for index in rng.permutation(600)]), ("c", [*rows, rows[0]])):
        database = Database(tmp_path / f"{name}.duckdb", memory="256MB", threads=1)
        with database.transaction() as cursor:
            cursor.execute("CREATE TABLE t (a INTEGER, b VARCHAR, c UBIGINT[], d DATE)")
            cursor.execute(f"INSERT INTO t VALUES {', '.join(order)}")
        sums.append(table_sums(database)["t"])
        database.close()
    assert sums[0] == sums[1]
    assert sums[0].rows == 600
    assert sums[2].sha256 != sums[0].sha256


@pytest.mark.parametrize(
    "other", ["(1, NULL, [])", "(NULL, '1', [])", "(1, '', [])", "(1, '1', NULL)", "(1, '1', [0])"]
)
def test_sums_tell_values_apart(tmp_path: Path, other: str) -> None:
    sums = []
    for number, row in enumerate(("(1, '1', [])", other)):
        database = Database(tmp_path / f"{number}.duckdb", memory="256MB", threads=1)
        with database.transaction() as cursor:
            cursor.execute("CREATE TABLE t (a INTEGER, b VARCHAR, c UBIGINT[])")
            cursor.execute(f"INSERT INTO t VALUES {row}")
        sums.append(table_sums(database)["t"])
        database.close()
    assert sums[0] != sums[1]
