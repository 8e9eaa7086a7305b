from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_schemas.profile import LivePoint, Profile
from spark_service.dashboard.profile_page import LiveSessions, curves_of, profile_page, verdict_of
from spark_service.dashboard.words import CURVES, percent

NOBODY = LiveSessions(0, 0)
Build = Callable[..., Profile]


def page_of(make: Any, profile: Profile, live: LiveSessions = NOBODY) -> Any:
    return profile_page(profile, make.shape(), None, live)


def test_without_held_out_sessions_nothing_is_claimed_and_the_missing_number_is_said(make: Any, built: Build) -> None:
    page = page_of(make, built(make.sessions(make.shape(), 4, 0)))
    assert page.curves_missing is not None
    assert page.curves_missing.startswith("No held-out sessions yet: 3 more needed. ")
    assert "4 calibration sessions" in page.curves_missing
    assert all(not curve.points for curve in page.curves)
    assert page.verdict.verdict is None
    assert page.verdict.tone == "unknown"
    assert page.verdict.sentence.startswith("3 more held-out sessions needed (0 of 3).")
    assert "some 15 more sessions" in page.verdict.sentence
    assert "%" not in page.verdict.sentence


@pytest.mark.parametrize("held_out", [1, 2])
def test_few_held_out_sessions_are_shown_and_decide_nothing(make: Any, built: Build, held_out: int) -> None:
    page = page_of(make, built(make.sessions(make.shape(), 4, held_out)))
    assert page.curves_missing is None
    assert page.verdict.verdict is None
    assert f"{3 - held_out} more held-out session" in page.verdict.sentence
    ends = {point.low for curve in page.curves for point in curve.points}
    # A single session gives no interval, and none is shown.
    assert (ends == {None}) == (held_out == 1)


def test_one_calibration_session_too_few_is_named(make: Any, built: Build) -> None:
    sentence = verdict_of(built(make.sessions(make.shape(), 2, 4))).sentence
    assert sentence == "1 more calibration session needed (2 of 3)."


def test_the_sentence_has_the_numbers_of_the_curves(make: Any, built: Build) -> None:
    profile = built(make.sessions(make.shape(), 8, 8, decode=600))
    verdict = verdict_of(profile)
    at = {one.policy: one.cold_hit_rate for one in profile.curves if one.residency == 0.6}
    assert verdict.verdict == profile.verdict is not None
    assert percent(at["own"]) in verdict.sentence
    assert percent(at["uniform"]) in verdict.sentence
    assert percent(at["lru"]) in verdict.sentence
    assert verdict.reason == profile.verdict_reason


@pytest.mark.parametrize("verdict", ["profile", "pin", "cache_only", "no_gain"])
def test_every_verdict_has_a_sentence(make: Any, built: Build, verdict: str) -> None:
    profile = built(make.sessions(make.shape(), 8, 8)).model_copy(update={"verdict": verdict})
    found = verdict_of(profile)
    assert found.sentence.startswith("With 60% of the experts in video memory ")
    assert found.tone != "unknown"


def test_curves_come_in_one_order_and_say_what_is_missing(make: Any, built: Build) -> None:
    profile = built(make.sessions(make.shape(), 4, 4) + make.sessions(make.shape(), 4, 4, workload="chat", taste=3))
    curves = curves_of(profile, LiveSessions(2, 0))
    assert [one.policy for one in curves] == [
        "uniform",
        "lru",
        "other",
        "own",
        "live_profile",
        "oracle",
        "live_unprofiled",
    ]
    measured = {one.policy: one.missing for one in curves if one.basis == "live"}
    assert "1 more held-out sessions needed that ran with this profile" in str(measured["live_profile"])
    assert "(2 of 3)" in str(measured["live_profile"])
    assert "3 more held-out sessions needed that ran without a profile" in str(measured["live_unprofiled"])
    assert all(one.label == CURVES[one.policy] for one in curves)
    assert all(len(one.points) == 10 for one in curves if one.basis == "held_out")


def test_what_agents_measured_stands_beside_with_its_own_sessions(make: Any, built: Build) -> None:
    point = LivePoint(policy="live_profile", residency=0.6, cold_hit_rate=0.02, low=0.01, high=0.03, n_sessions=9)
    profile = built(make.sessions(make.shape())).model_copy(update={"live": (point,)})
    page = page_of(make, profile, LiveSessions(9, 1))
    [curve] = [one for one in page.curves if one.policy == "live_profile"]
    assert [(one.cold_hit_rate, one.n_sessions) for one in curve.points] == [(0.02, 9)]
    assert curve.missing is None
    assert {claim.what: claim.n_sessions for claim in page.claims}["what agents measured"] == 9


def test_prompts_have_no_cache_and_say_why(make: Any, built: Build) -> None:
    page = page_of(make, built(make.sessions(make.shape(), prefill=50), phase="prefill"))
    own = next(one for one in page.curves if one.policy == "own").points[5]
    assert own.residency == 0.6
    assert page.verdict.headline == "Prompts have no verdict"
    assert percent(own.cold_hit_rate) in page.verdict.sentence
    [lru] = [one for one in page.curves if one.policy == "lru"]
    assert lru.points == ()
    assert "reuse distances" in str(lru.missing)
    assert all("generated tokens" in str(one.missing) for one in page.curves if one.basis == "live")


def test_a_mix_says_what_mixing_is_worth(make: Any, built: Build) -> None:
    sessions = make.sessions(make.shape(), 6, 6) + make.sessions(make.shape(), 6, 6, workload="chat", taste=3)
    page = page_of(make, built(sessions, "chat:1+code:3"))
    assert page.is_mix
    assert page.mixing is not None
    assert "chat alone" in page.mixing
    assert "code alone" in page.mixing
    assert "12 held-out sessions" in page.mixing
    assert all("mix" in str(one.missing) for one in page.curves if one.basis == "live")


def test_a_mix_without_judges_names_which_workload_lacks_them(make: Any, built: Build) -> None:
    sessions = make.sessions(make.shape(), 6, 6) + make.sessions(make.shape(), 6, 0, workload="chat", taste=3)
    page = page_of(make, built(sessions, "chat:1+code:1"))
    assert page.curves_missing == "No curves yet: chat: 3 more held-out sessions needed (0 of 3)."
    assert page.mixing is None


@given(calibration=st.integers(1, 9), held_out=st.integers(0, 9))
def test_every_page_counts_its_sessions_and_is_json(make: Any, built: Build, calibration: int, held_out: int) -> None:
    page = page_of(make, built(make.sessions(make.shape(), calibration, held_out, decode=20)))
    assert (page.n_calibration, page.n_held_out) == (calibration, held_out)
    assert (page.verdict.verdict is None) == (min(calibration, held_out) < 3)
    assert type(page).model_validate_json(page.model_dump_json()) == page
    assert {one.n_sessions for curve in page.curves for one in curve.points} <= {held_out}
