"""Whose turn it is, whatever comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.server.generation import BusyError
from spark_agent.server.scheduler import MAX_SLICE_S, MIN_SLICE_S, Scheduler


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["submit", "start", "turn", "finish", "drop"]), st.floats(0, 5))),
)
def test_every_job_is_somewhere_and_comes_in_order(n_sequences: int, moves: list[tuple[str, float]]) -> None:
    scheduler: Scheduler[str] = Scheduler(n_sequences, max_waiting=5)
    waiting: list[str] = []
    running: list[str] = []
    for number, (move, seconds) in enumerate(moves):
        if move == "submit" and len(waiting) == 5:
            with pytest.raises(BusyError):
                scheduler.submit(str(number))
        elif move == "submit":
            job = str(number)
            scheduler.submit(job)
            waiting.append(job)
        elif move == "start":
            started = scheduler.start()
            assert started == (waiting[0] if waiting and len(running) < n_sequences else None)
            if started is not None:
                running.append(waiting.pop(0))
        elif move == "turn" and running:
            turn = scheduler.next()
            assert turn is not None
            assert turn in running
            scheduler.charge(turn, seconds)
        elif move == "finish" and running:
            scheduler.finish(running.pop(int(seconds) % len(running)))
        elif move == "drop":
            unwanted = {job for index, job in enumerate(waiting) if (index + int(seconds)) % 2}
            assert scheduler.drop(unwanted.__contains__) == [job for job in waiting if job in unwanted]
            waiting = [job for job in waiting if job not in unwanted]
        assert (scheduler.waiting, set(scheduler.running)) == (len(waiting), set(running))


@given(st.lists(st.floats(0.01, 2.0), min_size=2, max_size=4), st.integers(1, 60))
def test_time_is_shared_evenly(step_s: list[float], n_turns: int) -> None:
    """However long each one's steps are, nobody is ahead of another by more than one of its own steps."""
    scheduler: Scheduler[int] = Scheduler(len(step_s))
    for job in range(len(step_s)):
        scheduler.submit(job)
        scheduler.start()
    had = [0.0] * len(step_s)
    for _ in range(n_turns):
        job = scheduler.next()
        assert job is not None
        had[job] += step_s[job]
        scheduler.charge(job, step_s[job])
        for ahead, seconds in enumerate(had):
            assert seconds - min(had) <= step_s[ahead] + 1e-9


def test_what_comes_new_gets_through_and_does_not_catch_up() -> None:
    scheduler: Scheduler[str] = Scheduler(2)
    scheduler.submit("long")
    scheduler.start()
    scheduler.charge("long", 100.0)
    scheduler.submit("short")
    scheduler.start()
    turns = []
    for _ in range(6):
        job = scheduler.next()
        assert job is not None
        turns.append(job)
        scheduler.charge(job, 1.0)
    assert turns == ["long", "short"] * 3


def test_slices_outweigh_switches() -> None:
    scheduler: Scheduler[str] = Scheduler(2)
    assert scheduler.slice_s == MIN_SLICE_S
    for _ in range(50):
        scheduler.note_switch(0.004)
    assert scheduler.slice_s == pytest.approx(0.2, rel=0.01)
    for _ in range(50):
        scheduler.note_switch(1.0)
    assert scheduler.slice_s == MAX_SLICE_S


def test_who_is_blocked_is_passed_over_and_loses_nothing() -> None:
    scheduler: Scheduler[str] = Scheduler(3)
    first, second, third = jobs = ["first", "second", "third"]
    for job in jobs:
        scheduler.submit(job)
        scheduler.start()
    assert scheduler.next(lambda job: job == first) == second
    scheduler.charge(second, 1.0)
    scheduler.charge(third, 2.0)
    assert scheduler.next(lambda job: job == first) == second
    assert scheduler.next(lambda _: True) is None
    assert scheduler.next() == first
