"""What is known of workloads' drift, and what it is found out from, in the database. Functions of a cursor."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from dataclasses import dataclass

import duckdb

from spark_runtime.placement import Interval
from spark_service.db.history import body_of
from spark_service.drift import State

__all__ = [
    "RanWith",
    "count_since",
    "forget_session",
    "load_states",
    "newest_sequence",
    "parts_with_profile",
    "promised_bodies",
    "save_state",
    "watched_workloads",
]

_EPOCH = dt.date(1970, 1, 1)
_RAN = (
    "FROM live JOIN parts USING (content_id) "
    "WHERE fingerprint = $fingerprint AND workload = $workload AND profile_workload = workload"
)
_RATES = (
    "promised",
    "promised_low",
    "promised_high",
    "measured",
    "measured_low",
    "measured_high",
)


@dataclass(frozen=True, slots=True)
class RanWith:
    """A part that ran with a manifest of its own workload."""

    content_id: str
    session_hash: str
    day: int
    """When it was received, days since 1970."""
    revision: str
    vram_budget_bytes: int


def load_states(cursor: duckdb.DuckDBPyConnection, fingerprint: str | None = None) -> dict[tuple[str, str], State]:
    """What is known by (fingerprint, workload), sorted; of one model if it is given."""
    rows = cursor.execute(
        "SELECT fingerprint, workload, state, since_day, rebuilt, after_sequence, n_sessions, "  # noqa: S608
        f"{', '.join(_RATES)} FROM drift WHERE fingerprint = coalesce($fingerprint, fingerprint) "
        "ORDER BY fingerprint, workload",
        {"fingerprint": fingerprint},
    ).fetchall()
    return {
        (of, workload): State(
            state=state,
            since_day=None if since is None else (since - _EPOCH).days,
            rebuilt=rebuilt,
            after_sequence=after,
            n_sessions=n_sessions,
            promised=_interval(rates[:3]),
            measured=_interval(rates[3:]),
        )
        for of, workload, state, since, rebuilt, after, n_sessions, *rates in rows
    }


def _interval(ends: list[float | None]) -> Interval | None:
    mean, low, high = ends
    return None if mean is None or low is None or high is None else Interval(mean, low, high)


def save_state(cursor: duckdb.DuckDBPyConnection, fingerprint: str, workload: str, state: State) -> None:
    """Keep what is known in the place of what was."""
    rates = [
        end
        for interval in (state.promised, state.measured)
        for end in ((None,) * 3 if interval is None else (interval.mean, interval.low, interval.high))
    ]
    cursor.execute(
        "INSERT OR REPLACE INTO drift VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            fingerprint,
            workload,
            state.state,
            None if state.since_day is None else _EPOCH + dt.timedelta(days=state.since_day),
            state.rebuilt,
            state.after_sequence,
            state.n_sessions,
            *rates,
        ],
    )


def forget_session(cursor: duckdb.DuckDBPyConnection, session_hash: str) -> None:
    """Forget the rates of workloads that a session is part of; before its rows are deleted, in the same transaction.

    Their manifests are forgotten with it, so whatever is served from now on tells of the traffic since the change.
    """
    columns = ", ".join(f"{name} = NULL" for name in _RATES)
    cursor.execute(
        f"UPDATE drift SET n_sessions = 0, after_sequence = -1, {columns} WHERE (fingerprint, workload) IN "  # noqa: S608
        "(SELECT (fingerprint, workload) FROM parts WHERE session_hash = ?)",
        [session_hash],
    )


def watched_workloads(cursor: duckdb.DuckDBPyConnection) -> list[tuple[str, str]]:
    """(fingerprint, workload) of everything that there is evidence or knowledge of, sorted."""
    rows = cursor.execute(
        "SELECT DISTINCT fingerprint, workload FROM live JOIN parts USING (content_id) "
        "WHERE profile_workload = workload UNION SELECT fingerprint, workload FROM drift ORDER BY ALL"
    ).fetchall()
    return [(row[0], row[1]) for row in rows]


def parts_with_profile(cursor: duckdb.DuckDBPyConnection, fingerprint: str, workload: str, most: int) -> list[RanWith]:
    """The latest parts that ran with a manifest of their workload, in order of (day, content id)."""
    rows = cursor.execute(
        "SELECT content_id, session_hash, received_day - DATE '1970-01-01', profile_revision, vram_budget_bytes "
        f"{_RAN} ORDER BY received_day DESC, content_id DESC LIMIT $most",
        {"fingerprint": fingerprint, "workload": workload, "most": most},
    ).fetchall()
    return [RanWith(*row) for row in reversed(rows)]


def promised_bodies(
    cursor: duckdb.DuckDBPyConnection,
    fingerprint: str,
    workload: str,
    after_sequence: int,
    wanted: Collection[tuple[str, int]],
) -> dict[tuple[str, int], list[bytes]]:
    """Manifests for decode by (revision, budget in bytes), the latest first, of those ``wanted``.

    Left out are revisions that were served by ``after_sequence``, whatever the budget.
    """
    rows = cursor.execute(
        "SELECT revision, vram_bytes, body_bytes, body_zstd, sha256 FROM manifests AS one "
        "WHERE fingerprint = $fingerprint AND workload = $workload AND phase = 'decode' "
        "AND list_contains($revisions, revision) AND NOT EXISTS (SELECT 1 FROM manifests AS other "
        "WHERE other.fingerprint = one.fingerprint AND other.workload = one.workload "
        "AND other.revision = one.revision AND other.sequence <= $after) ORDER BY sequence DESC",
        {
            "fingerprint": fingerprint,
            "workload": workload,
            "after": after_sequence,
            "revisions": sorted({revision for revision, _ in wanted}),
        },
    ).fetchall()
    found: dict[tuple[str, int], list[bytes]] = {}
    for revision, budget, *stored in rows:
        if (revision, budget) in wanted:
            found.setdefault((revision, budget), []).append(body_of(*stored))
    return found


def newest_sequence(cursor: duckdb.DuckDBPyConnection, fingerprint: str, workload: str) -> int:
    """Of a workload's manifests, the number of the one served for the first time last; -1 without any."""
    [(newest,)] = cursor.execute(
        "SELECT coalesce(max(sequence)::BIGINT, -1) FROM manifests WHERE fingerprint = ? AND workload = ?",
        [fingerprint, workload],
    ).fetchall()
    return int(newest)


def count_since(cursor: duckdb.DuckDBPyConnection, fingerprint: str, workload: str, day: int) -> tuple[int, int]:
    """Calibration and held-out sessions with decode counts whose last part was received on a day or later."""
    rows = cursor.execute(
        "SELECT split, count(*) FROM (SELECT session_hash, split, max(received_day) AS day FROM parts "
        "JOIN (SELECT content_id FROM histograms WHERE phase = 'decode' "
        "UNION ALL SELECT content_id FROM segment_rows WHERE phase = 'decode') USING (content_id) "
        "WHERE fingerprint = ? AND workload = ? GROUP BY ALL) WHERE day >= ? GROUP BY split",
        [fingerprint, workload, _EPOCH + dt.timedelta(days=day)],
    ).fetchall()
    sides = {split: int(count) for split, count in rows}
    return sides.get("calibration", 0), sides.get("held_out", 0)
