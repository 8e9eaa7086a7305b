from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_service.rate_limit import NANOSECONDS_PER_SECOND, Rate, RateLimiter, retry_after_seconds

RATES = st.builds(Rate, st.sampled_from([0.001, 0.5, 1.0, 3.0, 7.0, 1500.0, 999_999.0]), st.integers(1, 20))
# Pauses on the scale of one request, with some that fill any bucket.
PAUSES = st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 10, 1000]), min_size=1, max_size=60)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5

    def __call__(self) -> int:
        return self.now_ns


def interval_ns(rate: Rate) -> int:
    return -(-NANOSECONDS_PER_SECOND * 1000 // round(rate.per_second * 1000))


@given(RATES, PAUSES)
def test_it_admits_what_a_bucket_of_tokens_admits(rate: Rate, pauses: list[int]) -> None:
    """Against the textbook: a level in exact fractions, refilled with time, never above the burst."""
    clock = Clock()
    limiter = RateLimiter(rate, clock)
    level, interval = Fraction(rate.burst), interval_ns(rate)
    for pause in pauses:
        step = pause * interval // 2
        clock.now_ns += step
        level = min(Fraction(rate.burst), level + Fraction(step, interval))
        wait_ns = limiter.take("a")
        assert (wait_ns == 0) == (level >= 1)
        if wait_ns:
            assert wait_ns == (1 - level) * interval
        else:
            level -= 1


@given(RATES, PAUSES)
def test_who_waits_as_told_is_admitted_and_not_before(rate: Rate, pauses: list[int]) -> None:
    clock = Clock()
    limiter = RateLimiter(rate, clock)
    for pause in pauses:
        clock.now_ns += pause
        wait_ns = limiter.take("a")
        if wait_ns:
            clock.now_ns += wait_ns - 1
            assert limiter.take("a") == 1
            clock.now_ns += 1
            assert limiter.take("a") == 0


@given(RATES, st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1, 5])), max_size=60))
def test_keys_do_not_share(rate: Rate, takes: list[tuple[str, int]]) -> None:
    clock = Clock()
    shared = RateLimiter(rate, clock)
    own = {key: RateLimiter(rate, clock) for key in "abc"}
    for key, pause in takes:
        clock.now_ns += pause * interval_ns(rate)
        assert shared.take(key) == own[key].take(key)


@given(RATES, st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0, 0, 1, 40])), max_size=120))
def test_memory_is_bounded_and_idle_buckets_go(rate: Rate, takes: list[tuple[int, int]]) -> None:
    clock = Clock()
    limiter = RateLimiter(rate, clock, max_buckets=8)
    for key, pause in takes:
        clock.now_ns += pause * interval_ns(rate)
        limiter.take(str(key))
        assert len(limiter) <= 8
    clock.now_ns += rate.burst * interval_ns(rate)
    limiter.take("last")
    assert len(limiter) == 1


def test_in_the_long_run_the_rate_holds() -> None:
    clock = Clock()
    limiter = RateLimiter(Rate(1500, 10), clock)
    admitted = 0
    for _ in range(40_000):
        clock.now_ns += 250_000
        admitted += limiter.take("a") == 0
    # 10 s at four requests a millisecond.
    assert 14_990 <= admitted <= 15_010


def test_a_rate_of_zero_is_no_limit() -> None:
    limiter = RateLimiter(Rate(0, 1), Clock())
    assert [limiter.take("a") for _ in range(1000)] == [0] * 1000
    assert len(limiter) == 0


@pytest.mark.parametrize(
    ("wait_ns", "seconds"), [(1, 1), (10**9, 1), (10**9 + 1, 2), (2 * 10**9, 2), (10**15 + 1, 10**6 + 1)]
)
def test_retry_after(wait_ns: int, seconds: int) -> None:
    assert retry_after_seconds(wait_ns) == seconds
