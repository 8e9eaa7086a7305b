"""What the agent is at one moment, gathered once for ``/metrics`` and ``/spark/stats``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_agent.errors import SpoolError
from spark_agent.server.activity import Activity, Numbers, Promise
from spark_agent.spool import Spool, SpoolStats

if TYPE_CHECKING:
    from spark_agent.server.prefetch_control import PrefetchState
    from spark_agent.server.sessions import LiveSessions
    from spark_agent.server.worker import Worker
    from spark_runtime.engine import Engine
    from spark_runtime.tier_counting import TierTotals

__all__ = ["AgentState", "StateReader"]


@dataclass(frozen=True, slots=True)
class AgentState:
    """One moment."""

    version: str
    model: str
    fingerprint: str
    uptime_s: float
    workload: str
    """What requests are counted under that nobody labels."""
    running: int
    waiting: int
    sequences: int
    tokens_cached: int
    resident_share: float
    totals: TierTotals | None
    """``None``: no tiers, every expert is where it is computed."""
    promise: Promise | None
    prefetch: PrefetchState
    sessions_open: int
    sessions_lost: int
    spool: SpoolStats | None
    """``None`` where it cannot be read."""
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class StateReader:
    """Gathers it; called from any thread. Reads the spool's file: not on the event loop."""

    version: str
    model: str
    worker: Worker
    engine: Engine
    sessions: LiveSessions
    spool: Spool
    activity: Activity
    resident_share: Callable[[], float]
    promise: Callable[[], Promise | None]
    prefetch: Callable[[], PrefetchState]

    def __call__(self) -> AgentState:
        """The state as of now."""
        load = self.worker.load
        return AgentState(
            version=self.version,
            model=self.model,
            fingerprint=self.engine.shape.fingerprint,
            uptime_s=self.activity.uptime_s,
            workload=self.activity.names.default,
            running=load.running,
            waiting=load.waiting,
            sequences=load.sequences,
            tokens_cached=load.tokens_cached,
            resident_share=self.resident_share(),
            totals=self.engine.tier_totals,
            promise=self.promise(),
            prefetch=self.prefetch(),
            sessions_open=len(self.sessions),
            sessions_lost=self.sessions.lost,
            spool=_spool_stats(self.spool),
            numbers=self.activity.numbers(),
        )


def _spool_stats(spool: Spool) -> SpoolStats | None:
    try:
        return spool.stats()
    except SpoolError:
        return None  # told as missing numbers; whoever writes to it says why
