"""What measured sessions say of a policy, a residency, and a verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_schemas.ids import Verdict
from spark_schemas.profile import LiveComparison
from spark_service.live import LiveEvaluation, LiveParts, evaluate_live, live_verdict

TOTAL = 1000


def parts(*rows: tuple[str, int, int, int, str | None], day: int = 5) -> LiveParts:
    """Rows are (session hash, selections, cold hits, resident bytes, whose profile)."""
    hashes, selections, cold, resident, profiles = zip(*rows, strict=True)
    n = len(rows)
    return LiveParts(
        hashes,
        np.full(n, day),
        np.array(selections),
        np.array(cold),
        np.array(resident),
        profiles,
    )


def sessions(make: Any, rates: list[float], profile: str | None, *, first: int = 0, resident: int = 600) -> list[Any]:
    return [
        (make.hash(first + index, "held_out"), 1000, round(1000 * rate), resident, profile)
        for index, rate in enumerate(rates)
    ]


def test_a_rate_is_the_mean_over_held_out_sessions(make: Any) -> None:
    rows = sessions(make, [0.1, 0.2, 0.6], "code") + sessions(make, [0.5] * 3, None, first=3)
    rows += [(make.hash(index), 1000, 1000, 600, "code") for index in range(20)]
    [with_profile, without] = evaluate_live(parts(*rows), "code", TOTAL).points
    assert (with_profile.policy, with_profile.residency, with_profile.n_sessions) == ("live_profile", 0.6, 3)
    assert with_profile.cold_hit_rate == pytest.approx(0.3)
    assert 0.1 <= with_profile.low < 0.3 < with_profile.high <= 0.6
    assert (without.policy, without.cold_hit_rate, without.low, without.high) == ("live_unprofiled", 0.5, 0.5, 0.5)


def test_parts_of_a_session_add_up_and_are_one_session(make: Any) -> None:
    one, two, three = (make.hash(index, "held_out") for index in range(3))
    rows = [(one, 100, 0, 600, None), (one, 300, 200, 600, None), (two, 10, 5, 600, None), (three, 10, 5, 600, None)]
    [point] = evaluate_live(parts(*rows), "code", TOTAL).points
    assert (point.n_sessions, point.cold_hit_rate, point.low, point.high) == (3, 0.5, 0.5, 0.5)
    assert evaluate_live(parts(*rows[:3]), "code", TOTAL).points == ()


def test_few_sessions_other_profiles_and_other_residencies_stay_apart(make: Any) -> None:
    rows = sessions(make, [0.1, 0.1], "code") + sessions(make, [0.1] * 5, "chat", first=2)
    rows += sessions(make, [0.1], "code", first=9, resident=610)
    assert evaluate_live(parts(*rows), "code", TOTAL) == LiveEvaluation()
    rows += sessions(make, [0.1], "code", first=8, resident=604)
    [point] = evaluate_live(parts(*rows), "code", TOTAL).points
    assert (point.residency, point.n_sessions) == (0.6, 3)


def test_what_came_before_a_day_is_left_out(make: Any) -> None:
    rows = parts(*sessions(make, [0.1] * 3, "code"), day=5)
    assert evaluate_live(rows, "code", TOTAL, first_day=5).points
    assert not evaluate_live(rows, "code", TOTAL, first_day=6).points


def test_order_changes_nothing(make: Any) -> None:
    rows = sessions(make, [0.1, 0.25, 0.7, 0.3], "code") + sessions(make, [0.5, 0.4, 0.2], None, first=4)
    whole = evaluate_live(parts(*rows), "code", TOTAL)
    assert evaluate_live(parts(*reversed(rows)), "code", TOTAL) == whole
    assert whole.identity
    assert evaluate_live(parts(*rows[1:]), "code", TOTAL).identity != whole.identity
    assert not LiveEvaluation().identity


def test_both_kinds_at_one_residency_are_compared(make: Any) -> None:
    rng = np.random.default_rng(1)
    low, high = (list(mean + 0.02 * rng.standard_normal(12)) for mean in (0.1, 0.2))
    rows = sessions(make, low, "code") + sessions(make, high, None, first=12)
    [one] = evaluate_live(parts(*rows), "code", TOTAL).comparisons
    assert (one.residency, one.n_profile, one.n_unprofiled) == (0.6, 12, 12)
    assert -0.13 < one.low < one.difference < one.high < -0.07
    apart = sessions(make, low, "code") + sessions(make, high, None, first=12, resident=500)
    assert not evaluate_live(parts(*apart), "code", TOTAL).comparisons


def compared(difference: float, n: int = 8, residency: float = 0.6, spread: float = 0.01) -> LiveComparison:
    return LiveComparison(
        residency=residency,
        difference=difference,
        low=difference - spread,
        high=difference + spread,
        n_profile=n,
        n_unprofiled=n + 1,
    )


@pytest.mark.parametrize(
    ("before", "comparisons", "after"),
    [
        ("cache_only", [compared(-0.05)], "profile"),
        ("no_gain", [compared(-0.05)], "profile"),
        ("profile", [compared(-0.05)], "profile"),
        ("profile", [compared(0.05)], "cache_only"),
        ("cache_only", [compared(0.05)], "cache_only"),
        ("no_gain", [compared(0.05)], "no_gain"),
        # The interval is not clear, or there are too few sessions.
        ("cache_only", [compared(-0.005)], "cache_only"),
        ("profile", [compared(0.005)], "profile"),
        ("cache_only", [compared(-0.05, n=7)], "cache_only"),
        (None, [compared(-0.05)], None),
        # The residency with the most sessions decides, then the one nearest to 60%.
        ("cache_only", [compared(-0.05, n=9, residency=0.3), compared(0.05)], "profile"),
        ("cache_only", [compared(0.05, residency=0.3), compared(-0.05)], "profile"),
        ("cache_only", [], "cache_only"),
    ],
)
def test_only_clear_measurements_change_a_verdict(
    before: Verdict | None, comparisons: list[LiveComparison], after: Verdict | None
) -> None:
    verdict, reason = live_verdict(before, "the counts say so", LiveEvaluation((), tuple(comparisons)))
    assert verdict == after
    assert "the counts say so" in reason
    told = before is not None and any(min(one.n_profile, one.n_unprofiled) >= 8 for one in comparisons)
    assert ("easured live at" in reason) == told
    assert (reason == "the counts say so") == (not told)
