"""Whether what is stored is what uploads could have left: every row is read, and what is known of it recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from spark_schemas.invariants import check_session
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of
from spark_service.backup import working_folder
from spark_service.backup_format import SEGMENTS_NAME, unpack
from spark_service.db.checksums import TableSum, table_batches, table_sums
from spark_service.db.connection import Database
from spark_service.db.migrate import available, pending
from spark_service.errors import BackupError
from spark_service.settings import DATABASE_NAME
from spark_service.stored_sessions import PHASE_COLUMNS, StoredPart, StoredPhase, parts_of, session_of

__all__ = ["Check", "Report", "verify"]

MAX_NAMED = 20
"""Faults of one check that are named; the others are counted."""
BATCH_ROWS = 256
_ORPHANS = (
    (
        "part {}: it has no counts",
        "SELECT content_id FROM parts ANTI JOIN histograms USING (content_id) ANTI JOIN aged USING (content_id)",
    ),
    (
        "histogram {}: it belongs to no part",
        "SELECT DISTINCT content_id FROM histograms ANTI JOIN parts USING (content_id)",
    ),
    (
        "part {}: its session was deleted",
        "SELECT content_id FROM parts SEMI JOIN deleted_sessions USING (session_hash)",
    ),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One question, asked of everything that it concerns."""

    name: str
    checked: int
    faults: int
    named: tuple[str, ...]
    """The first faults."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was found in one database."""

    schema_version: int
    tables: Mapping[str, TableSum]
    checks: tuple[Check, ...]

    @property
    def faults(self) -> int:
        """Faults of all checks."""
        return sum(check.faults for check in self.checks)


def verify(path: Path, *, memory: str, threads: int) -> Report:
    """Check a database, the folder of one, or a backup. Nothing there is changed.

    Raises :class:`BackupError` for a backup that is not whole, :class:`DatabaseError` for what cannot be opened,
    :class:`StorageError` for what cannot be read. What contradicts itself is a fault in the report.
    """
    database = path / DATABASE_NAME if path.is_dir() else path
    if not database.is_file():
        raise BackupError(
            f"{database}: found no file, expected a database or a backup",
            "name one, or its folder",
        )
    if _is_database(database):
        return _verify_database(database, memory, threads)
    with working_folder(path.parent) as folder:
        manifest = unpack(path, folder)
        report = _verify_database(folder / DATABASE_NAME, memory, threads)
    found = {"schema version": report.schema_version, **report.tables}
    expected = {"schema version": manifest.schema_version, **manifest.tables}
    check = _check(
        "as in the manifest",
        (
            None
            if found.get(name) == expected.get(name)
            else f"{name}: found {found.get(name)}, expected {expected.get(name)}"
            for name in sorted(found.keys() | expected.keys())
        ),
    )
    return Report(report.schema_version, report.tables, (*report.checks, check))


def _is_database(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(12)[8:] == b"DUCK"


def _verify_database(path: Path, memory: str, threads: int) -> Report:
    database = Database(path, memory=memory, threads=threads, read_only=True)
    try:
        schema_version = len(available()) - len(pending(database))
        tables = table_sums(database)
        checks: tuple[Check, ...] = ()
        if schema_version:
            models: dict[str, ModelShape] = {}
            segments = _Segments(path.parent / SEGMENTS_NAME)
            # In this order: the first finds the models that the others compare with.
            checks = (
                _check("models", _models(database, models)),
                _check("splits", _splits(database, models)),
                _check("counts and content ids", _stored_counts(database, models)),
                _check("orphans", _orphans(database, segments)),
                _check("segments", segments.faults(database, models)),
            )
    finally:
        database.close()
    return Report(schema_version, tables, checks)


def _check(name: str, results: Iterable[str | None]) -> Check:
    checked = faults = 0
    named: list[str] = []
    for fault in results:
        checked += 1
        if fault is not None:
            faults += 1
            if len(named) < MAX_NAMED:
                named.append(fault)
    return Check(name, checked, faults, tuple(named))


def _rows(database: Database, query: str) -> Iterator[tuple[Any, ...]]:
    with database.cursor() as cursor:
        cursor.execute(query)
        while rows := cursor.fetchmany(BATCH_ROWS):
            yield from rows


def _models(database: Database, models: dict[str, ModelShape]) -> Iterator[str | None]:
    for fingerprint, sibling, text in _rows(database, "SELECT fingerprint, sibling, shape_json FROM models"):
        try:
            model = models[fingerprint] = ModelShape.model_validate_json(text)
        except ValidationError as error:
            yield f"model {fingerprint}: found a shape with {error.error_count()} faults, expected none"
            continue
        same = (model.fingerprint, model.sibling) == (fingerprint, sibling)
        yield None if same else f"model {fingerprint}: found the shape of {model.fingerprint}, {model.sibling}"


def _splits(database: Database, models: Mapping[str, ModelShape]) -> Iterator[str | None]:
    for content_id, fingerprint, session_hash, split in _rows(
        database, "SELECT content_id, fingerprint, session_hash, split FROM parts"
    ):
        if fingerprint not in models:
            yield f"part {content_id}: found model {fingerprint}, expected one that is stored"
            continue
        try:
            expected = split_of(session_hash)
        except ValueError:
            yield f"part {content_id}: found session hash {session_hash!r}, expected 64 hex digits"
            continue
        yield None if split == expected else f"part {content_id}: found split {split}, expected {expected}"


def _stored_counts(database: Database, models: Mapping[str, ModelShape]) -> Iterator[str | None]:
    def phases_of(content_ids: list[str]) -> dict[str, int]:
        query = "SELECT content_id, count(*) FROM wanted JOIN histograms USING (content_id) GROUP BY content_id"
        return dict(_wanted(database, query, content_ids))

    yield from _count_faults(database, models, table_batches(database, "histograms", PHASE_COLUMNS), phases_of)


def _wanted(database: Database, query: str, content_ids: list[str]) -> list[tuple[Any, ...]]:
    with database.cursor() as cursor:
        cursor.register("wanted", pa.table({"content_id": pa.array(content_ids, pa.string())}))
        return cursor.execute(query).fetchall()


def _count_faults(
    database: Database,
    models: Mapping[str, ModelShape],
    batches: Iterable[pa.Table],
    phases_of: Callable[[list[str]], Mapping[str, int]],
) -> Iterator[str | None]:
    query = "SELECT content_id, fingerprint, workload, session_hash, split FROM wanted JOIN parts USING (content_id)"
    for groups in parts_of(batches, phases_of):
        known = {row[0]: StoredPart(*row) for row in _wanted(database, query, list(groups))}
        for content_id, phases in groups.items():
            part = known.get(content_id)
            # What has no part or no model is named by another check.
            if part is not None and part.fingerprint in models:
                yield _count_fault(part, phases, models[part.fingerprint])


def _count_fault(part: StoredPart, phases: list[StoredPhase], model: ModelShape) -> str | None:
    try:
        session = session_of(part, phases)
        check_session(session, model, field=f"part {part.content_id}")
    except ValueError as error:
        return str(error) if part.content_id in str(error) else f"part {part.content_id}: {error}"
    found = session.content_id(model.fingerprint)
    return None if found == part.content_id else f"part {part.content_id}: found counts with content id {found}"


def _orphans(database: Database, segments: _Segments) -> Iterator[str | None]:
    with database.cursor() as cursor:
        cursor.register("aged", segments.content_ids())
        for text, query in _ORPHANS:
            found = cursor.execute(query).fetchall()
            yield from (text.format(row[0]) for row in found)
            yield None


class _Segments:
    """Parquet files beside the database; those with the columns of ``histograms`` hold counts that aged out of it."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.rglob("*.parquet")) if folder.is_dir() else []

    def content_ids(self) -> pa.Table:
        """Ids of all parts in the files, once for every row; files that cannot be read have none."""
        empty = pa.table({"content_id": pa.array([], pa.string())})
        tables = [empty]
        for path in self._files:
            try:
                with pq.ParquetFile(path) as file:
                    if set(PHASE_COLUMNS) <= set(file.schema_arrow.names):
                        tables.append(file.read(columns=["content_id"]).cast(empty.schema))
            except (pa.ArrowException, OSError):
                # Named by the check of the segments.
                continue
        return pa.concat_tables(tables)

    def faults(self, database: Database, models: Mapping[str, ModelShape]) -> Iterator[str | None]:
        """Read every file; recompute what it holds of parts that are still known."""
        for path in self._files:
            try:
                with pq.ParquetFile(path, page_checksum_verification=True) as file:
                    yield from self._file_faults(file, database, models)
            except (pa.ArrowException, OSError, ValueError) as error:
                yield f"segment {path.name}: {error}"
            else:
                yield None

    def _file_faults(
        self, file: pq.ParquetFile, database: Database, models: Mapping[str, ModelShape]
    ) -> Iterator[str | None]:
        if not set(PHASE_COLUMNS) <= set(file.schema_arrow.names):
            for _ in file.iter_batches(BATCH_ROWS):
                pass
            return
        rows = Counter(str(value) for value in file.read(columns=["content_id"])["content_id"].to_pylist())
        batches = (pa.Table.from_batches([batch]) for batch in file.iter_batches(BATCH_ROWS))
        yield from _count_faults(database, models, batches, lambda _: rows)
