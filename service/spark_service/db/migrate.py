"""Numbered SQL migrations: each runs once, in its own transaction, and is remembered with its checksum."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import duckdb

from spark_service.db.connection import Database
from spark_service.errors import DatabaseFormatError, MigrationError

__all__ = ["Migration", "available", "migrate", "pending"]

_NAME = re.compile(r"(?P<version>[0-9]{4})_(?P<name>[a-z0-9_]+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema."""

    version: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        """Checksum of the SQL text."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


def available() -> tuple[Migration, ...]:
    """All migrations of this program, numbered 1, 2, 3, … without gaps."""
    found = []
    for file in resources.files("spark_service.db").joinpath("migrations").iterdir():
        if match := _NAME.fullmatch(file.name):
            sql = file.read_text(encoding="utf-8")
            found.append(Migration(int(match["version"]), match["name"], sql))
    found.sort(key=lambda migration: migration.version)
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        versions = [migration.version for migration in found]
        raise MigrationError(f"migrations {versions}: expected 1, 2, 3, … without gaps", "reinstall spark-moe")
    return tuple(found)


def pending(database: Database, migrations: Sequence[Migration] | None = None) -> tuple[Migration, ...]:
    """Migrations that a database still lacks; changes nothing.

    Raises :class:`MigrationError` for a newer schema or a changed history, :class:`DatabaseFormatError` for a database
    that holds other tables than this service's.
    """
    known = available() if migrations is None else tuple(migrations)
    with database.cursor() as cursor:
        applied = _applied(cursor, database)
    if len(applied) > len(known):
        raise MigrationError(
            f"database {database.path} has schema version {len(applied)}, expected at most {len(known)}",
            "upgrade spark-moe: a newer version wrote this database",
        )
    for migration, (version, sha256) in zip(known, applied, strict=False):
        if (migration.version, migration.sha256) != (version, sha256):
            raise MigrationError(
                f"database {database.path}: migration {version} was applied with checksum {sha256[:12]}…, "
                f"expected migration {migration.version} with {migration.sha256[:12]}…",
                "install the version of spark-moe that made this database, or restore a backup",
            )
    return known[len(applied) :]


def migrate(database: Database, migrations: Sequence[Migration] | None = None) -> tuple[Migration, ...]:
    """Apply what is pending and return it. A migration that fails leaves the schema as it was before it."""
    todo = pending(database, migrations)
    for migration in todo:
        with database.transaction() as cursor:
            cursor.execute(
                "CREATE TABLE IF NOT EXISTS schema_migrations "
                "(version INTEGER PRIMARY KEY, name VARCHAR NOT NULL, sha256 VARCHAR NOT NULL)"
            )
            cursor.execute(migration.sql)
            cursor.execute(
                "INSERT INTO schema_migrations VALUES (?, ?, ?)", [migration.version, migration.name, migration.sha256]
            )
    return todo


def _applied(cursor: duckdb.DuckDBPyConnection, database: Database) -> list[tuple[int, str]]:
    tables = {row[0] for row in cursor.execute("SELECT table_name FROM duckdb_tables() WHERE NOT internal").fetchall()}
    if "schema_migrations" in tables:
        rows = cursor.execute("SELECT version, sha256 FROM schema_migrations ORDER BY version").fetchall()
        return [(version, sha256) for version, sha256 in rows]
    if tables:
        raise DatabaseFormatError(
            f"database {database.path} holds other tables ({', '.join(sorted(tables)[:5])}), "
            "expected one made by spark-service",
            "choose another folder with --data-dir PATH",
        )
    return []
