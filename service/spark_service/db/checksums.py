"""Reading whole tables in bounded memory, and checksums of them whatever order their rows are stored in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from spark_service.db.connection import Database

__all__ = ["TableSum", "table_batches", "table_names", "table_sums"]

BATCH_ROWS = 128
_MODULUS = 2**256


class TableSum(BaseModel):
    """Rows of a table and a SHA-256 over them and the table's columns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    sha256: str


def table_names(database: Database) -> list[str]:
    """All tables, sorted."""
    with database.cursor() as cursor:
        rows = cursor.execute("SELECT table_name FROM duckdb_tables() WHERE NOT internal ORDER BY ALL").fetchall()
    return [row[0] for row in rows]


def table_sums(database: Database) -> dict[str, TableSum]:
    """Read every row of every table. Raises :class:`StorageError` for what cannot be read."""
    return {name: _table_sum(database, name) for name in table_names(database)}


def table_batches(database: Database, name: str, columns: Sequence[str] = ()) -> Iterator[pa.Table]:
    """All rows of a table that nobody changes meanwhile, a few at a time and at least one batch; all columns if none.

    By ranges of row ids: a scan holds thousands of rows at once, which is gigabytes where each has lists of counts.
    """
    chosen = ", ".join(map(_quoted, columns)) or "*"
    with database.cursor() as cursor:
        last = cursor.execute(f"SELECT coalesce(max(rowid), 0) FROM {_quoted(name)}").fetchall()[0][0]  # noqa: S608
        for start in range(0, last + 1, BATCH_ROWS):
            query = f"SELECT {chosen} FROM {_quoted(name)} WHERE rowid >= ? AND rowid < ?"  # noqa: S608
            batch: pa.Table = cursor.sql(query, params=[start, start + BATCH_ROWS]).to_arrow_table()
            yield batch


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _table_sum(database: Database, name: str) -> TableSum:
    rows, total, columns = 0, 0, ""
    for batch in table_batches(database, name):
        rows += batch.num_rows
        # A sum does not depend on the order, and unlike an exclusive or it counts a row that is there twice.
        total = (total + sum(int.from_bytes(digest) for digest in _row_digests(batch))) % _MODULUS
        columns = ", ".join(f"{field.name} {field.type}" for field in batch.schema)
    text = f"{columns}\n{rows}\n{total:064x}\n"
    return TableSum(rows=rows, sha256=hashlib.sha256(text.encode()).hexdigest())


def _row_digests(batch: pa.Table) -> Iterator[bytes]:
    for row in zip(*(_values(column) for column in batch.columns), strict=True):
        digest = hashlib.sha256()
        for value in row:
            # The length in front: no two different rows have the same bytes.
            digest.update(b"-" if value is None else b"%d:" % len(value))
            if value is not None:
                digest.update(value)
        yield digest.digest()


def _values(column: Any) -> Iterable[bytes | None]:
    kind = column.type
    if not (pa.types.is_list(kind) and pa.types.is_integer(kind.value_type)):
        return [None if value is None else repr(value).encode() for value in column.to_pylist()]
    return [_list_bytes(value) for value in column]


def _list_bytes(value: Any) -> bytes | None:
    if not value.is_valid:
        return None
    if value.values.null_count:
        return repr(value.as_py()).encode()
    content: bytes = value.values.to_numpy(zero_copy_only=False).tobytes()
    return content
