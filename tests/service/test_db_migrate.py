from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_service.db.connection import Database
from spark_service.db.migrate import Migration, available, migrate, pending
from spark_service.errors import DatabaseFormatError, MigrationError, StorageError

ONE = Migration(1, "one", "CREATE TABLE one (a INTEGER); INSERT INTO one VALUES (1);")
TWO = Migration(2, "two", "ALTER TABLE one ADD COLUMN b INTEGER;")
BROKEN = Migration(2, "broken", "CREATE TABLE two (a INTEGER); SELECT no_such_function();")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / "a.duckdb", memory="256MB", threads=1)
    yield opened
    opened.close()


def tables(database: Database) -> set[str]:
    with database.cursor() as cursor:
        return {row[0] for row in cursor.execute("SELECT table_name FROM duckdb_tables()").fetchall()}


def test_each_runs_once_in_order(database: Database) -> None:
    assert pending(database, [ONE, TWO]) == (ONE, TWO)
    assert migrate(database, [ONE]) == (ONE,)
    assert migrate(database, [ONE, TWO]) == (TWO,)
    assert migrate(database, [ONE, TWO]) == ()
    with database.cursor() as cursor:
        assert cursor.execute("SELECT * FROM one").fetchall() == [(1, None)]


def test_asking_changes_nothing(database: Database) -> None:
    pending(database, [ONE])
    assert tables(database) == set()


def test_a_failing_migration_leaves_the_schema_before_it(database: Database) -> None:
    with pytest.raises(StorageError):
        migrate(database, [ONE, BROKEN])
    assert tables(database) == {"one", "schema_migrations"}
    assert pending(database, [ONE, TWO]) == (TWO,)


def test_a_newer_schema_is_refused(database: Database) -> None:
    migrate(database, [ONE, TWO])
    with pytest.raises(MigrationError, match="has schema version 2, expected at most 1"):
        migrate(database, [ONE])


def test_a_changed_migration_is_refused(database: Database) -> None:
    migrate(database, [ONE])
    with pytest.raises(MigrationError, match="migration 1 was applied with checksum"):
        migrate(database, [Migration(1, "one", ONE.sql + " "), TWO])


def test_someone_elses_database_is_refused(database: Database) -> None:
    with database.transaction() as cursor:
        cursor.execute("CREATE TABLE theirs (a INTEGER)")
    with pytest.raises(DatabaseFormatError, match=r"other tables \(theirs\)"):
        migrate(database)
    assert tables(database) == {"theirs"}


def test_ours_apply(database: Database) -> None:
    assert [migration.version for migration in migrate(database)] == list(range(1, len(available()) + 1))
    assert {"models", "parts", "histograms", "uploads", "deleted_sessions"} < tables(database)
