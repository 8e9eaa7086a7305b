from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_runtime.placement import layer_sizes
from spark_schemas.profile import Mismatch, Profile
from spark_service.nearest import NEAREST_RESIDENCY, most_general, rank_profiles

SIZES = 10


def profile(workload: str, n_held_out: int, **others: float) -> Profile:
    """What a profile says of the others: their rates on its held-out sessions, and other ones at other residencies."""
    rows = [
        Mismatch(workload=name, residency=residency, cold_hit_rate=rate, low=0.0, high=1.0)
        for name, at in others.items()
        for residency, rate in ((NEAREST_RESIDENCY, at), (0.3, 1.0 - at))
    ]
    return Profile(
        fingerprint="mf1-" + "0" * 32,
        workload=workload,
        phase="decode",
        revision="0" * 64,
        n_calibration=3,
        n_held_out=n_held_out,
        tokens_calibration=1,
        tokens_held_out=1,
        layers=(),
        curves=(),
        mismatch=tuple(rows),
        verdict=None,
        verdict_reason="",
    )


def peaked(*hot: int) -> list[np.ndarray]:
    """Frequencies of one layer of ten experts that all go to ``hot``."""
    share = np.full(SIZES, 1e-6)
    share[list(hot)] = 1.0
    return [share / share.sum()]


@pytest.fixture
def layers(make: Any) -> Any:
    return layer_sizes(make.shape(((SIZES, 2, 100),)))


def test_the_lowest_mean_over_the_others_is_the_most_general() -> None:
    known = {
        "high": profile("high", 1, low=1.0, wide=0.0),
        "low": profile("low", 1, high=1.0, wide=0.5),
        "wide": profile("wide", 1, high=0.0, low=1.0),
    }
    found = most_general(known)
    assert found is not None
    assert (found.workload, found.cold_hit_rate, found.n_workloads, found.n_sessions) == ("wide", 0.25, 2, 2)


def test_workloads_count_the_same_however_many_sessions() -> None:
    known = {
        "a": profile("a", 0),
        "busy": profile("busy", 9, a=1.0, quiet=0.0),
        "quiet": profile("quiet", 1, a=0.0, busy=1.0),
    }
    found = most_general(known)
    assert found is not None
    assert (found.workload, found.cold_hit_rate, found.n_sessions) == ("quiet", 0.0, 9)
    alone = most_general({"a": known["a"], "busy": known["busy"]})
    assert alone is not None
    assert (alone.workload, alone.cold_hit_rate) == ("a", 1.0), "nobody's held-out sessions judge busy but its own"


def test_nothing_measures_a_lone_workload() -> None:
    assert most_general({"a": profile("a", 3)}) is None
    assert most_general({}) is None


def test_ranked_by_what_they_miss(layers: Any) -> None:
    frequencies = {"b": peaked(0, 1, 2, 3, 4, 5), "a": peaked(0, 1, 2, 3, 4, 5), "best": peaked(8, 9)}
    ranked, oracle = rank_profiles(layers, frequencies, [np.array([1, 0, 0, 0, 0, 0, 0, 0, 1, 2])])
    assert ranked == [("best", 0.0), ("a", 0.75), ("b", 0.75)]
    assert oracle == 0.0
    with pytest.raises(ValueError, match="no selections"):
        rank_profiles(layers, frequencies, [np.zeros(SIZES, dtype=np.int64)])
