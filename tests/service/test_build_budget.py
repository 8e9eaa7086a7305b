from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_service.build_budget import BUILD_SHARE, BURST_SECONDS, BuildBudget
from spark_service.errors import RequestError


def test_a_budget_is_spent_and_comes_back() -> None:
    now = [0.0]
    budget = BuildBudget(lambda: now[0])
    budget.require()
    budget.spend(BURST_SECONDS)
    budget.require()
    budget.spend(2.0)
    with pytest.raises(RequestError) as caught:
        budget.require()
    error = caught.value
    assert (error.status, error.code, error.headers) == (429, "too_many_builds", {"Retry-After": "40"})
    assert error.hint
    now[0] += 39
    assert budget.missing_seconds() == pytest.approx(1)
    now[0] += 1.001
    budget.require()
    assert budget.missing_seconds() == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 300), st.floats(0.01, 20)), min_size=1, max_size=60))
def test_no_pattern_of_asking_builds_more_than_its_share(asked: list[tuple[float, float]]) -> None:
    """But for the burst, and the last build, whose length nobody knows before."""
    now, built = [0.0], []
    budget = BuildBudget(lambda: now[0])
    for pause, seconds in asked:
        now[0] += pause
        if not budget.missing_seconds():
            now[0] += seconds
            budget.spend(seconds)
            built.append(seconds)
    assert built
    assert sum(built) <= BURST_SECONDS + BUILD_SHARE * now[0] + built[-1] + 1e-6
