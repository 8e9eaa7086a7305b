"""Looks at what sessions with manifests missed, and keeps what follows from it."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import duckdb
import numpy as np
from numpy.typing import NDArray

from spark_runtime.calibration.sessions import SessionPart
from spark_runtime.placement import Interval
from spark_schemas.drift import Drift, DriftList, RateInterval, WorkloadDrift
from spark_schemas.manifest import Expectation, PlacementManifest
from spark_service.db.audit import record
from spark_service.db.drift import (
    RanWith,
    count_since,
    load_states,
    newest_sequence,
    parts_with_profile,
    promised_bodies,
    save_state,
    watched_workloads,
)
from spark_service.db.store import Store
from spark_service.drift import MIN_JUDGES, Evidence, State, rebuilt, reviewed

__all__ = ["DriftWatch", "all_drift", "clear_drift", "drift_of"]

ACTOR = "service"
MOST_PARTS = 2000
"""The latest parts of a workload that are looked at."""
REMEMBERED = 100_000
RESTS_PER_REVIEW = 20
"""A look is followed by so many times its own time without one."""


@dataclass(frozen=True, slots=True)
class _Promise:
    """What a manifest's hot set was expected to miss, and the hot set: ``[experts of all layers]``, true inside."""

    expected: Expectation
    n_judges: int
    hot: NDArray[np.bool_]


class DriftWatch:
    """Reviews every workload that sessions ran with manifests of. One at a time does; any thread may ask."""

    def __init__(self, store: Store, *, min_sessions: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._min_sessions = min_sessions
        self._clock = clock
        self._rested_at_seconds = 0.0
        self._seen: int | None = None
        self._lock = threading.Lock()
        # Counts and manifests of a name never change.
        self._misses: OrderedDict[tuple[str, str, int], tuple[int, int]] = OrderedDict()

    def review_if_due(self) -> None:
        """:meth:`review` if something was written since the last, and that is long enough ago."""
        began_seconds = self._clock()
        if self._seen == self._store.generation or began_seconds < self._rested_at_seconds:
            return
        self.review()
        ended_seconds = self._clock()
        self._rested_at_seconds = ended_seconds + RESTS_PER_REVIEW * (ended_seconds - began_seconds)

    def review(self) -> None:
        """Look at all workloads and keep what has changed, with an entry in the audit log for every change of state.

        Raises :class:`StorageError`.
        """
        with self._lock:
            generation = self._store.generation
            with self._store.reading() as cursor:
                workloads = watched_workloads(cursor)
            for fingerprint, workload in workloads:
                self._review(fingerprint, workload)
            self._seen = generation

    def _review(self, fingerprint: str, workload: str) -> None:
        deletions = self._store.deletions
        with self._store.snapshot() as cursor:
            before = load_states(cursor, fingerprint).get((fingerprint, workload), State())
            parts = parts_with_profile(cursor, fingerprint, workload, MOST_PARTS)
            wanted = {(part.revision, part.vram_budget_bytes) for part in parts}
            bodies = promised_bodies(cursor, fingerprint, workload, before.after_sequence, wanted)
            newest = newest_sequence(cursor, fingerprint, workload)
        promises = {key: promise for key, found in bodies.items() if (promise := _promise(found)) is not None}
        seen = reviewed(before, _evidence(parts, promises, self._missed(parts, promises)), newest)
        after = seen
        if seen.state == "moved" and seen.since_day is not None:
            with self._store.reading() as cursor:
                sides = count_since(cursor, fingerprint, workload, seen.since_day)
            after = rebuilt(seen, *sides, newest, self._min_sessions)
        if after == before:
            return
        with self._store.writing() as cursor:
            now = load_states(cursor, fingerprint).get((fingerprint, workload), State())
            # What was deleted or cleared meanwhile is looked at anew the next time.
            if self._store.deletions == deletions and now == before:
                if after.after_sequence != before.after_sequence:
                    # What was served while this looked is of the old profile, too.
                    after = replace(after, after_sequence=newest_sequence(cursor, fingerprint, workload))
                save_state(cursor, fingerprint, workload, after)
                _record_changes(cursor, f"{fingerprint}/{workload}", before, after)

    def _missed(
        self, parts: Sequence[RanWith], promises: Mapping[tuple[str, int], _Promise]
    ) -> dict[str, tuple[int, int]]:
        """(misses, selections) of the promised hot set on each part, by content id; deleted ones are absent."""
        keys = {
            part.content_id: (part.content_id, part.revision, part.vram_budget_bytes)
            for part in parts
            if (part.revision, part.vram_budget_bytes) in promises
        }
        new = [content_id for content_id, key in keys.items() if key not in self._misses]
        for part in self._store.parts(new, "decode") if new else ():
            key = keys[part.content_id]
            self._misses[key] = _misses(part, promises[key[1:]].hot)
        found = {content_id: self._misses[key] for content_id, key in keys.items() if key in self._misses}
        while len(self._misses) > REMEMBERED:
            self._misses.popitem(last=False)
        return found


def drift_of(state: State) -> Drift:
    """As it is told."""
    return Drift(
        state=state.state,
        since=None if state.since_day is None else _day(state.since_day),
        rebuilt=state.rebuilt,
        n_sessions=state.n_sessions,
        promised=_told(state.promised),
        measured=_told(state.measured),
    )


def all_drift(store: Store) -> DriftList:
    """What is known of every workload."""
    with store.reading() as cursor:
        states = load_states(cursor)
    return DriftList(
        workloads=tuple(
            WorkloadDrift(fingerprint=fingerprint, workload=workload, **dict(drift_of(state)))
            for (fingerprint, workload), state in states.items()
        )
    )


def clear_drift(store: Store, fingerprint: str, workload: str, actor: str) -> bool:
    """Count all traffic again, whenever it came; return whether anything was known.

    What was served so far says nothing about the profile that comes of it.
    """
    with store.writing() as cursor:
        before = load_states(cursor, fingerprint).get((fingerprint, workload))
        if before is None:
            return False
        after = State(after_sequence=newest_sequence(cursor, fingerprint, workload))
        save_state(cursor, fingerprint, workload, after)
        since = None if before.since_day is None else _day(before.since_day)
        record(cursor, actor, "drift.clear", f"{fingerprint}/{workload}", {"state": before.state, "since": since})
    return True


def _told(interval: Interval | None) -> RateInterval | None:
    if interval is None:
        return None
    return RateInterval(cold_hit_rate=interval.mean, low=interval.low, high=interval.high)


def _day(day: int) -> str:
    return (dt.date(1970, 1, 1) + dt.timedelta(days=day)).isoformat()


def _promise(bodies: Iterable[bytes]) -> _Promise | None:
    """The latest manifest that promises something on enough sessions: one placed anew from a pin does not."""
    for body in bodies:
        manifest = PlacementManifest.model_validate_json(body)
        if manifest.expected is None or manifest.n_held_out < MIN_JUDGES:
            continue
        hot = []
        for layer in manifest.layers:
            inside = np.zeros(layer.n_experts, dtype=bool)
            inside[list(layer.hot_set)] = True
            hot.append(inside)
        return _Promise(manifest.expected, manifest.n_held_out, np.concatenate(hot))
    return None


def _misses(part: SessionPart, hot: NDArray[np.bool_]) -> tuple[int, int]:
    # Counts of one layer are summed as 64-bit integers, layers as Python's.
    ends = np.cumsum([len(layer) for layer in part.counts])[:-1]
    inside = np.split(hot, ends)
    total = sum(int(layer.sum()) for layer in part.counts)
    covered = sum(int(layer[mask].sum()) for layer, mask in zip(part.counts, inside, strict=True))
    return total - covered, total


def _evidence(
    parts: Sequence[RanWith], promises: Mapping[tuple[str, int], _Promise], missed: Mapping[str, tuple[int, int]]
) -> Evidence:
    """Sessions with all their parts added up, in order of (day of the last part, session hash)."""
    sessions: dict[str, list[RanWith]] = {}
    for part in parts:
        if part.content_id in missed:
            sessions.setdefault(part.session_hash, []).append(part)
    rows = []
    for session_hash, members in sessions.items():
        weights = np.array([missed[part.content_id][1] for part in members], dtype=np.float64)
        if not weights.sum():
            continue
        made = [promises[part.revision, part.vram_budget_bytes] for part in members]
        promised = np.array([[p.expected.cold_hit_rate, p.expected.low, p.expected.high] for p in made])
        misses = sum(missed[part.content_id][0] for part in members)
        mean, low, high = (weights @ promised / weights.sum()).tolist()
        day = max(part.day for part in members)
        judges = min(promise.n_judges for promise in made)
        rows.append((day, session_hash, misses / float(weights.sum()), mean, low, high, judges))
    return Evidence.of([(day, *values) for day, _, *values in sorted(rows)])


def _record_changes(cursor: duckdb.DuckDBPyConnection, name: str, before: State, after: State) -> None:
    since = None if after.since_day is None else _day(after.since_day)
    rates = {
        "promised": None if after.promised is None else f"{after.promised.mean:.4f}",
        "measured": None if after.measured is None else f"{after.measured.mean:.4f}",
    }
    detail: dict[str, int | str | None] = {"since": since, "sessions": after.n_sessions, **rates}
    if after.state == "moved" and (before.state, before.since_day) != ("moved", after.since_day):
        record(cursor, ACTOR, "drift.flag", name, detail)
    if after.rebuilt and not before.rebuilt:
        record(cursor, ACTOR, "drift.rebuild", name, {"since": since})
    if before.state == "moved" and after.state == "steady":
        record(cursor, ACTOR, "drift.end", name, detail)
