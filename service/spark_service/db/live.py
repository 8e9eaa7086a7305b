"""What parts missed while they ran, in the database. Functions of a cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import duckdb
import numpy as np

from spark_schemas.live import LiveMisses, LiveProfile
from spark_schemas.model import ModelShape
from spark_service.live import LiveParts
from spark_service.packed import PackedSession

__all__ = ["live_columns", "live_misses", "live_parts"]

_FIELDS = "selections, cold_hits, resident_bytes, profile_workload, profile_revision, vram_budget_bytes"


def live_columns(sessions: Mapping[str, tuple[ModelShape, PackedSession]]) -> dict[str, Sequence[object]]:
    """Columns of ``live`` for sessions by content id; empty where nothing was measured."""
    found = [(content_id, live) for content_id, (_, one) in sessions.items() if (live := one.live) is not None]
    if not found:
        return {}
    profiles = [live.profile for _, live in found]
    return {
        "content_id": [content_id for content_id, _ in found],
        "selections": [live.selections for _, live in found],
        "cold_hits": [live.cold_hits for _, live in found],
        "resident_bytes": [live.resident_bytes for _, live in found],
        "profile_workload": [None if one is None else one.workload for one in profiles],
        "profile_revision": [None if one is None else one.revision for one in profiles],
        "vram_budget_bytes": [None if one is None else one.vram_budget_bytes for one in profiles],
    }


def live_misses(cursor: duckdb.DuckDBPyConnection, fingerprint: str) -> dict[str, LiveMisses]:
    """What was measured of a model's parts, by content id, without validation."""
    rows = cursor.execute(
        f"SELECT content_id, {_FIELDS} FROM live JOIN parts USING (content_id) WHERE fingerprint = ?",  # noqa: S608
        [fingerprint],
    ).fetchall()
    return {
        content_id: LiveMisses.model_construct(
            selections=selections,
            cold_hits=cold_hits,
            resident_bytes=resident_bytes,
            profile=None
            if (workload, revision, budget) == (None, None, None)
            else LiveProfile.model_construct(workload=workload, revision=revision, vram_budget_bytes=budget),
        )
        for content_id, selections, cold_hits, resident_bytes, workload, revision, budget in rows
    }


def live_parts(cursor: duckdb.DuckDBPyConnection, fingerprint: str, workload: str) -> LiveParts:
    """What was measured of a workload's parts on the held-out side, sorted by content id."""
    rows = cursor.execute(
        "SELECT session_hash, received_day - DATE '1970-01-01', selections, cold_hits, resident_bytes, "
        "profile_workload FROM live JOIN parts USING (content_id) "
        "WHERE fingerprint = ? AND workload = ? AND split = 'held_out' ORDER BY content_id",
        [fingerprint, workload],
    ).fetchall()
    hashes, *numbers, profiles = zip(*rows, strict=True) if rows else [()] * 6
    days, selections, cold_hits, resident_bytes = (np.array(column, dtype=np.int64) for column in numbers)
    return LiveParts(hashes, days, selections, cold_hits, resident_bytes, profiles)
