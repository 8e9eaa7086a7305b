"""Tallies in the database, and the rows they are counted from. Functions of a cursor; :class:`Store` owns the locks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date

import duckdb
import numpy as np
import pyarrow as pa

from spark_runtime.calibration.sessions import IntArray, Rows, merge_rows
from spark_runtime.calibration.tally import Tally, tally_of
from spark_schemas.ids import Phase
from spark_service.db.segments import SegmentFolder
from spark_service.packed import unpack_counts

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
    "workloads_of",
]

_AT_ONCE = 256
_EPOCH = date(1970, 1, 1)
_OF_KEY = "fingerprint = $fingerprint AND workload = $workload AND phase = $phase"
_IN_ANY_PLACE = (
    "parts JOIN (SELECT content_id, phase FROM histograms UNION ALL SELECT content_id, phase FROM segment_rows) "
    "USING (content_id)"
)
_COUNTS = (
    "SELECT content_id, session_hash, received_day, number, tokens, n_experts, counts, reuse "
    "FROM parts JOIN histograms USING (content_id) WHERE " + _OF_KEY
)
_MOVED = (
    "SELECT segment, content_id, session_hash, received_day, number "
    "FROM parts JOIN segment_rows USING (content_id) WHERE " + _OF_KEY
)
_COLUMNS = ("content_id", "session_hash", "received_day", "number", "tokens", "n_experts", "counts", "reuse")
_OF_SESSIONS = " AND session_hash IN (SELECT session_hash FROM wanted_sessions)"
_HELD_OUT = " AND split = 'held_out'"
_UP_TO = " AND number <= $number"


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


def forget_session(cursor: duckdb.DuckDBPyConnection, folder: SegmentFolder, session_hash: str) -> None:
    """Take a session out of every tally that counts it; before its rows are deleted, in the same transaction."""
    for key in _keys_of(cursor, "session_hash", session_hash):
        _forget(cursor, folder, key, [session_hash], None)


def forget_day(cursor: duckdb.DuckDBPyConnection, folder: SegmentFolder, day: date) -> None:
    """Take what was received on a day out of every tally that counts it, as :func:`forget_session` does."""
    for key in _keys_of(cursor, "received_day", day):
        hashes = cursor.execute(
            "SELECT DISTINCT session_hash FROM parts WHERE received_day = ? AND fingerprint = ? AND workload = ?",
            [day, key.fingerprint, key.workload],
        ).fetchall()
        names = [found[0] for found in hashes]
        for start in range(0, len(names), _AT_ONCE):
            _forget(cursor, folder, key, names[start : start + _AT_ONCE], (day - _EPOCH).days)


def _keys_of(cursor: duckdb.DuckDBPyConnection, column: str, value: str | date) -> list[TallyKey]:
    # The column's name is this module's own.
    found = cursor.execute(
        "SELECT DISTINCT fingerprint, workload, phase FROM parts JOIN tallies USING (fingerprint, workload) "  # noqa: S608
        f"WHERE {column} = ?",
        [value],
    ).fetchall()
    return [TallyKey(*row) for row in found]


def _forget(
    cursor: duckdb.DuckDBPyConnection, folder: SegmentFolder, key: TallyKey, hashes: Sequence[str], day: int | None
) -> None:
    """Sessions without the rows of a day, or without any, in the place of what was counted of them."""
    counted = load_tally(cursor, key)
    found = _up_to(rows_of_sessions(cursor, folder, key, hashes), counted.number) if counted is not None else None
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
        f"SELECT DISTINCT session_hash FROM {_IN_ANY_PLACE} WHERE {_OF_KEY} AND number > $number "  # noqa: S608
        "ORDER BY session_hash",
        {**key.values, "number": number},
    ).fetchall()
    return [row[0] for row in rows]


def repeated_sessions(cursor: duckdb.DuckDBPyConnection, key: TallyKey, number: int) -> set[str]:
    """Sessions of more than one part up to a number."""
    rows = cursor.execute(
        f"SELECT session_hash FROM {_IN_ANY_PLACE} WHERE {_OF_KEY} {_UP_TO} "  # noqa: S608
        "GROUP BY session_hash HAVING count(*) > 1",
        {**key.values, "number": number},
    ).fetchall()
    return {row[0] for row in rows}


def workloads_of(cursor: duckdb.DuckDBPyConnection, fingerprint: str, phase: Phase) -> list[str]:
    """Workloads of a model that have parts in a phase, sorted."""
    rows = cursor.execute(
        f"SELECT DISTINCT workload FROM {_IN_ANY_PLACE} WHERE fingerprint = ? AND phase = ? ORDER BY workload",  # noqa: S608
        [fingerprint, phase],
    ).fetchall()
    return [row[0] for row in rows]


def rows_of_sessions(
    cursor: duckdb.DuckDBPyConnection, folder: SegmentFolder, key: TallyKey, hashes: Sequence[str]
) -> tuple[Rows, IntArray] | None:
    """All rows of some sessions with their numbers; ``None`` if there are none."""
    cursor.register("wanted_sessions", pa.table({"session_hash": pa.array(hashes, pa.string())}))
    try:
        found = cursor.sql(_COUNTS + _OF_SESSIONS, params=key.values).to_arrow_table()
        moved = cursor.sql(_MOVED + _OF_SESSIONS, params=key.values).to_arrow_table()
    finally:
        cursor.unregister("wanted_sessions")
    read = [_rows(found)] if found.num_rows else []
    read += [_rows(table) for table in _from_segments(folder, key, moved, sparse=True)]
    if not read:
        return None
    return Rows.joined([rows for rows, _ in read]), np.concatenate([numbers for _, numbers in read])


def read_rows(
    cursor: duckdb.DuckDBPyConnection,
    folder: SegmentFolder,
    key: TallyKey,
    number: int,
    *,
    held_out_only: bool = False,
    rows_per_batch: int = 512,
) -> Iterator[Rows]:
    """All rows up to a number in batches of bounded size, in any order; one read of the table and of each segment."""
    which = _UP_TO + (_HELD_OUT if held_out_only else "")
    values = {**key.values, "number": number}
    moved = cursor.sql(_MOVED + which, params=values).to_arrow_table()
    for batch in cursor.sql(_COUNTS + which, params=values).to_arrow_reader(rows_per_batch):
        if batch.num_rows:
            yield _rows(pa.Table.from_batches([batch]))[0]
    for table in _from_segments(folder, key, moved, sparse=False):
        yield _rows(table)[0]


def _from_segments(folder: SegmentFolder, key: TallyKey, moved: pa.Table, *, sparse: bool) -> Iterator[pa.Table]:
    """Rows with counts of ``moved``, which says what is where; ``sparse`` if they are few of those in a segment."""
    places: dict[str, dict[str, int]] = {}
    for index, (name, content_id) in enumerate(
        zip(moved["segment"].to_pylist(), moved["content_id"].to_pylist(), strict=True)
    ):
        places.setdefault(str(name), {})[str(content_id)] = index
    for name, wanted in places.items():
        with folder.open(name) as segment:
            tables = (t for one in sorted(wanted) for t in segment.between(one, one)) if sparse else segment.tables()
            for table in tables:
                ids = [str(content_id) for content_id in table["content_id"].to_pylist()]
                phases = table["phase"].to_pylist()
                chosen = [at for at, one in enumerate(ids) if one in wanted and phases[at] == key.phase]
                if not chosen:
                    continue
                rows = moved.take([wanted[ids[at]] for at in chosen])
                counts = table.take(chosen)
                yield pa.table({name: (counts if name in counts.schema.names else rows)[name] for name in _COLUMNS})


def _up_to(found: tuple[Rows, IntArray] | None, number: int) -> Rows | None:
    if found is None:
        return None
    rows, numbers = found
    old = np.flatnonzero(numbers <= number)
    return rows.take(old) if len(old) else None


def _rows(table: pa.Table) -> tuple[Rows, IntArray]:
    n_experts = table["n_experts"][0].as_py()
    n_counts, n_layers = sum(n_experts), len(n_experts)
    rows = Rows(
        [str(content_id) for content_id in table["content_id"].to_pylist()],
        [str(session_hash) for session_hash in table["session_hash"].to_pylist()],
        table["received_day"].cast(pa.int32()).to_numpy().astype(np.int64),
        table["tokens"].to_numpy().astype(np.int64),
        _matrix(table, "counts", n_counts),
        None if table["reuse"].null_count else _matrix(table, "reuse", n_counts + n_layers),
    )
    return rows, table["number"].to_numpy()


def _matrix(table: pa.Table, name: str, length: int) -> IntArray:
    return np.stack([unpack_counts(bytes(packed), length) for packed in table[name].to_pylist() if packed is not None])
