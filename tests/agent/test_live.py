"""What a session missed is told only where it is what the policy did, all of it, after one start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spark_agent.live import live_misses
from spark_runtime.session_counts import SessionCounts, TierMisses
from spark_runtime.tier_start import TierStart, slots_start, uniform_start
from spark_schemas.invariants import check_session
from spark_schemas.live import LiveMisses, LiveProfile
from spark_schemas.model import ModelShape


def counted(model: ModelShape, start: TierStart, *cold: int, rows: int = 3) -> SessionCounts:
    """A session of so many flushes, ``rows`` tokens each."""
    session = SessionCounts(model)
    for missed in cold:
        counts = [np.array([rows, rows, 0, 0]) for _ in model.layers]
        reuse = [np.array([rows * 2 - 2, 0, 0, 0, 2]) for _ in model.layers]
        session.absorb("decode", rows, counts, [rows] * len(model.layers), reuse)
        session.note_misses(TierMisses(rows * 2 * len(model.layers), missed, start))
    return session


def test_a_session_under_one_start_is_measured(make_model, make_manifest):
    model = make_model()
    start = slots_start(model, [4, 4])
    session = counted(model, start, 2, 5)
    assert live_misses(session, None) == LiveMisses(selections=24, cold_hits=7, resident_bytes=800, profile=None)
    found = live_misses(session, make_manifest())
    assert found is not None
    assert found.profile == LiveProfile(workload="chat", revision="c" * 64, vram_budget_bytes=1000)
    histogram = session.to_histogram("ab" * 32, "chat", found)
    assert histogram is not None
    check_session(histogram, model)


def test_another_start_in_between_is_not(make_model):
    model = make_model()
    one, same = slots_start(model, [4, 4]), slots_start(model, [4, 4])
    session = counted(model, one, 1)
    session.absorb("decode", 3, [np.array([3, 3, 0, 0])] * 2, [3, 3], [np.array([4, 0, 0, 0, 2])] * 2)
    assert live_misses(session, None) is None, "some selections were not counted by slots"
    session = counted(model, one, 1)
    session.note_misses(TierMisses(0, 0, same))
    assert live_misses(session, None) is None


def test_without_decode_or_without_slots_nothing_is(make_model):
    model = make_model()
    assert live_misses(SessionCounts(model), None) is None
    session = SessionCounts(model)
    session.add("decode", 2, [np.array([[0, 1], [0, 2]])] * 2)
    assert live_misses(session, None) is None


@pytest.mark.parametrize("other", ["pinned", "decay"])
def test_another_policy_is_not(make_model, other: str):
    model = make_model()
    start = uniform_start(model, 1.0)
    assert live_misses(counted(model, start, 1), None) is not None
    if other == "pinned":
        start = replace(start, layers=(replace(start.layers[0], pinned=1), *start.layers[1:]))
    else:
        start = replace(start, decay=0.0)
    assert live_misses(counted(model, start, 1), None) is None
