"""Which conversation a request belongs to, and the counts of every open one.

Coding tools send the whole conversation with each request. Its beginning, the first message that is not from the
system, names the lineage: a conversation that is continued, forked or resumed begins the same way.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spark_agent.server.requests import ChatMessage
from spark_runtime.session_counts import SessionCounts
from spark_schemas.model import ModelShape

__all__ = ["LiveSessions", "lineage_of"]

MAX_OPEN = 64
IDLE_S = 15 * 60.0


def lineage_of(messages: Sequence[ChatMessage]) -> str:
    """SHA-256 naming a conversation by how it begins."""
    first = next((message for message in messages if message.role not in {"system", "developer"}), messages[0])
    return hashlib.sha256(b"spark-live-v1\n" + first.for_template()["content"].encode()).hexdigest()


@dataclass(slots=True)
class _Open:
    counts: SessionCounts
    last_use_s: float


class LiveSessions:
    """Counts of open conversations; hands each one over when it has been idle, when room is needed, or at the end.

    Not thread-safe: only the thread that computes touches it.
    """

    def __init__(
        self, shape: ModelShape, close: Callable[[str, SessionCounts], None], clock: Callable[[], float]
    ) -> None:
        self._shape = shape
        self._close = close
        self._clock = clock
        self._open: OrderedDict[str, _Open] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def counts_of(self, lineage: str) -> SessionCounts:
        """The counts a request adds to."""
        found = self._open.pop(lineage, None) or _Open(SessionCounts(self._shape), 0.0)
        found.last_use_s = self._clock()
        self._open[lineage] = found
        while len(self._open) > MAX_OPEN:
            self._close_oldest()
        return found.counts

    def close_idle(self) -> None:
        """Hand over what has not been used for a quarter of an hour; a later request starts a new part of it."""
        now = self._clock()
        while self._open and now - next(iter(self._open.values())).last_use_s >= IDLE_S:
            self._close_oldest()

    def close_all(self) -> None:
        """Hand over everything."""
        while self._open:
            self._close_oldest()

    def _close_oldest(self) -> None:
        # Handed over before it is forgotten: if the spool refuses, the counts stay.
        lineage, oldest = next(iter(self._open.items()))
        self._close(lineage, oldest.counts)
        del self._open[lineage]
