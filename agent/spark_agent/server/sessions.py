"""Which conversation a request belongs to, and the counts of every open one.

Coding tools send the whole conversation with each request. Its root, found as in transcripts, names the lineage: a
conversation that is continued, forked or resumed has the same one, and so has its transcript when that is recorded
later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spark_agent.dialogue.messages import Message
from spark_agent.transcripts.lineage import RootFinder
from spark_runtime.session_counts import SessionCounts
from spark_schemas.model import ModelShape

__all__ = ["LiveSessions", "lineage_of"]

MAX_OPEN = 64
IDLE_S = 15 * 60.0


def lineage_of(messages: Sequence[Message]) -> str:
    """The lineage of a conversation."""
    finder = RootFinder()
    for message in messages:
        if message.role == "user":
            finder.note(message.text)
    return finder.lineage(messages[0].text)


@dataclass(slots=True)
class _Open:
    counts: SessionCounts
    last_use_s: float


class LiveSessions:
    """Counts of open conversations; hands each one over when it has been idle, when room is needed, or at the end.

    What cannot be handed over stays, and is tried again the next time. Not thread-safe: only the thread that computes
    touches it.
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
        found = self._open.setdefault(lineage, _Open(SessionCounts(self._shape), 0.0))
        found.last_use_s = self._clock()
        self._open.move_to_end(lineage)
        return found.counts

    def tidy(self) -> None:
        """Hand over what has been idle for a quarter of an hour, and the oldest beyond :data:`MAX_OPEN`.

        A later request starts a new part of the same session. Raises as :meth:`close_all`.
        """
        now = self._clock()
        surplus = len(self._open) - MAX_OPEN
        self._hand_over(
            lineage
            for index, (lineage, session) in enumerate(list(self._open.items()))
            if index < surplus or now - session.last_use_s >= IDLE_S
        )

    def close_all(self) -> None:
        """Hand over everything; raise the first failure after all were tried."""
        self._hand_over(list(self._open))

    def _hand_over(self, lineages: Iterable[str]) -> None:
        failure: Exception | None = None
        for lineage in lineages:
            try:
                self._close(lineage, self._open[lineage].counts)
            except Exception as error:
                # One that is refused must not hold up the others.
                failure = failure or error
            else:
                del self._open[lineage]
        if failure is not None:
            raise failure
