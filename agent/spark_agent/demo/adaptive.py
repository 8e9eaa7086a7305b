"""The adaptive cache's rows: order decides them, so they are measured here, on local traces, and never uploaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spark_agent.trace_files import SessionTrace
from spark_runtime.placement import Interval, bootstrap_interval, expert_order
from spark_runtime.simulate import lru_cold_hits
from spark_schemas.manifest import PlacementManifest

__all__ = ["adaptive_rate", "session_rate"]


def adaptive_rate(sessions: Sequence[SessionTrace], manifest: PlacementManifest) -> Interval:
    """Mean cold-hit rate over sessions of an LRU cache that starts with the manifest's hot set, 95% interval."""
    return bootstrap_interval([session_rate(session, manifest) for session in sessions])


def session_rate(session: SessionTrace, manifest: PlacementManifest) -> float:
    """Cold hits / selections of one session's decode, every layer with the manifest's slots and starting order."""
    cold = selections = 0
    for selected, layer in zip(session.ids, manifest.layers, strict=True):
        ids = selected[session.decode]
        hottest_first = expert_order(np.asarray(layer.prior, dtype=np.float64))
        cold += lru_cold_hits(ids, layer.n_experts, [layer.slots], hottest_first)[0]
        selections += ids.size
    return cold / selections
