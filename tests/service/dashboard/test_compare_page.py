from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spark_schemas.profile import Profile
from spark_service.dashboard.compare_page import Side, compare_page
from spark_service.dashboard.mismatch import mismatch_matrix
from spark_service.dashboard.words import percent

Build = Callable[..., Profile]


@pytest.fixture
def two(make: Any, built: Build) -> tuple[Profile, Profile]:
    shape = make.shape()
    sessions = make.sessions(shape, 5, 5) + make.sessions(shape, 4, 4, workload="chat", taste=3)
    return built(sessions, "code"), built(sessions, "chat")


def page_of(make: Any, sides: Any, missing: str | None = None, mixed: Any = None) -> Any:
    return compare_page(make.shape(), "decode", sides, missing, mismatch_matrix({}), mixed)


def test_each_side_is_judged_by_its_own_sessions(make: Any, two: Any) -> None:
    code, chat = two
    page = page_of(make, (Side(code, None), Side(chat, None)))
    assert [side.label for side in page.sides] == ["code", "chat"]
    assert [(side.n_calibration, side.n_held_out) for side in page.sides] == [(5, 5), (4, 4)]
    own = {one.residency: one.cold_hit_rate for one in chat.curves if one.policy == "own"}
    assert {row.residency: row.b.cold_hit_rate for row in page.rates} == own
    assert page.difference.frequency_shift > 0.1


def test_either_profile_on_the_others_sessions(make: Any, two: Any) -> None:
    code, chat = two
    page = page_of(make, (Side(code, None), Side(chat, None)))
    assert [(cross.profile, cross.n_held_out) for cross in page.crosses] == [("code", 4), ("chat", 5)]
    [row] = [one for one in chat.mismatch if (one.workload, one.residency) == ("code", 0.6)]
    assert page.crosses[0].other.cold_hit_rate == row.cold_hit_rate
    assert percent(row.cold_hit_rate) in page.crosses[0].sentence
    assert page.crosses_missing is None


def test_one_workload_in_two_windows(make: Any, two: Any) -> None:
    code, _ = two
    page = page_of(make, (Side(code, None), Side(code, "last 30 days")))
    assert [side.label for side in page.sides] == ["code", "code, last 30 days"]
    assert page.crosses == ()
    assert "Both sides are of one workload" in page.crosses_missing
    assert page.difference.frequency_shift == 0


def test_a_chosen_window_is_not_judged_on_the_other_side(make: Any, two: Any) -> None:
    code, chat = two
    page = page_of(make, (Side(code, "last 7 days"), Side(chat, None)))
    assert [cross.profile for cross in page.crosses] == ["chat"]


def test_without_judges_nothing_is_claimed(make: Any, built: Build) -> None:
    sessions = make.sessions(make.shape(), 4, 0) + make.sessions(make.shape(), 4, 0, workload="chat", taste=3)
    page = page_of(make, (Side(built(sessions, "code"), None), Side(built(sessions, "chat"), None)))
    assert page.rates == ()
    assert page.crosses == ()
    assert "Neither side has held-out sessions" in page.crosses_missing
    assert page.difference is not None


def test_why_there_are_no_sides(make: Any) -> None:
    page = page_of(make, None, "Because.")
    assert page.sides is None
    assert page.sides_missing == "Because."


def test_the_best_profile_for_a_mix_is_measured(make: Any, built: Build) -> None:
    shape = make.shape()
    sessions = make.sessions(shape, 6, 6) + make.sessions(shape, 6, 6, workload="chat", taste=3)
    mixed = built(sessions, "chat:1+code:1")
    page = page_of(make, None, None, mixed)
    assert {one.profile for one in page.mix.rates} == {"chat:1+code:1", "chat", "code"}
    rates = [one.rate.cold_hit_rate for one in page.mix.rates]
    assert rates == sorted(rates)
    assert page.mix.sentence.startswith(f"Use {page.mix.rates[0].profile}: ")
    assert "12 held-out sessions" in page.mix.sentence


def test_a_mix_that_cannot_be_had_says_why(make: Any) -> None:
    assert page_of(make, None, None, "Too few.").mix.sentence == "Too few."


def test_a_mix_without_judges_promises_nothing(make: Any, built: Build) -> None:
    shape = make.shape()
    sessions = make.sessions(shape, 6, 6) + make.sessions(shape, 6, 0, workload="chat", taste=3)
    page = page_of(make, None, None, built(sessions, "chat:1+code:1"))
    assert page.mix.rates == ()
    assert "chat: 3 more held-out sessions needed" in page.mix.sentence
