from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spark_schemas.profile import Profile
from spark_service.dashboard.mismatch import MAX_SHOWN, mismatch_matrix
from spark_service.nearest import NEAREST_RESIDENCY

Build = Callable[..., Profile]


def profiles_of(make: Any, built: Build, **held_out: int) -> dict[str, Profile]:
    shape, sessions = make.shape(), []
    for taste, (name, judges) in enumerate(held_out.items()):
        sessions += make.sessions(shape, 4, judges, workload=name, taste=taste)
    return {name: built(sessions, name) for name in held_out}


def test_every_cell_is_what_the_judges_evaluation_says(make: Any, built: Build) -> None:
    profiles = profiles_of(make, built, chat=4, code=5, docs=3)
    matrix = mismatch_matrix(profiles)
    assert matrix.missing is None
    assert matrix.profiles == ("chat", "code", "docs")
    for row in matrix.rows:
        judge = profiles[row.workload]
        expected = {one.workload: one.cold_hit_rate for one in judge.mismatch if one.residency == NEAREST_RESIDENCY}
        [own] = [one for one in judge.curves if (one.policy, one.residency) == ("own", NEAREST_RESIDENCY)]
        expected[judge.workload] = own.cold_hit_rate
        found = {cell.profile: cell.cold_hit_rate for cell in row.cells if cell is not None}
        assert found == expected
        assert row.best == min(expected, key=lambda name: (expected[name], name))
        assert min(cell.excess for cell in row.cells if cell) == 0
        assert [cell.is_own for cell in row.cells if cell] == [name == row.workload for name in matrix.profiles]
    assert "For traffic that none of these describes use " in matrix.advice
    assert "2 other workloads" in matrix.advice


def test_a_workload_without_judges_has_an_empty_row(make: Any, built: Build) -> None:
    matrix = mismatch_matrix(profiles_of(make, built, chat=4, code=0))
    assert matrix.missing is None
    assert matrix.rows[1].cells == (None, None)
    assert matrix.rows[1].best is None


def test_a_single_judge_has_no_interval(make: Any, built: Build) -> None:
    matrix = mismatch_matrix(profiles_of(make, built, chat=1, code=4))
    assert {cell.low for cell in matrix.rows[0].cells if cell} == {None}
    assert all(cell.low is not None for cell in matrix.rows[1].cells if cell)


@pytest.mark.parametrize(
    ("held_out", "words"),
    [({}, "No profiles yet"), ({"code": 4}, "Nothing to compare with"), ({"chat": 0, "code": 0}, "No held-out")],
)
def test_an_empty_matrix_says_why(make: Any, built: Build, held_out: dict[str, int], words: str) -> None:
    matrix = mismatch_matrix(profiles_of(make, built, **held_out))
    assert str(matrix.missing).startswith(words)
    assert "cannot be said yet" in matrix.advice


def test_many_workloads_show_the_busiest(make: Any, built: Build) -> None:
    base = built(make.sessions(make.shape(), 4, 4))
    profiles = {
        f"w{number:02}": base.model_copy(update={"workload": f"w{number:02}", "n_calibration": number})
        for number in range(MAX_SHOWN + 3)
    }
    matrix = mismatch_matrix(profiles)
    assert matrix.left_out == 3
    assert matrix.profiles == tuple(sorted(profiles)[3:])
