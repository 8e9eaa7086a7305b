"""A full disk and a clock that jumps, with the real agent: answers go on, and nothing that was accepted is lost."""

from __future__ import annotations

import datetime as dt
import resource
import subprocess

import pytest
from agent_process import END_S, asked, chat, ended, running
from jumping_clock import JumpingClock

from spark_agent.config import Config, save_config
from spark_agent.paths import config_path, spool_path
from spark_agent.spool import Spool

PATIENT = f"from spark_agent.server import uploader; uploader.LAST_CALL_S = {END_S}"
"""However slow the machine is, what is sent at the end is sent."""
DECADE_S = 10 * 365 * 86_400
LONG = "Write a function that reads a file of numbers, one a line, and gives their median."


def fill_disk(process: subprocess.Popen[str], room_bytes: int) -> None:
    """Let no file of a process grow beyond a size: writes fail as they do on a full disk."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room_bytes, hard))


def free_disk(process: subprocess.Popen[str]) -> None:
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))


def test_a_disk_that_is_full_for_a_while_costs_nothing(kept):
    with running() as (process, start):
        first = chat(start, "How are you today?")
        fill_disk(process, 512)
        assert chat(start, LONG)
        assert chat(start, "How are you today?") == first
        assert asked(start, "/health")["status"] == "ok"
        free_disk(process)
        said = ended(process)
    assert len(kept()) == 2
    assert "Traceback" not in said
    assert "lost" not in said


def test_a_disk_that_stays_full_costs_the_open_sessions_alone_and_says_so(kept):
    with running() as (process, start):
        assert chat(start, "How are you today?")
        ended(process)
    before = kept()
    assert len(before) == 1
    with running() as (process, start):
        assert chat(start, LONG)
        fill_disk(process, 512)
        assert chat(start, "Tell me of the sea.")
        said = ended(process)
    assert kept() == before, "what was accepted is whole"
    assert "Traceback" not in said
    assert "session counts could not be kept yet" in said
    assert "the counts of 2 sessions were lost" in said
    with running() as (process, start):
        assert chat(start, LONG)
        ended(process)
    assert len(kept()) == 2, "and the file goes on to be of use"


@pytest.fixture
def clock(tmp_path):
    return JumpingClock(tmp_path)


def test_a_clock_that_jumps_both_ways_during_an_open_session(clock, kept):
    with running(**clock.variables) as (process, start):
        first = chat(start, LONG)
        for ahead_s in (DECADE_S, -DECADE_S, 0):
            clock.jump_to(ahead_s)
            assert chat(start, LONG) == first
            stats = asked(start, "/spark/stats")
            assert 0 <= stats["uptime_s"] < 600
            assert stats["sessions"]["open"] == 1, "it has not been idle for ten years"
        clock.jump_to(-DECADE_S)
        said = ended(process)
    (row,) = kept()
    assert dt.date.fromisoformat(row.created_day) < dt.datetime.now(dt.UTC).date() - dt.timedelta(days=3000), (
        "by that clock"
    )
    assert "Traceback" not in said


@pytest.mark.parametrize("ahead_s", [DECADE_S, -DECADE_S])
def test_what_waits_by_a_wrong_clock_is_sent_by_the_right_one(
    clock, service, make_model, make_session, make_problem, ahead_s
):
    """And the other way round: who fails by the right clock may try again by a wrong one."""
    model = make_model()
    save_config(config_path(), Config(service_url=service.url).with_consent(True, service.url))
    for seed, clocks in enumerate(((ahead_s, 0), (0, ahead_s))):
        with Spool.open(spool_path()) as spool:
            assert spool.add(model, make_session(model, seed, decode=3000))
        for ahead, answered in zip(clocks, (False, True), strict=True):
            clock.jump_to(ahead)
            service.script = [] if answered else [make_problem(503, "In trouble")]
            asked_before = len(service.requests)
            with running(before=PATIENT, **clock.variables) as (process, _):
                said = ended(process)
            assert len(service.requests) == asked_before + 1, "once, at the end"
            assert len(service.stored) == seed + answered
            assert ("histograms stay in the spool" in said) != answered
    with Spool.open(spool_path()) as spool:
        assert spool.pending() == []
