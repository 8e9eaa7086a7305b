"""What a served session missed, as it may be uploaded beside its counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_schemas.live import LiveMisses, LiveProfile

if TYPE_CHECKING:
    from spark_runtime.session_counts import SessionCounts
    from spark_schemas.manifest import PlacementManifest

__all__ = ["live_misses"]


def live_misses(counts: SessionCounts, manifest: PlacementManifest | None) -> LiveMisses | None:
    """Cold hits of a session's decode selections, which ran with ``manifest``, or without one.

    ``None`` where not all of them were counted by slots under one placement, or where that was not the usual policy:
    with pinned experts or another decay the numbers would be of something else, and so they would with a profile that
    no service made.
    """
    misses = counts.misses
    if misses is None or not misses.start.is_usual_policy:
        return None
    if manifest is None and any(layer.prior.any() for layer in misses.start.layers):
        return None
    profile = None
    if manifest is not None:
        profile = LiveProfile(
            workload=manifest.workload,
            revision=manifest.profile_revision,
            vram_budget_bytes=manifest.vram_budget_bytes,
        )
    slots = zip(misses.start.layers, counts.shape.layers, strict=True)
    return LiveMisses(
        selections=misses.selections,
        cold_hits=misses.cold_hits,
        resident_bytes=sum(started.slots * layer.expert_bytes for started, layer in slots),
        profile=profile,
    )
