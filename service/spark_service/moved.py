"""Which traffic makes a profile once a workload's traffic has changed: what came since, where it is enough. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping

from spark_runtime.calibration.sessions import Sessions
from spark_runtime.calibration.tally import Tally, Window
from spark_service.builders import HeldOut, Member
from spark_service.drift import State

__all__ = ["held_out_since", "held_out_until", "moved_warnings", "since_days"]

MIN_SESSIONS = 3
"""Fewest sessions on either side of the split; deletions may leave fewer than a profile was rebuilt from."""


def since_days(states: Mapping[str, State], tallies: Mapping[str, Tally], min_sessions: int) -> dict[str, int]:
    """By workload, the day (since 1970) from which on sessions count, of those whose profile is rebuilt.

    Where too few of these sessions are left, all count again.
    """
    found = {}
    for name, state in states.items():
        if not state.rebuilt or state.since_day is None or name not in tallies:
            continue
        rest = tallies[name].since(state.since_day)
        enough = rest.n_sessions("calibration", Window()) >= max(MIN_SESSIONS, min_sessions)
        if enough and rest.n_sessions("held_out", Window()) >= MIN_SESSIONS:
            found[name] = state.since_day
    return found


def held_out_since(day: int, held_out: HeldOut) -> Iterator[Sessions]:
    """The held-out sessions whose last part came on a day or later."""
    for batch in held_out():
        yield batch.where(batch.days >= day)


def held_out_until(day: int, held_out: HeldOut) -> Iterator[Sessions]:
    """The held-out sessions whose last part came on a day or earlier."""
    for batch in held_out():
        yield batch.where(batch.days <= day)


def moved_warnings(members: Iterable[Member]) -> list[str]:
    """What a reader must know of a profile that leaves out what came before a change."""
    return [
        f"the traffic of {member.workload} changed on {dt.date(1970, 1, 1) + dt.timedelta(days=member.since_day)}: "
        "sessions received before that day are left out"
        for member in members
        if member.since_day is not None
    ]
