"""Tallies in the database, and the rows they are counted from. Functions of a cursor; :class:`Store` owns the locks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, cast

import duckdb
import numpy as np
import pyarrow as pa

from spark_schemas.ids import Phase
from spark_service.errors import StorageError
from spark_service.sessions import IntArray, Rows, merge_rows
from spark_service.tally import Tally, tally_of

__all__ = [
    "Counted",
    "TallyKey",
    "forget_day",
    "forget_session",
    "load_tally",
    "newest_number",
    "read_rows",
    "repeated_sessions",
    "rows_of_sessions",
    "save_tally",
    "sessions_after",
]

_AT_ONCE = 256
_EPOCH = date(1970, 1, 1)
_OF_SESSIONS = " AND session_hash IN (SELECT session_hash FROM wanted_sessions)"
_HELD_OUT = " AND split = 'held_out'"
_UP_TO = " AND number <= $number"
_ROWS = (
    "SELECT content_id, session_hash, received_day, number, tokens, counts, reuse "
    "FROM parts JOIN histograms USING (content_id) "
    "WHERE fingerprint = $fingerprint AND workload = $workload AND phase = $phase"
)


@dataclass(frozen=True, slots=True)
class TallyKey:
    """What a tally is of."""

    fingerprint: str
    workload: str
    phase: Phase

    @property
    def values(self) -> dict[str, str]:
        """As SQL parameters."""
        return {"fingerprint": self.fingerprint, "workload": self.workload, "phase": self.phase}


@dataclass(frozen=True, slots=True)
class Counted:
    """A tally of all parts up to a number."""

    tally: Tally
    number: int


def load_tally(cursor: duckdb.DuckDBPyConnection, key: TallyKey) -> Counted | None:
    """The stored tally; ``None`` where there is none, or one that another version wrote."""
    found = cursor.execute(
        "SELECT tally, number FROM tallies "
        "WHERE fingerprint = $fingerprint AND workload = $workload AND phase = $phase",
        key.values,
    ).fetchall()
    if not found:
        return None
    try:
        return Counted(Tally.from_bytes(found[0][0]), found[0][1])
    except ValueError:
        return None  # it is a cache: everything is counted anew


def save_tally(cursor: duckdb.DuckDBPyConnection, key: TallyKey, counted: Counted) -> None:
    """Store a tally in the place of the last."""
    cursor.execute(
        "INSERT OR REPLACE INTO tallies VALUES ($fingerprint, $workload, $phase, $number, $tally)",
        {**key.values, "number": counted.number, "tally": counted.tally.to_bytes()},
    )


def forget_session(cursor: duckdb.DuckDBPyConnection, session_hash: str) -> None:
    """Take a session out of every tally that counts it; before its rows are deleted, in the same transaction."""
    for key in _keys_of(cursor, "session_hash", session_hash):
        _forget(cursor, key, [session_hash], None)


def forget_day(cursor: duckdb.DuckDBPyConnection, day: date) -> None:
    """Take what was received on a day out of every tally that counts it, as :func:`forget_session` does."""
    for key in _keys_of(cursor, "received_day", day):
        hashes = cursor.execute(
            "SELECT DISTINCT session_hash FROM parts WHERE received_day = ? AND fingerprint = ? AND workload = ?",
            [day, key.fingerprint, key.workload],
        ).fetchall()
        names = [found[0] for found in hashes]
        for start in range(0, len(names), _AT_ONCE):
            _forget(cursor, key, names[start : start + _AT_ONCE], (day - _EPOCH).days)


def _keys_of(cursor: duckdb.DuckDBPyConnection, column: str, value: str | date) -> list[TallyKey]:
    # The column's name is this module's own.
    found = cursor.execute(
        "SELECT DISTINCT fingerprint, workload, phase FROM parts JOIN tallies USING (fingerprint, workload) "  # noqa: S608
        f"WHERE {column} = ?",
        [value],
    ).fetchall()
    return [TallyKey(*row) for row in found]


def _forget(cursor: duckdb.DuckDBPyConnection, key: TallyKey, hashes: Sequence[str], day: int | None) -> None:
    """Sessions without the rows of a day, or without any, in the place of what was counted of them."""
    counted = load_tally(cursor, key)
    found = _up_to(rows_of_sessions(cursor, key, hashes), counted.number) if counted is not None else None
    if counted is None or found is None:
        return
    n_experts = counted.tally.n_experts
    tally = counted.tally - tally_of(n_experts, merge_rows(found))
    left = np.flatnonzero(found.days != day) if day is not None else np.zeros(0, dtype=np.intp)
    if len(left):
        tally += tally_of(n_experts, merge_rows(found.take(left)))
    save_tally(cursor, key, Counted(tally, counted.number))


def newest_number(cursor: duckdb.DuckDBPyConnection) -> int:
    """Number of the part committed last, 0 before the first."""
    [(number,)] = cursor.execute("SELECT coalesce(max(number), 0) FROM parts").fetchall()
    return int(number)


def sessions_after(cursor: duckdb.DuckDBPyConnection, key: TallyKey, number: int) -> list[str]:
    """Sessions that have parts with higher numbers, sorted."""
    rows = cursor.execute(
        "SELECT DISTINCT session_hash FROM parts JOIN histograms USING (content_id) WHERE fingerprint = $fingerprint "
        "AND workload = $workload AND phase = $phase AND number > $number ORDER BY session_hash",
        {**key.values, "number": number},
    ).fetchall()
    return [row[0] for row in rows]


def repeated_sessions(cursor: duckdb.DuckDBPyConnection, key: TallyKey, number: int) -> set[str]:
    """Sessions of more than one part up to a number."""
    rows = cursor.execute(
        "SELECT session_hash FROM parts JOIN histograms USING (content_id) WHERE fingerprint = $fingerprint "
        "AND workload = $workload AND phase = $phase AND number <= $number GROUP BY session_hash HAVING count(*) > 1",
        {**key.values, "number": number},
    ).fetchall()
    return {row[0] for row in rows}


def rows_of_sessions(
    cursor: duckdb.DuckDBPyConnection, key: TallyKey, hashes: Sequence[str]
) -> tuple[Rows, IntArray] | None:
    """All rows of some sessions with their numbers; ``None`` if there are none."""
    cursor.register("wanted_sessions", pa.table({"session_hash": pa.array(hashes, pa.string())}))
    try:
        batches = list(cursor.sql(_ROWS + _OF_SESSIONS, params=key.values).to_arrow_reader(1024))
    finally:
        cursor.unregister("wanted_sessions")
    read = [_rows(batch) for batch in batches if batch.num_rows]
    if not read:
        return None
    return Rows.joined([rows for rows, _ in read]), np.concatenate([numbers for _, numbers in read])


def read_rows(
    cursor: duckdb.DuckDBPyConnection,
    key: TallyKey,
    number: int,
    *,
    held_out_only: bool = False,
    rows_per_batch: int = 512,
) -> Iterator[Rows]:
    """All rows up to a number in batches of bounded size, in any order; one read of the table."""
    query = _ROWS + _UP_TO + (_HELD_OUT if held_out_only else "")
    for batch in cursor.sql(query, params={**key.values, "number": number}).to_arrow_reader(rows_per_batch):
        if batch.num_rows:
            yield _rows(batch)[0]


def _up_to(found: tuple[Rows, IntArray] | None, number: int) -> Rows | None:
    if found is None:
        return None
    rows, numbers = found
    old = np.flatnonzero(numbers <= number)
    return rows.take(old) if len(old) else None


def _rows(batch: pa.RecordBatch) -> tuple[Rows, IntArray]:
    rows = Rows(
        [str(content_id) for content_id in batch.column("content_id").to_pylist()],
        [str(session_hash) for session_hash in batch.column("session_hash").to_pylist()],
        batch.column("received_day").cast(pa.int32()).to_numpy().astype(np.int64),
        batch.column("tokens").to_numpy().astype(np.int64),
        _matrix(batch, "counts"),
        None if batch.column("reuse").null_count else _matrix(batch, "reuse"),
    )
    return rows, batch.column("number").to_numpy()


def _matrix(batch: pa.RecordBatch, name: str) -> IntArray:
    column = cast("pa.ListArray[Any]", batch.column(name))
    values = column.flatten().to_numpy()
    if column.null_count or len(values) % batch.num_rows:
        raise StorageError(f"histograms: {name} of different lengths for one model", "run spark-service verify")
    # No count is above 2^53, so the sign bit is never set.
    matrix: IntArray = values.view(np.int64).reshape(batch.num_rows, -1)
    return matrix
