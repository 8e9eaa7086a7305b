"""Tallies kept up to date: what is new is added to what was counted before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import duckdb

from spark_runtime.calibration.sessions import Sessions, merge_rows
from spark_runtime.calibration.tally import Tally, tally_of
from spark_schemas.ids import Phase
from spark_schemas.model import ModelShape
from spark_service.builders import tally_batches
from spark_service.db.segments import SegmentFolder
from spark_service.db.store import Store
from spark_service.db.tallies import (
    Counted,
    TallyKey,
    load_tally,
    newest_number,
    read_rows,
    repeated_sessions,
    rows_of_sessions,
    sessions_after,
    workloads_of,
)
from spark_service.errors import StorageError
from spark_service.executors import Executor
from spark_service.session_stream import whole_sessions

__all__ = ["Tallies"]

_AT_ONCE = 256
"""Sessions that are counted together."""
_MOST_SINGLY = 4096
"""More changed sessions than that are counted anew with all others: one read of the table is quicker then."""


@dataclass(slots=True)
class _Model:
    """Tallies of a model in a phase by workload, as of a number and of a number of deletions."""

    number: int
    deletions: int
    by_workload: dict[str, Counted] = field(default_factory=dict)


class Tallies:
    """Remembers tallies and brings them up to date. May be called from any thread; one at a time counts."""

    def __init__(self, store: Store, executor: Executor) -> None:
        self._store = store
        self._executor = executor
        self._known: dict[tuple[str, Phase], _Model] = {}
        self._lock = threading.Lock()

    def of(self, shape: ModelShape, phase: Phase) -> dict[str, Counted]:
        """Tallies of all workloads of a model that have parts in a phase."""
        with self._lock:
            while True:
                deletions = self._store.deletions
                try:
                    found = self._brought_up(shape, phase, deletions)
                except StorageError:
                    # A file of histograms goes when something in it is deleted.
                    if self._store.deletions == deletions:
                        raise
                    continue
                if found is not None:
                    return found.by_workload

    def held_out(self, key: TallyKey, number: int) -> Iterator[Sessions]:
        """The held-out sessions of all parts up to a number, batch by batch."""
        with self._store.snapshot() as cursor:
            repeated = repeated_sessions(cursor, key, number)
            for batch in whole_sessions(
                read_rows(cursor, self._store.segments, key, number, held_out_only=True), repeated
            ):
                yield batch.where(batch.held_out)

    def _brought_up(self, shape: ModelShape, phase: Phase, deletions: int) -> _Model | None:
        """Count what is new; ``None`` when a session was deleted meanwhile."""
        place = (shape.fingerprint, phase)
        known = self._known.get(place)
        if known is not None and known.deletions != deletions:
            known = None  # the database has what was taken away
        changed: dict[TallyKey, Counted] = {}
        with self._store.snapshot() as cursor:
            number = newest_number(cursor)
            if known is not None and known.number == number:
                return known
            model = _Model(number, deletions)
            for workload in workloads_of(cursor, shape.fingerprint, phase):
                key = TallyKey(shape.fingerprint, workload, phase)
                counted = known.by_workload.get(workload) if known is not None else None
                counted = counted or load_tally(cursor, key)
                new = self._counted(cursor, shape, key, counted, number)
                if counted is None or new.tally is not counted.tally:
                    changed[key] = new
                model.by_workload[workload] = new
        if not all(self._store.keep_tally(key, counted, deletions) for key, counted in changed.items()):
            return None
        self._known[place] = model
        return model

    def _counted(
        self, cursor: duckdb.DuckDBPyConnection, shape: ModelShape, key: TallyKey, counted: Counted | None, number: int
    ) -> Counted:
        n_experts = tuple(layer.n_experts for layer in shape.layers)
        if counted is not None and counted.number == number:
            return counted
        changed = sessions_after(cursor, key, counted.number) if counted is not None else []
        if counted is None or counted.tally.n_experts != n_experts or len(changed) > _MOST_SINGLY:
            repeated = repeated_sessions(cursor, key, number)
            batches = whole_sessions(read_rows(cursor, self._store.segments, key, number), repeated)
            return Counted(tally_batches(n_experts, batches, self._executor), number)
        tally = counted.tally
        for start in range(0, len(changed), _AT_ONCE):
            some = changed[start : start + _AT_ONCE]
            tally = _with_changes(cursor, self._store.segments, key, Counted(tally, counted.number), some)
        return Counted(tally, number)


def _with_changes(
    cursor: duckdb.DuckDBPyConnection, folder: SegmentFolder, key: TallyKey, counted: Counted, hashes: list[str]
) -> Tally:
    """The sessions as they are now in the place of what was counted of them."""
    tally, n_experts = counted.tally, counted.tally.n_experts
    found = rows_of_sessions(cursor, folder, key, hashes)
    if found is None:
        return tally
    rows, numbers = found
    old = [index for index, number in enumerate(numbers.tolist()) if number <= counted.number]
    if old:
        tally -= tally_of(n_experts, merge_rows(rows.take(old)))
    return tally + tally_of(n_experts, merge_rows(rows))
