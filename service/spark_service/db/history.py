"""Manifests that were served: kept as the bytes that were signed, bounded per question, found again by revision.

A manifest adds up many sessions' counts. Those of a workload that a deleted session belonged to, and of every mix with
that workload, are forgotten with the session, so that no rollback releases its counts again.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Protocol

import duckdb
import zstandard

from spark_schemas.ids import Phase
from spark_service.errors import StorageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["MAX_OF_MIXES", "MAX_PER_PROFILE", "ManifestHistory", "Question", "Served", "body_of", "forget_session"]

MAX_PER_PROFILE = 1000
"""Manifests of one profile over all budgets: whoever asks for ever new budgets must not fill the disk."""
MAX_OF_MIXES = 1000
"""Manifests of all mixes of a model in a phase: nor must whoever asks for ever new mixes."""
_KEY = "fingerprint = ? AND workload = ? AND phase = ? AND vram_bytes = ? AND n_ctx = ? AND reserve_bytes = ?"
_PROFILE = "fingerprint = ? AND workload = ? AND phase = ?"
_MIXES = "fingerprint = ? AND contains(workload, '+') AND phase = ?"


@dataclass(frozen=True, slots=True)
class Question:
    """What a manifest answers: a profile's name (``workload`` may be a mix) and a memory budget, bytes and tokens."""

    fingerprint: str
    workload: str
    phase: Phase
    vram_bytes: int
    n_ctx: int
    reserve_bytes: int


@dataclass(frozen=True, slots=True)
class Served:
    """One manifest of the past, without its bytes."""

    revision: str
    sha256: str
    body_bytes: int
    first_served_day: dt.date


class _Rows(Protocol):
    """What the history needs of the store."""

    def reading(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]: ...

    def writing(self, *, counted: bool = True) -> AbstractContextManager[duckdb.DuckDBPyConnection]: ...


class ManifestHistory:
    """Manifests served and revisions pinned, in the store's database. Every method raises :class:`StorageError`."""

    def __init__(self, store: _Rows, *, kept: int) -> None:
        """Keep the latest ``kept`` manifests of every question, and those of a pinned revision."""
        self._store = store
        self._kept = kept

    def deletions(self) -> int:
        """How many sessions were ever deleted: to be read before a manifest is built that :meth:`record` is to keep."""
        with self._store.reading() as cursor:
            return _deletions(cursor)

    def record(self, question: Question, revision: str, body: bytes, *, deletions: int) -> bool:
        """Keep a manifest that is about to be served; return whether it was new. One that is known costs a read.

        Nothing is kept when a session was deleted since ``deletions`` were counted: its counts may be in the manifest.
        """
        sha256 = hashlib.sha256(body).hexdigest()
        with self._store.reading() as cursor:
            if _is_known(cursor, question, sha256):
                return False
        # Answers do not change by being remembered.
        with self._store.writing(counted=False) as cursor:
            if _deletions(cursor) != deletions or _is_known(cursor, question, sha256):
                return False
            cursor.execute(
                "INSERT INTO manifests (fingerprint, workload, phase, vram_bytes, n_ctx, reserve_bytes, revision, "
                "sha256, body_bytes, body_zstd, sequence) "
                "SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, coalesce(max(sequence) + 1, 0) FROM manifests",
                [*astuple(question), revision, sha256, len(body), zstandard.ZstdCompressor().compress(body)],
            )
            name = [question.fingerprint, question.workload, question.phase]
            bounds = [(_KEY, list(astuple(question)), self._kept), (_PROFILE, name, MAX_PER_PROFILE)]
            if "+" in question.workload:
                bounds.append((_MIXES, [question.fingerprint, question.phase], MAX_OF_MIXES))
            for of, values, kept in bounds:
                cursor.execute(
                    f"DELETE FROM manifests WHERE {of} AND sequence NOT IN "  # noqa: S608
                    f"(SELECT sequence FROM manifests WHERE {of} ORDER BY sequence DESC LIMIT ?) "
                    "AND NOT EXISTS (FROM manifest_pins AS pin WHERE pin.fingerprint = manifests.fingerprint "
                    "AND pin.workload = manifests.workload AND pin.phase = manifests.phase "
                    "AND pin.revision = manifests.revision)",
                    [*values, *values, kept],
                )
        return True

    def served(self, question: Question) -> list[Served]:
        """All manifests kept for a question, the latest first."""
        with self._store.reading() as cursor:
            rows = cursor.execute(
                "SELECT revision, sha256, body_bytes, first_served_day FROM manifests "  # noqa: S608
                f"WHERE {_KEY} ORDER BY sequence DESC",
                astuple(question),
            ).fetchall()
        return [Served(*row) for row in rows]

    def body(self, question: Question, revision: str) -> bytes | None:
        """The latest bytes served for a question at a revision."""
        with self._store.reading() as cursor:
            rows = cursor.execute(
                f"SELECT body_bytes, body_zstd, sha256 FROM manifests WHERE {_KEY} AND revision = ? "  # noqa: S608
                "ORDER BY sequence DESC LIMIT 1",
                [*astuple(question), revision],
            ).fetchall()
        return body_of(*rows[0]) if rows else None

    def body_of_any_budget(self, fingerprint: str, workload: str, phase: Phase, revision: str) -> bytes | None:
        """The latest bytes served at a revision, whatever the budget."""
        with self._store.reading() as cursor:
            rows = cursor.execute(
                f"SELECT body_bytes, body_zstd, sha256 FROM manifests WHERE {_PROFILE} AND revision = ? "  # noqa: S608
                "ORDER BY sequence DESC LIMIT 1",
                [fingerprint, workload, phase, revision],
            ).fetchall()
        return body_of(*rows[0]) if rows else None

    def revisions(self, fingerprint: str, workload: str, phase: Phase) -> list[str]:
        """Revisions that can be pinned, the latest first."""
        with self._store.reading() as cursor:
            rows = cursor.execute(
                f"SELECT revision FROM manifests WHERE {_PROFILE} GROUP BY revision "  # noqa: S608
                "ORDER BY max(sequence) DESC",
                [fingerprint, workload, phase],
            ).fetchall()
        return [row[0] for row in rows]

    def pinned(self, fingerprint: str, workload: str, phase: Phase) -> str | None:
        """The revision that is served in place of the newest."""
        with self._store.reading() as cursor:
            rows = cursor.execute(
                f"SELECT revision FROM manifest_pins WHERE {_PROFILE}",  # noqa: S608
                [fingerprint, workload, phase],
            ).fetchall()
        return rows[0][0] if rows else None

    def pin(self, fingerprint: str, workload: str, phase: Phase, revision: str) -> bool:
        """Serve a revision until further notice; return whether it is one that is kept (nothing is pinned if not)."""
        name = [fingerprint, workload, phase]
        with self._store.writing() as cursor:
            known = cursor.execute(
                f"SELECT 1 FROM manifests WHERE {_PROFILE} AND revision = ? LIMIT 1",  # noqa: S608
                [*name, revision],
            ).fetchall()
            if known:
                cursor.execute(
                    "INSERT INTO manifest_pins (fingerprint, workload, phase, revision) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT DO UPDATE SET revision = excluded.revision, pinned_day = excluded.pinned_day",
                    [*name, revision],
                )
        return bool(known)

    def unpin(self, fingerprint: str, workload: str, phase: Phase) -> str | None:
        """Serve the newest again; return the revision that was pinned."""
        with self._store.writing() as cursor:
            rows = cursor.execute(
                f"DELETE FROM manifest_pins WHERE {_PROFILE} RETURNING revision",  # noqa: S608
                [fingerprint, workload, phase],
            ).fetchall()
        return rows[0][0] if rows else None


def forget_session(cursor: duckdb.DuckDBPyConnection, session_hash: str) -> None:
    """Forget every manifest of a workload that a session is part of, and its pin; call before its rows are removed.

    A mix is of all its workloads, and other quantisations of the model may have been lent the profile.
    """
    found = cursor.execute(
        "SELECT fingerprint, list(DISTINCT workload) FROM parts WHERE session_hash = ? GROUP BY fingerprint",
        [session_hash],
    ).fetchall()
    for fingerprint, workloads in found:
        for table in ("manifests", "manifest_pins"):
            cursor.execute(
                f"DELETE FROM {table} WHERE fingerprint IN (SELECT other.fingerprint FROM models AS own "  # noqa: S608
                "JOIN models AS other USING (sibling) WHERE own.fingerprint = ?) AND list_has_any(?, "
                "list_transform(string_split(workload, '+'), lambda member: string_split(member, ':')[1]))",
                [fingerprint, workloads],
            )


def _deletions(cursor: duckdb.DuckDBPyConnection) -> int:
    return int(cursor.execute("SELECT count(*) FROM deleted_sessions").fetchall()[0][0])


def _is_known(cursor: duckdb.DuckDBPyConnection, question: Question, sha256: str) -> bool:
    rows = cursor.execute(
        f"SELECT 1 FROM manifests WHERE {_KEY} AND sha256 = ?",  # noqa: S608
        [*astuple(question), sha256],
    ).fetchall()
    return bool(rows)


def body_of(body_bytes: int, packed: bytes, sha256: str) -> bytes:
    """A stored manifest as it was served. Raises :class:`StorageError` where it is damaged."""
    try:
        body = zstandard.ZstdDecompressor().decompress(packed, max_output_size=max(body_bytes, 1))
    except zstandard.ZstdError as error:
        raise StorageError(f"manifest {sha256}: its stored bytes are damaged ({error})", "restore a backup") from error
    if hashlib.sha256(body).hexdigest() != sha256:
        raise StorageError(f"manifest {sha256}: its stored bytes are not those that were served", "restore a backup")
    return body
