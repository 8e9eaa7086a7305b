"""From waiting rows to request bodies: rows are grouped into parcels, parcels into batches.

A parcel is one uploaded histogram: a row, or several merged ones (see :mod:`spark_agent.privacy`). A batch is one
request. Everything here is a pure function of the rows, so a preview and an upload build the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from spark_agent import __version__
from spark_agent.privacy import form_groups, merge_sessions
from spark_agent.spool import PendingRow, Spool
from spark_schemas.histogram import MAX_SESSIONS_PER_UPLOAD, HistogramUpload, SessionHistogram
from spark_schemas.model import ModelShape

__all__ = [
    "LONGEST_WAIT_S",
    "MAX_BODY_BYTES",
    "Batch",
    "Parcel",
    "Unreadable",
    "build_batches",
    "form_parcels",
    "idempotency_key",
    "plan",
]

MAX_BODY_BYTES = 4 * 2**20
"""Uncompressed bytes of a request body, unless a single histogram is larger."""

LONGEST_WAIT_S = 4500.0
"""Rows are never made to wait longer between two attempts."""


@dataclass(frozen=True)
class Parcel:
    """Rows that are uploaded as one histogram."""

    rows: tuple[PendingRow, ...]

    @property
    def id(self) -> int:
        """Lowest row id: the parcel's number, before sealing as after."""
        return min(row.id for row in self.rows)

    @property
    def ids(self) -> tuple[int, ...]:
        """Row ids."""
        return tuple(row.id for row in self.rows)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(row.tokens for row in self.rows)

    def is_due(self, now: float) -> bool:
        """Whether no row has to wait beyond ``now`` (seconds since the epoch).

        A moment further ahead than any wait was set by a clock that has been corrected since.
        """
        return all(row.next_try <= now or row.next_try > now + LONGEST_WAIT_S for row in self.rows)


@dataclass(frozen=True)
class Batch:
    """One request: parcels of one model with their histograms."""

    model: ModelShape
    parcels: tuple[Parcel, ...]
    sessions: tuple[SessionHistogram, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Row ids of all parcels."""
        return tuple(row_id for parcel in self.parcels for row_id in parcel.ids)

    @property
    def attempts(self) -> int:
        """Earlier attempts of the row that was tried most."""
        return max(row.attempts for parcel in self.parcels for row in parcel.rows)

    def body(self) -> bytes:
        """Return the exact JSON bytes of the request, before compression."""
        return HistogramUpload.of(__version__, self.model, self.sessions).model_dump_json().encode()

    @property
    def is_measured(self) -> bool:
        """Whether any session says what it missed live, which services of before do not take."""
        return any(session.live is not None for session in self.sessions)

    def without_measurements(self) -> Batch:
        """Return the counts alone: the same histograms to any service."""
        bare = tuple(session.model_copy(update={"live": None}) for session in self.sessions)
        return Batch(self.model, self.parcels, bare)

    def halves(self) -> tuple[Batch, Batch]:
        """Return two batches with half the parcels each, to find the one at fault."""
        middle = len(self.parcels) // 2
        return (
            Batch(self.model, self.parcels[:middle], self.sessions[:middle]),
            Batch(self.model, self.parcels[middle:], self.sessions[middle:]),
        )


@dataclass(frozen=True)
class Unreadable:
    """A parcel whose stored counts this version cannot read or merge."""

    ids: tuple[int, ...]
    reason: str


def idempotency_key(body: bytes) -> str:
    """Return the SHA-256 of an uncompressed body: the same request is the same key."""
    return hashlib.sha256(body).hexdigest()


def form_parcels(rows: Iterable[PendingRow], minimum_tokens: int) -> tuple[list[Parcel], list[PendingRow]]:
    """Group rows that are in no parcel yet, by model, and return the parcels and the rows held back."""
    by_model: dict[str, list[PendingRow]] = {}
    for row in rows:
        by_model.setdefault(row.fingerprint, []).append(row)
    parcels: list[Parcel] = []
    held_back: list[PendingRow] = []
    for members in by_model.values():
        groups, rest = form_groups(members, minimum_tokens)
        parcels.extend(Parcel(tuple(sorted(group, key=lambda row: row.id))) for group in groups)
        held_back.extend(rest)
    return parcels, held_back


def plan(rows: Iterable[PendingRow], minimum_tokens: int) -> tuple[list[Parcel], list[PendingRow]]:
    """Return the parcels that may leave, in a fixed order, and the rows held back.

    Sealed parcels stay as they are, since they may have been sent; one sealed under a lower minimum is held back.
    """
    sealed: dict[int, list[PendingRow]] = {}
    free: list[PendingRow] = []
    for row in rows:
        if row.parcel is None:
            free.append(row)
        else:
            sealed.setdefault(row.parcel, []).append(row)
    parcels, held_back = form_parcels(free, minimum_tokens)
    for members in sealed.values():
        parcel = Parcel(tuple(members))
        if parcel.tokens >= minimum_tokens:
            parcels.append(parcel)
        else:
            held_back.extend(members)
    parcels.sort(key=lambda parcel: (parcel.rows[0].fingerprint, parcel.id))
    return parcels, held_back


def build_batches(
    spool: Spool, parcels: Sequence[Parcel], max_body_bytes: int = MAX_BODY_BYTES
) -> Iterator[Batch | Unreadable]:
    """Load and merge parcels, ordered as :func:`plan` does, and yield full requests, one in memory at a time.

    A parcel that another process finished meanwhile is left out.
    """
    model: ModelShape | None = None
    ready: list[tuple[Parcel, SessionHistogram]] = []
    size = 0
    for parcel in parcels:
        merged = _load(spool, parcel)
        if merged is None:
            continue
        if isinstance(merged, Unreadable):
            yield merged
            continue
        fingerprint = parcel.rows[0].fingerprint
        length = len(merged.model_dump_json()) + len(",")
        full = len(ready) == MAX_SESSIONS_PER_UPLOAD or size + length > max_body_bytes
        if model is not None and ready and (full or model.fingerprint != fingerprint):
            yield _batch(model, ready)
            ready, size = [], 0
        if model is None or model.fingerprint != fingerprint:
            model = spool.model(fingerprint)
        if not ready:
            size = len(Batch(model, (parcel,), (merged,)).body())
        else:
            size += length
        ready.append((parcel, merged))
    if model is not None and ready:
        yield _batch(model, ready)


def _batch(model: ModelShape, ready: Sequence[tuple[Parcel, SessionHistogram]]) -> Batch:
    # Row ids are in the order of time, which is nobody's business; keyed hashes are in none.
    shuffled = sorted(ready, key=lambda pair: (pair[1].session_hash, pair[0].id))
    return Batch(model, tuple(parcel for parcel, _ in shuffled), tuple(session for _, session in shuffled))


def _load(spool: Spool, parcel: Parcel) -> SessionHistogram | Unreadable | None:
    bodies = spool.bodies(parcel.ids)
    if bodies is None:
        return None
    try:
        return merge_sessions([SessionHistogram.model_validate_json(body) for body in bodies])
    except ValueError as error:
        return Unreadable(parcel.ids, f"the stored counts cannot be read: {error}")
