"""Whether what is stored is what uploads could have left: every row is read, and what is known of it recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from spark_schemas.ids import Phase
from spark_schemas.invariants import check_session
from spark_schemas.live import LiveMisses
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of
from spark_service.backup import working_folder
from spark_service.backup_format import SEGMENTS_NAME, unpack
from spark_service.db.checksums import TableSum, table_sums
from spark_service.db.connection import Database
from spark_service.db.live import live_misses
from spark_service.db.migrate import available, pending
from spark_service.db.scan import snapshot
from spark_service.db.segments import SegmentFolder
from spark_service.errors import BackupError, StorageError
from spark_service.settings import DATABASE_NAME
from spark_service.stored_sessions import StoredPart, StoredPhase, parts_of, session_of

__all__ = ["Check", "Report", "verify"]

MAX_NAMED = 20
"""Faults of one check that are named; the others are counted."""
BATCH_ROWS = 256
_ORPHANS = (
    (
        "part {}: found no counts of it, expected some",
        "SELECT content_id FROM parts ANTI JOIN histograms USING (content_id) "
        "ANTI JOIN segment_rows USING (content_id)",
    ),
    (
        "histogram {}: found no part that it belongs to",
        "SELECT content_id FROM histograms ANTI JOIN parts USING (content_id) "
        "UNION SELECT content_id FROM segment_rows ANTI JOIN parts USING (content_id)",
    ),
    (
        "histogram {}: found in the database and in a segment, expected one of them",
        "SELECT content_id FROM histograms SEMI JOIN segment_rows USING (content_id, phase)",
    ),
    (
        "histogram {}: found in a segment that is not known",
        "SELECT content_id FROM segment_rows ANTI JOIN segments ON segment = name",
    ),
    (
        "measurement {}: found no part that it belongs to",
        "SELECT content_id FROM live ANTI JOIN parts USING (content_id)",
    ),
    (
        "part {}: found it although its session was deleted",
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
    complete: bool
    """Whether counts were checked: those of an older schema are only after a migration and a start."""

    @property
    def faults(self) -> int:
        """Faults of all checks."""
        return sum(check.faults for check in self.checks)


def verify(path: Path, *, memory: str, threads: int, segments: Path | None = None) -> Report:
    """Check a database, the folder of one, or a backup. Nothing there is changed.

    ``segments`` is the folder of histograms that have aged out, beside the database if it is not given.

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
        return _verify_database(database, segments or database.parent / SEGMENTS_NAME, memory, threads)
    with working_folder(path.parent) as folder:
        manifest = unpack(path, folder)
        report = _verify_database(folder / DATABASE_NAME, folder / SEGMENTS_NAME, memory, threads)
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
    return Report(report.schema_version, report.tables, (*report.checks, check), report.complete)


def _is_database(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(12)[8:] == b"DUCK"


def _verify_database(path: Path, folder: Path, memory: str, threads: int) -> Report:
    database = Database(path, memory=memory, threads=threads, read_only=True)
    try:
        missing = pending(database)
        tables = table_sums(database)
        complete = not missing and "unpacked_histograms" not in tables
        models: dict[str, ModelShape] = {}
        checks: tuple[Check, ...] = ()
        if "parts" in tables:
            # In this order: the first finds the models that the others compare with.
            checks = (_check("models", _models(database, models)), _check("splits", _splits(database, models)))
        if complete:
            segments = SegmentFolder(folder)
            checks += (
                _check("counts and content ids", _stored_counts(database, segments, models)),
                _check("orphans", _orphans(database)),
                _check("segments", _segment_files(database, segments)),
            )
    finally:
        database.close()
    return Report(len(available()) - len(missing), tables, checks, complete)


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


def _stored_counts(
    database: Database, segments: SegmentFolder, models: Mapping[str, ModelShape]
) -> Iterator[str | None]:
    for model in models.values():
        try:
            with ExitStack() as stack:
                held = [
                    stack.enter_context(snapshot(database, segments, Lock(), phase, fingerprint=model.fingerprint))
                    for phase in get_args(Phase)
                ]
                with database.cursor() as cursor:
                    live = live_misses(cursor, model.fingerprint)
                for part, phases in parts_of(*held):
                    yield _count_fault(part, phases, model, live.get(part.content_id))
        except StorageError as error:
            # What could not be read ends the reading of this model.
            yield f"model {model.fingerprint}: {error.message}"


def _count_fault(part: StoredPart, phases: list[StoredPhase], model: ModelShape, live: LiveMisses | None) -> str | None:
    try:
        session = session_of(part, phases).model_copy(update={"live": live})
        check_session(session, model, field=f"part {part.content_id}")
    except ValueError as error:
        return str(error) if part.content_id in str(error) else f"part {part.content_id}: {error}"
    found = session.content_id(model.fingerprint)
    fault = None if live is None else _live_fault(live)
    if fault is not None:
        return f"part {part.content_id}: {fault}"
    return None if found == part.content_id else f"part {part.content_id}: found counts with content id {found}"


def _live_fault(live: LiveMisses) -> str | None:
    try:
        LiveMisses.model_validate(live.model_dump(warnings=False))
    except ValidationError as error:
        return f"found measurements with {error.error_count()} faults, expected none"
    return None


def _orphans(database: Database) -> Iterator[str | None]:
    for text, query in _ORPHANS:
        yield None
        for row in _rows(database, query):
            yield text.format(row[0])


def _segment_files(database: Database, segments: SegmentFolder) -> Iterator[str | None]:
    """Read every file that is known, page checksums included; what else lies in the folder does not count."""
    for name, n_rows, n_bytes in _rows(database, "SELECT name, n_rows, n_bytes FROM segments ORDER BY name"):
        path = segments.path / name
        try:
            found_bytes = path.stat().st_size
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                found_rows = sum(batch.num_rows for batch in file.iter_batches(BATCH_ROWS))
        except (pa.ArrowException, OSError) as error:
            yield f"segment {name}: {error}"
            continue
        found, expected = (found_rows, found_bytes), (n_rows, n_bytes)
        yield None if found == expected else f"segment {name}: found (rows, bytes) {found}, expected {expected}"
