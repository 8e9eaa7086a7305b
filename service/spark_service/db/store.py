"""What the service keeps, and how it is read back as arrays."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import duckdb
import pyarrow as pa

from spark_schemas.api import UploadReceipt
from spark_schemas.histogram import HistogramUpload, SessionHistogram
from spark_schemas.ids import Phase
from spark_schemas.model import ExpertLayer, ModelShape
from spark_service.db.connection import Database
from spark_service.db.migrate import migrate, pending
from spark_service.db.rows import histograms_table, parts_from_table, parts_table
from spark_service.db.snapshot import copy_snapshot, link_files
from spark_service.errors import RequestError, StorageError
from spark_service.sessions import SessionPart

__all__ = ["PartKey", "Store"]


@dataclass(frozen=True, slots=True)
class PartKey:
    """Identity of a stored part, without its counts."""

    content_id: str
    workload: str
    session_hash: str


class Store:
    """Histograms, models and receipts in one database. All methods block; all may be called from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # DuckDB would let two writers race and fail one of them; here the second one waits.
        self._writing = threading.Lock()
        self._copying = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, memory: str = "1GB", threads: int = 2) -> Self:
        """Open or create the database at ``path`` and bring its schema up to date.

        Raises :class:`DatabaseError` and :class:`StorageError`; the file is closed again then.
        """
        database = Database(path, memory=memory, threads=threads)
        try:
            migrate(database)
        except BaseException:
            database.close(checkpoint=False)
            raise
        return cls(database)

    def close(self) -> None:
        """Wait for a running write and a running copy, then checkpoint and close."""
        with self._copying, self._writing:
            self._database.close()

    @property
    def path(self) -> Path:
        """The database file."""
        return self._database.path

    def copy_to(self, database: Path, *, beside: Path, beside_copy: Path) -> None:
        """Copy what is committed now, into files that must not exist, while uploads go on.

        ``beside`` is the folder of immutable files that belongs to the database; they are linked into ``beside_copy``
        at the same moment. Raises :class:`StorageError`.
        """
        with self._copying, ExitStack() as stack:
            # Writers wait for the checkpoint and the links, not for the copy.
            with self._writing:
                descriptor = stack.enter_context(self._database.frozen())
                link_files(beside, beside_copy)
            copy_snapshot(descriptor, database)

    def require_ready(self) -> None:
        """Raise :class:`StorageError` or :class:`MigrationError` unless the database answers and is migrated."""
        missing = pending(self._database)
        if missing:
            names = ", ".join(f"{migration.version:04d}_{migration.name}" for migration in missing)
            raise StorageError(f"migrations missing: {names}", "run spark-service migrate")

    def add_upload(self, upload: HistogramUpload, idempotency_key: str, body_sha256: str) -> UploadReceipt:
        """Store an upload in one transaction and return its receipt once that is committed.

        The same key and body give the first receipt again. Histograms already stored, and those of deleted sessions,
        count as duplicates. Raises :class:`RequestError` for a key used with another body and for a model that
        contradicts the stored one; :class:`StorageError` when nothing could be stored.
        """
        with self._writing, self._database.transaction() as cursor:
            # Always fetchall: a result that is not read to its end blocks the cursor.
            earlier = cursor.execute(
                "SELECT body_sha256, accepted, duplicates FROM uploads WHERE idempotency_key = ?", [idempotency_key]
            ).fetchall()
            if earlier:
                stored_sha256, accepted, duplicates = earlier[0]
                _require_same_body(stored_sha256, body_sha256)
                return UploadReceipt(accepted=accepted, duplicates=duplicates)
            _put_model(cursor, upload.model)
            fresh = _fresh_sessions(cursor, upload)
            if fresh:
                _insert(cursor, "parts", parts_table(fresh, upload.model.fingerprint))
                _insert(cursor, "histograms", histograms_table(fresh))
            receipt = UploadReceipt(accepted=len(fresh), duplicates=len(upload.sessions) - len(fresh))
            cursor.execute(
                "INSERT INTO uploads VALUES (?, ?, ?, ?)",
                [idempotency_key, body_sha256, receipt.accepted, receipt.duplicates],
            )
        return receipt

    def delete_session(self, session_hash: str) -> int:
        """Remove every part of a session, for all models and workloads, and keep it from coming back.

        Return the number of parts removed.
        """
        with self._writing, self._database.transaction() as cursor:
            cursor.execute("INSERT INTO deleted_sessions VALUES (?) ON CONFLICT DO NOTHING", [session_hash])
            ids = cursor.execute("SELECT content_id FROM parts WHERE session_hash = ?", [session_hash]).fetchall()
            cursor.execute(
                "DELETE FROM histograms WHERE content_id IN (SELECT content_id FROM parts WHERE session_hash = ?)",
                [session_hash],
            )
            cursor.execute("DELETE FROM parts WHERE session_hash = ?", [session_hash])
        return len(ids)

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
                "SELECT content_id, workload, session_hash FROM parts JOIN histograms USING (content_id) "
                "WHERE fingerprint = ? AND phase = ? ORDER BY content_id",
                [fingerprint, phase],
            ).fetchall()
        return [PartKey(*row) for row in rows]

    def parts(self, content_ids: Sequence[str], phase: Phase) -> list[SessionPart]:
        """Parts with their counts, sorted by content id; ids deleted in the meantime are absent."""
        wanted = pa.table({"content_id": pa.array(content_ids, pa.string())})
        with self._database.cursor() as cursor:
            cursor.register("wanted", wanted)
            table = cursor.sql(
                "SELECT content_id, workload, session_hash, tokens, n_experts, counts, reuse "
                "FROM wanted JOIN parts USING (content_id) JOIN histograms USING (content_id) "
                "WHERE phase = $phase ORDER BY content_id",
                params={"phase": phase},
            ).to_arrow_table()
        return parts_from_table(table)


def _require_same_body(stored_sha256: str, body_sha256: str) -> None:
    if stored_sha256 != body_sha256:
        raise RequestError(
            422,
            "idempotency_key_reused",
            "Idempotency-Key: found one that was used with another body, expected a new key for new content",
            field="header.Idempotency-Key",
            hint="send each upload under a key of its own, and repeat the key only to repeat the same bytes",
        )


def _get_model(cursor: duckdb.DuckDBPyConnection, fingerprint: str) -> ModelShape | None:
    rows = cursor.execute("SELECT shape_json FROM models WHERE fingerprint = ?", [fingerprint]).fetchall()
    return ModelShape.model_validate_json(rows[0][0]) if rows else None


def _put_model(cursor: duckdb.DuckDBPyConnection, model: ModelShape) -> None:
    stored = _get_model(cursor, model.fingerprint)
    if stored is None:
        cursor.execute(
            "INSERT INTO models VALUES (?, ?, ?)", [model.fingerprint, model.sibling, model.model_dump_json()]
        )
    elif difference := _difference(stored, model):
        field, found, expected = difference
        raise RequestError(
            409,
            "model_mismatch",
            f"{field}: found {found}, expected {expected}, as stored with the first upload of {model.fingerprint}",
            field=field,
            found=found,
            expected=expected,
            hint="two agents disagree about one fingerprint: bring both to the same version of spark-moe",
        )


def _difference(stored: ModelShape, sent: ModelShape) -> tuple[str, str, str] | None:
    """First difference as (field, found, expected). The name is a label, not a shape, and may differ."""
    if len(sent.layers) != len(stored.layers):
        return "model.layers", f"{len(sent.layers)} layers", f"{len(stored.layers)} layers"
    for name in ModelShape.model_fields:
        found, expected = getattr(sent, name), getattr(stored, name)
        if name not in ("name", "layers") and found != expected:
            return f"model.{name}", repr(found), repr(expected)
    for index, (found, expected) in enumerate(zip(sent.layers, stored.layers, strict=True)):
        for name in ExpertLayer.model_fields:
            one, other = getattr(found, name), getattr(expected, name)
            if one != other:
                return f"model.layers[{index}].{name}", repr(one), repr(other)
    return None


def _fresh_sessions(cursor: duckdb.DuckDBPyConnection, upload: HistogramUpload) -> dict[str, SessionHistogram]:
    """Histograms by content id that are neither stored nor of a deleted session."""
    sessions = {session.content_id(upload.model.fingerprint): session for session in upload.sessions}
    known = _column(cursor, "SELECT content_id FROM parts JOIN wanted ON content_id = id", list(sessions))
    hashes = [session.session_hash for session in sessions.values()]
    deleted = _column(cursor, "SELECT session_hash FROM deleted_sessions JOIN wanted ON session_hash = id", hashes)
    return {
        content_id: session
        for content_id, session in sessions.items()
        if content_id not in known and session.session_hash not in deleted
    }


def _column(cursor: duckdb.DuckDBPyConnection, query: str, wanted: list[str]) -> set[str]:
    cursor.register("wanted", pa.table({"id": pa.array(wanted, pa.string())}))
    try:
        return {row[0] for row in cursor.execute(query).fetchall()}
    finally:
        cursor.unregister("wanted")


def _insert(cursor: duckdb.DuckDBPyConnection, table: str, batch: pa.Table) -> None:
    cursor.register("batch", batch)
    try:
        # Table names are this module's own.
        cursor.execute(f"INSERT INTO {table} BY NAME SELECT * FROM batch")  # noqa: S608
    finally:
        cursor.unregister("batch")
