"""What takes longer to find out than a page may take: made in the background, shown as of its moment."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar, cast

from spark_service.db.store import Store

__all__ = ["Made", "Refreshed"]

PATIENCE_SECONDS = 0.12
"""How long a page waits for what is being made before it shows what was made last."""
RESTS_PER_MAKING = 20
"""Making something is followed by so many times its own time without: uploads that never pause must not keep a
processor busy for a page.
"""
MAX_AGE_SECONDS = 60.0
"""What depends on the calendar or on something else than the store is never older, unless it takes long to make."""
MAX_ENTRIES = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Made(Generic[T]):
    """A value, when it was begun to be made, and whether something was written since."""

    value: T
    as_of: datetime
    is_current: bool


@dataclass(slots=True)
class _Entry:
    state: Hashable = None
    deletions: int = -1
    value: Any = None
    as_of: datetime | None = None
    made_at_seconds: float = 0.0
    rested_at_seconds: float = 0.0
    error: Exception | None = None
    making: Future[None] | None = None


class Refreshed:
    """Values by key, made one at a time in a thread of their own. Any thread may ask.

    What was made before a deletion is never given again.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dashboard")

    def close(self) -> None:
        """Wait for what is being made; nothing new is begun."""
        self._worker.shutdown(cancel_futures=True)

    def get(self, key: Hashable, make: Callable[[], T], patience_seconds: float = PATIENCE_SECONDS) -> Made[T] | None:
        """The newest value of a key, or ``None`` while its first is being made.

        ``make`` reads the store; what it returns is a function of the key and of what it read. What it raises is
        raised here, to whoever asks first after that.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)
            if entry.making is None and self._is_due(entry):
                entry.making = self._worker.submit(self._make, entry, make)
            making = entry.making
        if making is not None:
            wait_for([making], timeout=patience_seconds)
        with self._lock:
            error, entry.error = entry.error, None
            if error is not None:
                raise error
            if entry.as_of is None or entry.deletions != self._store.deletions:
                return None
            return Made(cast("T", entry.value), entry.as_of, entry.state == self._store.generation)

    def _is_due(self, entry: _Entry) -> bool:
        now = self._clock()
        if entry.deletions != self._store.deletions:
            return True
        is_old = now - entry.made_at_seconds > MAX_AGE_SECONDS
        return (entry.state != self._store.generation or is_old) and now >= entry.rested_at_seconds

    def _make(self, entry: _Entry, make: Callable[[], object]) -> None:
        # Before anything is read: what is written meanwhile makes the value one of the past at once.
        began_seconds, as_of = self._clock(), datetime.now(UTC)
        state, deletions = self._store.generation, self._store.deletions
        try:
            value = make()
        except Exception as error:
            with self._lock:
                entry.error, entry.making = error, None
            return
        with self._lock:
            ended_seconds = self._clock()
            entry.state, entry.deletions, entry.value, entry.as_of = state, deletions, value, as_of
            entry.made_at_seconds = ended_seconds
            entry.rested_at_seconds = ended_seconds + RESTS_PER_MAKING * (ended_seconds - began_seconds)
            entry.making = None
