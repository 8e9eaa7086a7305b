from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_runtime.placement import layer_sizes
from spark_service.nearest import Judged, most_general, rank_profiles
from spark_service.sessions import Session

SIZES = 10


def session(name: str, *layers: list[int]) -> Session:
    return Session(name, 100, tuple(np.array(layer) for layer in layers), None)


def peaked(*hot: int) -> list[np.ndarray]:
    """Frequencies of one layer of ten experts that all go to ``hot``."""
    share = np.full(SIZES, 1e-6)
    share[list(hot)] = 1.0
    return [share / share.sum()]


@pytest.fixture
def layers(make: Any) -> Any:
    return layer_sizes(make.shape(((SIZES, 2, 100),)))


def test_worked_by_hand(layers: Any) -> None:
    """Six of ten experts are resident: each profile's own, and after them the lowest ids."""
    known = {
        # Resident 4..9 and 0..5: "wide" serves what "low" selects to the half.
        "high": Judged(peaked(4, 5, 6, 7, 8, 9), [session("a", [0, 0, 0, 0, 0, 0, 0, 0, 5, 5])]),
        "low": Judged(peaked(0, 1, 2, 3, 4, 5), [session("b", [4, 4, 0, 0, 0, 0, 0, 0, 0, 0])]),
        "wide": Judged(peaked(0, 8, 9, 2, 3, 4), [session("c", [0, 0, 0, 0, 0, 0, 1, 1, 0, 0])]),
    }
    found = most_general(layers, known)
    # wide: 0 on a, 0.5 on b. high: 1 on b, 0 on c. low: 1 on a, 1 on c.
    assert found is not None
    assert (found.workload, found.cold_hit_rate, found.n_workloads, found.n_sessions) == ("wide", 0.25, 2, 2)


def test_workloads_count_the_same_however_many_sessions(layers: Any) -> None:
    miss, hit = session("m", [0, 0, 0, 0, 0, 0, 0, 0, 5, 5]), session("h", [5, 5, 0, 0, 0, 0, 0, 0, 0, 0])
    known = {
        "a": Judged(peaked(0, 1, 2, 3, 4, 5), []),
        "busy": Judged(peaked(8, 9), [miss] * 9),
        "quiet": Judged(peaked(8, 9), [hit]),
    }
    known["busy"] = Judged(peaked(6, 7, 8, 9, 4, 5), known["busy"].held_out)
    known["quiet"] = Judged(peaked(6, 7, 8, 9, 4, 5), known["quiet"].held_out)
    found = most_general(layers, {"a": known["a"], "busy": known["busy"], "quiet": known["quiet"]})
    assert found is not None
    # a: (1 + 0) / 2. busy: 1 on quiet. quiet: 0 on busy.
    assert (found.workload, found.cold_hit_rate, found.n_sessions) == ("quiet", 0.0, 9)
    alone = most_general(layers, {"a": known["a"], "busy": known["busy"]})
    assert alone is not None
    assert (alone.workload, alone.cold_hit_rate) == ("a", 1.0), "nobody's held-out sessions judge busy but its own"


@pytest.mark.parametrize("held_out", [[], [session("b", [4] * SIZES)]])
def test_nothing_measures_a_lone_workload(layers: Any, held_out: list[Session]) -> None:
    assert most_general(layers, {"a": Judged(peaked(1), held_out)}) is None
    assert most_general(layers, {}) is None


def test_ranked_by_what_they_miss(layers: Any) -> None:
    frequencies = {"b": peaked(0, 1, 2, 3, 4, 5), "a": peaked(0, 1, 2, 3, 4, 5), "best": peaked(8, 9)}
    ranked, oracle = rank_profiles(layers, frequencies, [np.array([1, 0, 0, 0, 0, 0, 0, 0, 1, 2])])
    assert ranked == [("best", 0.0), ("a", 0.75), ("b", 0.75)]
    assert oracle == 0.0
    with pytest.raises(ValueError, match="no selections"):
        rank_profiles(layers, frequencies, [np.zeros(SIZES, dtype=np.int64)])
