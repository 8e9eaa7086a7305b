from __future__ import annotations

import os
import signal

import pytest

from spark_agent.interrupts import interrupts_at_checks


def test_it_waits_for_a_check():
    usual = signal.getsignal(signal.SIGINT)
    with interrupts_at_checks() as check:
        check()
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
        with pytest.raises(KeyboardInterrupt):
            check()
    assert reached
    assert signal.getsignal(signal.SIGINT) is usual


def test_it_is_not_lost_where_no_check_comes():
    reached = []

    def press(then: Exception | None = None) -> None:
        with interrupts_at_checks():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(then)
            if then is not None:
                raise then

    with pytest.raises(KeyboardInterrupt):
        press()
    with pytest.raises(ValueError, match="else"):
        press(ValueError("something else"))
    assert len(reached) == 2


def test_a_second_one_does_not_wait():
    def press_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it waited")

    with interrupts_at_checks(), pytest.raises(KeyboardInterrupt):
        press_twice()


def test_an_ignored_signal_stays_ignored():
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_at_checks() as check:
            os.kill(os.getpid(), signal.SIGINT)
            check()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)
