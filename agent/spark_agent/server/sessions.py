"""The counts of every open conversation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spark_agent.server.conversations import lineage_of
from spark_runtime.session_counts import SessionCounts
from spark_schemas.model import ModelShape

__all__ = ["CloseSession", "LiveSessions", "lineage_of"]

MAX_OPEN = 64
MAX_OPEN_BYTES = 32 * 2**20
MIN_OPEN = 32
"""However large a session's counts are; and twice as many as conversations are computed side by side."""
MAX_KEPT = 256
"""Where none can be handed over, on a full disk for instance: the oldest is given up beyond that."""
MAX_KEPT_BYTES = 64 * 2**20
IDLE_S = 15 * 60.0
CloseSession = Callable[[str, str | None, SessionCounts], None]
"""Takes the counts of a session: its lineage, its workload (``None``: the agent's default), what it counted."""
_Key = tuple[str, str | None]


@dataclass(slots=True)
class _Open:
    counts: SessionCounts
    last_use_s: float
    holders: int = 0


class LiveSessions:
    """Counts of open conversations; hands each one over when it has been idle, when room is needed, or at the end.

    A conversation under another workload is another session. What cannot be handed over stays, and is tried again the
    next time. Not thread-safe: only the thread that computes touches it, but for its length and its numbers.
    """

    def __init__(
        self, shape: ModelShape, close: CloseSession, clock: Callable[[], float], n_sequences: int = 1
    ) -> None:
        """``clock`` gives seconds and must not jump: the monotonic one. ``n_sequences`` compute side by side."""
        self._shape = shape
        self._close = close
        self._clock = clock
        self._open: OrderedDict[_Key, _Open] = OrderedDict()
        size = SessionCounts.size_bytes(shape)
        self.max_open = max(MIN_OPEN, 2 * n_sequences, min(MAX_OPEN, MAX_OPEN_BYTES // size))
        """So many stay open: :data:`MAX_OPEN`, fewer of a model with many experts."""
        self.max_kept = max(self.max_open, min(MAX_KEPT, MAX_KEPT_BYTES // size))
        self._spare: SessionCounts | None = SessionCounts(shape)
        """The next session's: made before anybody waits for it."""
        self.closed = 0
        """Sessions handed over so far."""
        self.lost = 0
        """Sessions given up because too many could not be handed over."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def too_many(self) -> bool:
        """Whether :meth:`tidy` would hand over some for their number."""
        return len(self._open) > self.max_open

    def counts_of(self, lineage: str, workload: str | None = None) -> SessionCounts:
        """The counts a request adds to."""
        return self._use((lineage, workload)).counts

    @contextmanager
    def held(self, lineage: str, workload: str | None = None) -> Iterator[SessionCounts]:
        """As :meth:`counts_of`; until the block ends the session is not handed over, however long it takes."""
        session = self._use((lineage, workload))
        session.holders += 1
        try:
            yield session.counts
        finally:
            session.holders -= 1
            session.last_use_s = self._clock()

    def latest(self) -> tuple[str | None, SessionCounts] | None:
        """Workload and counts of the session that was used last."""
        if not self._open:
            return None
        (_, workload), session = next(reversed(self._open.items()))
        return workload, session.counts

    def tidy(self) -> None:
        """Hand over what has been idle for a quarter of an hour, and the oldest beyond :attr:`max_open`.

        A later request starts a new part of the same session. Raises as :meth:`close_all`.
        """
        self._spare = self._spare or SessionCounts(self._shape)
        now = self._clock()
        surplus = len(self._open) - self.max_open
        try:
            self._hand_over(
                key
                for index, (key, session) in enumerate(list(self._open.items()))
                if not session.holders and (index < surplus or now - session.last_use_s >= IDLE_S)
            )
        finally:
            self._give_up_oldest()

    def close_all(self) -> None:
        """Hand over everything; raise the first failure after all were tried."""
        self._hand_over(list(self._open))

    def _use(self, key: _Key) -> _Open:
        found = self._open.get(key)
        if found is None:
            counts, self._spare = self._spare or SessionCounts(self._shape), None
            found = self._open[key] = _Open(counts, 0.0)
        found.last_use_s = self._clock()
        self._open.move_to_end(key)
        return found

    def _hand_over(self, keys: Iterable[_Key]) -> None:
        failure: Exception | None = None
        for key in keys:
            try:
                self._close(*key, self._open[key].counts)
            except Exception as error:
                # One that is refused must not hold up the others.
                failure = failure or error
            else:
                del self._open[key]
                self.closed += 1
        if failure is not None:
            raise failure

    def _give_up_oldest(self) -> None:
        surplus = len(self._open) - self.max_kept
        for key in [key for key, session in self._open.items() if not session.holders][: max(surplus, 0)]:
            del self._open[key]
            self.lost += 1
