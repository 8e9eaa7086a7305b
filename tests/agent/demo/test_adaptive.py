"""The adaptive rows against a cache replayed expert by expert."""

from __future__ import annotations

import numpy as np
import pytest

from spark_agent.demo.adaptive import adaptive_rate, session_rate
from spark_agent.trace_files import SessionTrace
from spark_schemas.manifest import PlacementManifest


@pytest.fixture
def manifest(make_manifest) -> PlacementManifest:
    return make_manifest(((1, 9, 5, 2), 1, 2), ((9, 5, 5, 1), 1, 3))


def trace(*layers: list[int]) -> SessionTrace:
    ids = [np.array(layer).reshape(-1, 1) for layer in layers]
    return SessionTrace("0" * 64, "chat", ids, np.ones(len(layers[0]), dtype=bool))


def test_the_cache_starts_with_the_hot_set_and_follows(manifest: PlacementManifest) -> None:
    # Layer 0 starts with 1 and 2: 1 hits, 3 misses and evicts 2, 2 misses and evicts 1, 3 hits.
    # Layer 1 starts with 0, 1 and 2: only 3 misses.
    assert session_rate(trace([1, 3, 2, 3], [0, 1, 2, 3]), manifest) == 3 / 8


def test_sessions_weigh_the_same(manifest: PlacementManifest) -> None:
    short, long = trace([0], [3]), trace([1] * 50, [0] * 50)
    rate = adaptive_rate([short, long], manifest)
    assert rate.mean == 0.5
    assert (rate.low, rate.high) == (0.0, 1.0)


def test_another_models_trace_is_refused(manifest: PlacementManifest) -> None:
    with pytest.raises(ValueError, match="zip"):
        session_rate(trace([1]), manifest)
