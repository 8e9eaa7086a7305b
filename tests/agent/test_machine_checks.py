from __future__ import annotations

import datetime as dt

import pytest

from spark_agent import machine_checks
from spark_agent.errors import SparkError
from spark_agent.machine_checks import clock_skew_s, skew_line

NOW = dt.datetime(2026, 11, 30, 12, 0, 30, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("date", "skew"),
    [
        ("Mon, 30 Nov 2026 12:00:00 GMT", 30.0),
        ("Mon, 30 Nov 2026 12:01:00 -0000", -30.0),
        ("Mon, 30 Nov 2026 13:00:30 +0100", 0.0),
        ("yesterday", None),
        ("", None),
        (None, None),
    ],
)
def test_the_clock(date, skew):
    assert clock_skew_s(date, NOW) == skew


def test_a_clock_that_is_set_wrong():
    assert "within 30 s" in skew_line("Mon, 30 Nov 2026 12:00:00 GMT", NOW)
    assert "does not say" in skew_line(None, NOW)
    for date, word in (("Mon, 30 Nov 2026 11:00:00 GMT", "ahead of"), ("Mon, 30 Nov 2026 13:00:00 GMT", "behind")):
        with pytest.raises(SparkError, match=word) as refused:
            skew_line(date, NOW)
        assert refused.value.hint


def test_a_links_rate_is_the_measured_one_of_this_machine():
    value = {"machine_name": "GPU", "machine": {"link": {"copy_bytes_per_s": 5e10, "launch_s": 1e-6}}}
    assert machine_checks._rate_of(value, "GPU") == 5e10
    for other in ({**value, "machine_name": "other"}, {**value, "machine": None}, {"machine_name": "GPU"}, [], None):
        assert machine_checks._rate_of(other, "GPU") is None
