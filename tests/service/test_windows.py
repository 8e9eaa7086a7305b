from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_runtime.calibration.tally import Window
from spark_service.errors import RequestError
from spark_service.windows import WINDOW_STEPS_DAYS, Windows


def at(day: int, days: int = 0, half_life_days: int = 0) -> Windows:
    return Windows(days, half_life_days, today=lambda: day)


def test_without_bounds_all_days_are_the_same() -> None:
    assert at(100).own() == at(200).own() == Window()
    assert at(100, 30).own() == Window(100, 30)
    assert at(100, 0, 14).own() == Window(100, 0, 14)


def test_today_is_a_day_since_1970() -> None:
    assert Windows().today() > 20_000
    assert Windows(30).own() in {Window(Windows().today() - late, 30) for late in (0, 1)}


@pytest.mark.parametrize(("days", "half_life_days"), [(None, None), (45, None), (None, 10.0), (45, 10)])
def test_the_services_own_window_can_be_named(days: int | None, half_life_days: float | None) -> None:
    assert at(100, 45, 10).chosen(days, half_life_days) is None


def test_what_is_left_out_is_the_services_own() -> None:
    windows = at(100, 45, 10)
    assert windows.chosen(30, None) == Window(100, 30, 10)
    assert windows.chosen(None, 0) == Window(100, 45, 0)
    assert windows.chosen(0, 0.0) == Window()
    assert at(100).chosen(0, 0) is None


@given(days=st.sampled_from(WINDOW_STEPS_DAYS), half_life_days=st.sampled_from(WINDOW_STEPS_DAYS))
def test_equal_windows_are_written_alike(days: int, half_life_days: int) -> None:
    """A revision is a hash of them: 30 and 30.0 days must not be two."""
    whole, fraction = (at(100, 1).chosen(days, half) for half in (half_life_days, float(half_life_days)))
    assert repr(whole) == repr(fraction)


@pytest.mark.parametrize(
    ("days", "half_life_days", "field"),
    [(1, None, "window_days"), (-7, None, "window_days"), (10**400, 7, "window_days"), (30, 7.5, "half_life_days")],
)
def test_what_is_no_step_is_refused(days: int, half_life_days: float | None, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        at(100, 45, 10).chosen(days, half_life_days)
    error = caught.value
    assert (error.status, error.code, error.field) == (422, "invalid_parameter", f"query.{field}")
    own = "45" if field == "window_days" else "10"
    assert own in re.findall(r"\d+", str(error.expected))
    assert error.hint
