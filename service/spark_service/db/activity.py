"""What was received, in numbers: for people to look at, never for a profile. Functions of a cursor."""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from dataclasses import dataclass

import duckdb

__all__ = [
    "OTHER_VERSIONS",
    "AgentCounts",
    "AgentUploads",
    "LiveSize",
    "Received",
    "SessionsOfDay",
    "live_sizes",
    "received",
    "session_parts",
    "sessions_by_day",
    "uploads_by_version",
]

OTHER_VERSIONS = "other"
"""Whatever looks like no version, and those beyond the first few of a day: anybody who may upload can name any."""
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!-]{0,31}")
_MOST_VERSIONS_A_DAY = 64
_EPOCH = "DATE '1970-01-01'"


@dataclass(frozen=True, slots=True)
class SessionsOfDay:
    """Sessions of a workload whose last part came on a day."""

    fingerprint: str
    workload: str
    day: int
    """Days since 1970."""
    calibration: int
    held_out: int


@dataclass(frozen=True, slots=True)
class AgentUploads:
    """What agents of one version sent."""

    version: str
    uploads: int
    histograms: int
    last_day: int
    """Days since 1970."""


@dataclass(frozen=True, slots=True)
class LiveSize:
    """Sessions of a workload that ran with slots of one size."""

    fingerprint: str
    workload: str
    resident_bytes: int
    with_profile: bool
    n_sessions: int


@dataclass(frozen=True, slots=True)
class Received:
    """How many rows there are of each kind."""

    models: int
    workloads: int
    sessions: int
    parts: int
    """Histograms as they were sent; a long session has several."""
    calibration: int
    held_out: int
    """Sessions by side of the split."""
    prefill: int
    decode: int
    """Parts with counts of the phase."""
    live: int
    with_profile: int
    """Of ``live``: those that followed a manifest."""
    receipts: int
    versions: int
    deleted_sessions: int
    expired_parts: int
    first_day: int | None
    last_day: int | None
    """Days since 1970."""


class AgentCounts:
    """Uploads by version that are not in the database yet. Not for several threads.

    A statement in every commit would cost uploads more than these numbers are worth.
    """

    def __init__(self) -> None:
        self._uploads, self._histograms = Counter[str](), Counter[str]()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._uploads)

    def add(self, version: str, histograms: int) -> None:
        """Count an upload; what looks like no version, and what comes after too many, is one."""
        known = version in self._uploads or len(self._uploads) < _MOST_VERSIONS_A_DAY
        name = version if known and _VERSION.fullmatch(version) else OTHER_VERSIONS
        self._uploads[name] += 1
        self._histograms[name] += histograms

    def store(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Add them to those of the day."""
        found = cursor.execute("SELECT agent_version FROM agent_uploads WHERE received_day = current_date").fetchall()
        versions = {row[0] for row in found}
        for name, uploads in self._uploads.items():
            kept = name if name in versions or len(versions) < _MOST_VERSIONS_A_DAY else OTHER_VERSIONS
            versions.add(kept)
            cursor.execute(
                "INSERT INTO agent_uploads (agent_version, uploads, histograms) VALUES (?, ?, ?) "
                "ON CONFLICT DO UPDATE SET uploads = uploads + excluded.uploads, "
                "histograms = histograms + excluded.histograms",
                [kept, uploads, self._histograms[name]],
            )


def sessions_by_day(cursor: duckdb.DuckDBPyConnection) -> list[SessionsOfDay]:
    """Every session once, under the day of its last part; sorted."""
    rows = cursor.execute(
        f"SELECT fingerprint, workload, day - {_EPOCH}, count(*) FILTER (split = 'calibration'), "  # noqa: S608
        "count(*) FILTER (split = 'held_out') FROM (SELECT fingerprint, workload, session_hash, any_value(split) AS "
        "split, max(received_day) AS day FROM parts GROUP BY ALL) GROUP BY fingerprint, workload, day ORDER BY ALL"
    ).fetchall()
    return [SessionsOfDay(*row) for row in rows]


def uploads_by_version(cursor: duckdb.DuckDBPyConnection, since: dt.date) -> list[AgentUploads]:
    """What came since a day, by version, those that sent most first."""
    rows = cursor.execute(
        "SELECT agent_version, sum(uploads)::BIGINT, sum(histograms)::BIGINT, "  # noqa: S608
        f"max(received_day) - {_EPOCH} FROM agent_uploads "
        "WHERE received_day >= ? GROUP BY agent_version ORDER BY 3 DESC, 1",
        [since],
    ).fetchall()
    return [AgentUploads(*row) for row in rows]


def live_sizes(cursor: duckdb.DuckDBPyConnection, since: dt.date) -> list[LiveSize]:
    """Video memory that sessions since a day had for experts. A session with several sizes counts once in each."""
    rows = cursor.execute(
        "SELECT fingerprint, workload, resident_bytes::BIGINT, profile_workload IS NOT NULL AS followed, "
        "count(DISTINCT session_hash) FROM live JOIN parts USING (content_id) WHERE received_day >= ? "
        "GROUP BY fingerprint, workload, resident_bytes, followed ORDER BY ALL",
        [since],
    ).fetchall()
    return [LiveSize(*row) for row in rows]


def received(cursor: duckdb.DuckDBPyConnection) -> Received:
    """Count everything that came in and is still there."""
    [parts] = cursor.execute(
        "SELECT count(DISTINCT workload), count(DISTINCT session_hash), count(*), "  # noqa: S608
        "count(DISTINCT session_hash) FILTER (split = 'calibration'), "
        "count(DISTINCT session_hash) FILTER (split = 'held_out'), "
        f"min(received_day) - {_EPOCH}, max(received_day) - {_EPOCH} FROM parts"
    ).fetchall()
    workloads, sessions, n_parts, calibration, held_out, first_day, last_day = parts
    phases = dict(
        cursor.execute(
            "SELECT phase, count(*) FROM (SELECT phase FROM histograms UNION ALL SELECT phase FROM segment_rows) "
            "GROUP BY phase"
        ).fetchall()
    )
    [(live, with_profile)] = cursor.execute("SELECT count(*), count(profile_workload) FROM live").fetchall()
    counts = {
        table: cursor.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0]  # noqa: S608  this module's own names
        for table in ("models", "uploads", "deleted_sessions", "expired_parts")
    }
    [(versions,)] = cursor.execute("SELECT count(DISTINCT agent_version) FROM agent_uploads").fetchall()
    return Received(
        models=counts["models"],
        workloads=workloads,
        sessions=sessions,
        parts=n_parts,
        calibration=calibration,
        held_out=held_out,
        prefill=phases.get("prefill", 0),
        decode=phases.get("decode", 0),
        live=live,
        with_profile=with_profile,
        receipts=counts["uploads"],
        versions=versions,
        deleted_sessions=counts["deleted_sessions"],
        expired_parts=counts["expired_parts"],
        first_day=first_day,
        last_day=last_day,
    )


def session_parts(cursor: duckdb.DuckDBPyConnection, session_hash: str) -> tuple[int, list[str]]:
    """How many parts a session has, and under which workloads they are."""
    rows = cursor.execute(
        "SELECT workload, count(*) FROM parts WHERE session_hash = ? GROUP BY workload ORDER BY workload",
        [session_hash],
    ).fetchall()
    return sum(row[1] for row in rows), [row[0] for row in rows]
