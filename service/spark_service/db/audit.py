"""The audit log: who changed what, and when. Entries are added, never changed.

A deletion names the session's hash in clear. It is a pseudonym without the team's key, ``deleted_sessions`` keeps it
anyway to keep the session away, and who asked for a deletion must be able to prove that it was done. No entry holds
a secret, and those of uploads hold counts only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import duckdb
from pydantic import BaseModel

from spark_schemas.api import UploadReceipt
from spark_service.db.moments import from_utc, to_utc

__all__ = ["AuditEntry", "AuditPage", "entries_after", "entries_before", "record", "record_uploads"]


class AuditEntry(BaseModel):
    """One thing that was done."""

    entry: int
    """Ascending; numbers may be missing."""
    recorded_at: datetime
    actor: str
    """A token's id, ``environment`` for SPARKMOE_SERVICE_TOKEN, ``open`` without tokens, ``cli``, or ``service``."""
    action: str
    object: str
    detail: dict[str, int | str | None]


class AuditPage(BaseModel):
    """Entries in order."""

    entries: list[AuditEntry]
    next_after: int | None
    """Ask for entries after this one to go on; null at the end."""


def record(
    cursor: duckdb.DuckDBPyConnection,
    actor: str,
    action: str,
    object: str,  # noqa: A002  the word of the log
    detail: Mapping[str, int | str | None],
) -> None:
    """Add an entry within the transaction that does what it records."""
    cursor.execute(
        "INSERT INTO audit_log (recorded_at, actor, action, object, detail_json) VALUES (?, ?, ?, ?, ?)",
        [from_utc(datetime.now(UTC)), actor, action, object, json.dumps(dict(detail), sort_keys=True)],
    )


def record_uploads(cursor: duckdb.DuckDBPyConnection, stored: Iterable[tuple[str, str, UploadReceipt]]) -> None:
    """Add what one commit stored, as (actor, fingerprint, receipt): an entry for each actor and model, counts only."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for actor, fingerprint, receipt in stored:
        counts = totals.setdefault((actor, fingerprint), Counter())
        counts.update(uploads=1, accepted=receipt.accepted, duplicates=receipt.duplicates)
    for (actor, fingerprint), counts in totals.items():
        record(cursor, actor, "upload.accept", fingerprint, counts)


def entries_before(cursor: duckdb.DuckDBPyConnection, before: int | None, limit: int) -> AuditPage:
    """Up to ``limit`` entries numbered below ``before``, or the newest, newest first.

    ``next_after`` is the number to go on below.
    """
    rows = cursor.execute(
        "SELECT entry, recorded_at, actor, action, object, detail_json FROM audit_log "
        "WHERE entry < coalesce(?, entry + 1) ORDER BY entry DESC LIMIT ?",
        [before, limit + 1],
    ).fetchall()
    entries = [_entry(row) for row in rows[:limit]]
    return AuditPage(entries=entries, next_after=entries[-1].entry if len(rows) > limit else None)


def entries_after(cursor: duckdb.DuckDBPyConnection, after: int, limit: int) -> AuditPage:
    """Up to ``limit`` entries numbered above ``after``."""
    rows = cursor.execute(
        "SELECT entry, recorded_at, actor, action, object, detail_json FROM audit_log "
        "WHERE entry > ? ORDER BY entry LIMIT ?",
        [after, limit + 1],
    ).fetchall()
    entries = [_entry(row) for row in rows[:limit]]
    return AuditPage(entries=entries, next_after=entries[-1].entry if len(rows) > limit else None)


def _entry(row: tuple[Any, ...]) -> AuditEntry:
    entry, at, actor, action, subject, detail = row
    return AuditEntry(
        entry=entry, recorded_at=to_utc(at), actor=actor, action=action, object=subject, detail=json.loads(detail)
    )
