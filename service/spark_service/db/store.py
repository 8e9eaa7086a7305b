"""What the service keeps, and how it is read back as arrays."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from spark_runtime.calibration.sessions import SessionPart
from spark_schemas.api import UploadReceipt
from spark_schemas.histogram import HistogramUpload
from spark_schemas.ids import Phase
from spark_schemas.model import ModelShape
from spark_service.db.activity import AgentCounts
from spark_service.db.aging import age_out, registered_segments
from spark_service.db.audit import record, record_uploads
from spark_service.db.batch import Batch, KeyedUpload, Known, StoredReceipt, plan_batch
from spark_service.db.connection import Database
from spark_service.db.live import live_columns
from spark_service.db.migrate import migrate, pending
from spark_service.db.removal import Removal
from spark_service.db.rows import (
    PART_COLUMNS,
    histograms_table,
    parts_from_table,
    repacked_table,
)
from spark_service.db.scan import snapshot
from spark_service.db.segments import SegmentFolder
from spark_service.db.snapshot import copy_log, copy_snapshot, link_files
from spark_service.db.tallies import Counted, TallyKey, save_tally
from spark_service.errors import RequestError, StorageError
from spark_service.group_commit import GroupCommit
from spark_service.packed import pack_upload

__all__ = ["PartKey", "Store"]

ROWS_PER_READ = 1024
"""Each read looks through all content ids once, and holds the counts of so many histograms."""


@dataclass(frozen=True, slots=True)
class PartKey:
    """Identity of a stored part, without its counts."""

    content_id: str
    workload: str
    session_hash: str


class Store:
    """Histograms, models and receipts in one database. All methods block; all may be called from any thread."""

    def __init__(self, database: Database, segments: SegmentFolder) -> None:
        self._database = database
        self._segments = segments
        # DuckDB would let two writers race and fail one of them; here the second one waits.
        self._writing = threading.Lock()
        self._copying = threading.Lock()
        self._deletions = 0
        self._agents = AgentCounts()
        self._group_commit = GroupCommit(self.add_batch)

    @classmethod
    def open(cls, path: Path, *, memory: str = "256MB", threads: int = 2, segments: Path | None = None) -> Self:
        """Open or create the database at ``path`` and bring its schema up to date.

        ``segments`` is the folder of histograms that have aged out, beside the database if it is not given.
        Raises :class:`DatabaseError` and :class:`StorageError`; the file is closed again then.
        """
        database = Database(path, memory=memory, threads=threads)
        try:
            migrate(database)
            _repack(database)
            store = cls(database, SegmentFolder(path.with_name("segments") if segments is None else segments))
            store.sweep_segments()
        except BaseException:
            database.close(checkpoint=False)
            raise
        return store

    def close(self) -> None:
        """Commit what was submitted, wait for a running write and a running copy, then checkpoint and close."""
        self._group_commit.close()
        try:
            self.flush_agents()
        finally:
            with self._copying, self._writing:
                self._database.close()

    @property
    def path(self) -> Path:
        """The database file."""
        return self._database.path

    def copy_to(self, database: Path, segments: Path) -> None:
        """Copy what is committed now into a file and a folder that must not exist, while uploads go on.

        The histograms that have aged out are linked, not copied. Raises :class:`StorageError`.
        """
        with self._copying, ExitStack() as stack:
            # Writers wait for the checkpoint, what is left of the log and the links, not for the copy.
            with self._writing:
                descriptor = stack.enter_context(self._database.frozen())
                copy_log(self._database.path, database)
                link_files(self._segments.path, segments)
            copy_snapshot(descriptor, database)

    @property
    def folder(self) -> Path:
        """Where the database is."""
        return self._database.path.parent

    @property
    def generation(self) -> int:
        """A number that every write raises before it is acknowledged: what was read at one holds while it stays."""
        return self._database.generation

    @contextmanager
    def reading(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give a cursor for one use in one thread."""
        with self._database.cursor() as cursor:
            yield cursor

    @contextmanager
    def writing(self, *, counted: bool = True) -> Iterator[duckdb.DuckDBPyConnection]:
        """Wait for other writers and give a cursor inside a transaction.

        Only what changes no answer of the API may leave ``counted`` out.
        """
        with self._writing, self._database.transaction(counted=counted) as cursor:
            yield cursor

    def require_ready(self) -> None:
        """Raise :class:`StorageError` or :class:`MigrationError` unless the database answers and is migrated."""
        missing = pending(self._database)
        if missing:
            names = ", ".join(f"{migration.version:04d}_{migration.name}" for migration in missing)
            raise StorageError(f"migrations missing: {names}", "run spark-service migrate")

    def add_upload(
        self, upload: HistogramUpload, idempotency_key: str, body_sha256: str, actor: str = "cli"
    ) -> UploadReceipt:
        """Store an upload in one transaction and return its receipt once that is committed.

        The same key and body give the first receipt again. Histograms already stored, those removed by age and those
        of deleted sessions count as duplicates. ``actor`` is who the audit log names. Raises :class:`RequestError` for
        a key used with another body and for a model that contradicts the stored one; :class:`StorageError` when nothing
        could be stored.
        """
        [outcome] = self.add_batch([KeyedUpload(pack_upload(upload), idempotency_key, body_sha256, actor)])
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def submit_upload(self, upload: KeyedUpload) -> Future[UploadReceipt]:
        """Queue an upload for the next common commit; the future gets what :meth:`add_upload` returns or raises.

        Raises :class:`OverloadedError` when too much waits already.
        """
        return self._group_commit.submit(upload)

    def add_batch(self, uploads: Sequence[KeyedUpload]) -> list[UploadReceipt | RequestError]:
        """Store uploads in one transaction and return each one's outcome, that of :meth:`add_upload`, in order.

        A refused upload leaves no trace and keeps no other one out. Raises :class:`StorageError` when nothing could be
        stored.
        """
        with self._writing:
            with self._database.transaction() as cursor:
                batch = plan_batch(uploads, _known(cursor, uploads))
                _write(cursor, batch)
            for version, histograms in batch.agents:
                self._agents.add(version, histograms)
        return batch.outcomes

    def flush_agents(self) -> None:
        """Store which versions of the agent have uploaded since the last time; a crash loses what came since then.

        Raises :class:`StorageError`; what could not be stored is tried again at the next call.
        """
        with self._writing:
            if self._agents:
                with self._database.transaction(counted=False) as cursor:
                    self._agents.store(cursor)
                self._agents = AgentCounts()

    def delete_session(self, session_hash: str, actor: str = "cli") -> int:
        """Remove every part of a session, for all models and workloads, and keep it from coming back.

        Return the number of parts removed. ``actor`` is who the audit log names.
        """
        with self.removing("session_hash", session_hash) as (cursor, removal):
            removed = removal.session(cursor, session_hash)
            record(cursor, actor, "session.delete", session_hash, {"removed": removed})
        return removed

    @contextmanager
    def removing(self, column: str, value: str | date) -> Iterator[tuple[duckdb.DuckDBPyConnection, Removal]]:
        """Give the writer's cursor inside a transaction, and what removes the parts that a column's value names."""
        with self._writing:
            removal = Removal.prepared(self._database, self._segments, column, value)
            with self._database.transaction() as cursor:
                yield cursor, removal
                # Before the commit: whoever reads the number after it must not find the old one.
                self._deletions += 1 if removal.removed else 0
            removal.finish()

    @property
    def deletions(self) -> int:
        """Deletions so far: what was read before one may be gone."""
        return self._deletions

    @property
    def segments(self) -> SegmentFolder:
        """Where histograms are that have aged out."""
        return self._segments

    @contextmanager
    def snapshot(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give a cursor that sees the database as it is now, whatever is written meanwhile."""
        with self._database.transaction(counted=False) as cursor:
            yield cursor

    def keep_tally(self, key: TallyKey, counted: Counted, deletions: int) -> bool:
        """Store a tally, unless a session was deleted since the number of :attr:`deletions` was ``deletions``."""
        with self.writing(counted=False) as cursor:
            if self._deletions != deletions:
                return False
            save_tally(cursor, key, counted)
        return True

    def age_out(self, before: date) -> int:
        """Move some of the histograms received before a day into a segment; return how many, 0 once none is left."""
        return age_out(self._database, self._segments, self._writing, before)

    def sweep_segments(self) -> list[str]:
        """Remove files that a crash or an error left in the folder of segments, and return their names."""
        if not self._segments.path.exists():
            return []
        with self._writing:
            with self._database.cursor() as cursor:
                known = registered_segments(cursor)
            return self._segments.sweep(known)

    def model(self, fingerprint: str) -> ModelShape | None:
        """The stored shape of a model."""
        with self._database.cursor() as cursor:
            return _get_model(cursor, fingerprint)

    def models(self) -> list[ModelShape]:
        """All models, by fingerprint."""
        with self._database.cursor() as cursor:
            rows = cursor.execute("SELECT shape_json FROM models ORDER BY fingerprint").fetchall()
        return [ModelShape.model_validate_json(row[0]) for row in rows]

    def siblings(self, sibling: str, workload: str | None = None) -> list[str]:
        """Fingerprints of a model's quantisations that have sessions, of one workload if it is given."""
        with self._database.cursor() as cursor:
            rows = cursor.execute(
                "SELECT DISTINCT fingerprint FROM models JOIN parts USING (fingerprint) "
                "WHERE sibling = $sibling AND workload = coalesce($workload, workload) ORDER BY fingerprint",
                {"sibling": sibling, "workload": workload},
            ).fetchall()
        return [row[0] for row in rows]

    def workloads(self, fingerprint: str) -> list[str]:
        """Workloads with at least one stored part, in any phase."""
        with self._database.cursor() as cursor:
            rows = cursor.execute(
                "SELECT DISTINCT workload FROM parts WHERE fingerprint = ? ORDER BY workload", [fingerprint]
            ).fetchall()
        return [row[0] for row in rows]

    def part_keys(self, fingerprint: str, phase: Phase) -> list[PartKey]:
        """Identities of all parts of a model that have counts in a phase, sorted by content id."""
        with self._database.cursor() as cursor:
            rows = cursor.execute(
                "SELECT content_id, workload, session_hash FROM parts JOIN ("
                "SELECT content_id FROM histograms WHERE phase = $phase "
                "UNION ALL SELECT content_id FROM segment_rows WHERE phase = $phase) USING (content_id) "
                "WHERE fingerprint = $fingerprint ORDER BY content_id",
                {"fingerprint": fingerprint, "phase": phase},
            ).fetchall()
        return [PartKey(*row) for row in rows]

    def parts(self, content_ids: Sequence[str], phase: Phase) -> list[SessionPart]:
        """Parts with their counts, sorted by content id; ids deleted in the meantime are absent."""
        with snapshot(self._database, self._segments, self._writing, phase, content_ids=content_ids) as held:
            tables = held.tables(ROWS_PER_READ, PART_COLUMNS)
            return [part for table in tables for part in parts_from_table(table)]


def _get_model(cursor: duckdb.DuckDBPyConnection, fingerprint: str) -> ModelShape | None:
    rows = cursor.execute("SELECT shape_json FROM models WHERE fingerprint = ?", [fingerprint]).fetchall()
    return ModelShape.model_validate_json(rows[0][0]) if rows else None


def _known(cursor: duckdb.DuckDBPyConnection, uploads: Sequence[KeyedUpload]) -> Known:
    sessions = [session for keyed in uploads for session in keyed.upload.sessions]
    receipts = _lookup(
        cursor,
        "SELECT idempotency_key, body_sha256, accepted, duplicates FROM uploads WHERE idempotency_key IN ?",
        (keyed.idempotency_key for keyed in uploads),
    )
    models = _lookup(
        cursor,
        "SELECT fingerprint, shape_json FROM models WHERE fingerprint IN ?",
        (keyed.upload.model.fingerprint for keyed in uploads),
    )
    content_ids = [
        row
        for table in ("parts", "expired_parts")
        for row in _lookup(
            cursor,
            f"SELECT content_id FROM {table} WHERE content_id IN ?",  # noqa: S608  this module's own names
            (session.content_id for session in sessions),
        )
    ]
    deleted = _lookup(
        cursor,
        "SELECT session_hash FROM deleted_sessions WHERE session_hash IN ?",
        (session.session_hash for session in sessions),
    )
    return Known(
        receipts={
            key: StoredReceipt(sha256, UploadReceipt(accepted=accepted, duplicates=duplicates))
            for key, sha256, accepted, duplicates in receipts
        },
        models={fingerprint: ModelShape.model_validate_json(shape) for fingerprint, shape in models},
        content_ids={row[0] for row in content_ids},
        deleted_sessions={row[0] for row in deleted},
    )


def _lookup(cursor: duckdb.DuckDBPyConnection, query: str, wanted: Iterable[str]) -> list[tuple[Any, ...]]:
    # A list as a parameter goes through the primary key's index; a join would read the whole table at every commit.
    # Always fetchall: a result that is not read to its end blocks the cursor.
    return cursor.execute(query, [sorted(set(wanted))]).fetchall()


def _write(cursor: duckdb.DuckDBPyConnection, batch: Batch) -> None:
    for model in batch.models.values():
        cursor.execute(
            "INSERT INTO models VALUES (?, ?, ?)", [model.fingerprint, model.sibling, model.model_dump_json()]
        )
    if batch.sessions:
        stored = batch.sessions.values()
        parts: dict[str, list[str]] = {
            "content_id": list(batch.sessions),
            "fingerprint": [model.fingerprint for model, _ in stored],
            "workload": [session.workload for _, session in stored],
            "session_hash": [session.session_hash for _, session in stored],
            "split": [session.split for _, session in stored],
        }
        _insert_columns(cursor, "parts", parts)
        if live := live_columns(batch.sessions):
            _insert_columns(cursor, "live", live)
        _insert(cursor, "histograms", histograms_table(batch.sessions))
    if batch.receipts:
        receipts: dict[str, Sequence[object]] = {
            "idempotency_key": list(batch.receipts),
            "body_sha256": [stored.body_sha256 for stored in batch.receipts.values()],
            "accepted": [stored.receipt.accepted for stored in batch.receipts.values()],
            "duplicates": [stored.receipt.duplicates for stored in batch.receipts.values()],
        }
        _insert_columns(cursor, "uploads", receipts)
        record_uploads(cursor, batch.entries)


def _insert_columns(cursor: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, Sequence[object]]) -> None:
    """Insert a few short values: as parameters, because registering an Arrow table costs more than they do."""
    # Names of tables and columns are this module's own.
    values = ", ".join(f"unnest(?) AS {name}" for name in columns)
    cursor.execute(f"INSERT INTO {table} BY NAME SELECT {values}", list(columns.values()))


def _insert(cursor: duckdb.DuckDBPyConnection, table: str, batch: pa.Table) -> None:
    cursor.register("batch", batch)
    try:
        # Table names are this module's own.
        cursor.execute(f"INSERT INTO {table} BY NAME SELECT * FROM batch")  # noqa: S608
    finally:
        cursor.unregister("batch")


def _repack(database: Database) -> None:
    """Move what was stored before migration 2 over, in one transaction, and drop its table."""
    with database.transaction() as cursor, database.cursor() as reader:
        query = "SELECT 1 FROM duckdb_tables() WHERE table_name = 'unpacked_histograms'"
        if not cursor.execute(query).fetchall():
            return
        for rows in reader.sql("SELECT * FROM unpacked_histograms").to_arrow_reader(256):
            _insert(cursor, "histograms", repacked_table(pa.Table.from_batches([rows])))
        cursor.execute("DROP TABLE unpacked_histograms")
