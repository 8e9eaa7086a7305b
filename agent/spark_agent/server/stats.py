"""What ``/spark/stats`` answers: how the tiers have served so far."""

from __future__ import annotations

from typing import Any

from spark_runtime.engine import Engine

__all__ = ["tier_stats"]


def tier_stats(engine: Engine, resident_share: float) -> dict[str, Any]:
    """Counters of all finished requests by phase; called from any thread.

    ``resident_share`` is that of the experts' bytes in slots.
    """
    totals = engine.tier_totals
    if totals is None:
        return {"tiered": False, "resident_share": 1.0, "phases": {}}
    return {
        "tiered": True,
        "resident_share": resident_share,
        "phases": {
            phase: {
                "tokens": totals.tokens[phase],
                "selections": totals.selections[phase],
                "cold_hits": totals.cold_hits[phase],
                "cold_hit_rate": totals.cold_hit_rate(phase),
                "loads": totals.loads[phase],
                "bytes_moved": totals.bytes_moved[phase],
            }
            for phase in totals.tokens
        },
    }
