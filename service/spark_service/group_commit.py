"""Uploads committed together: each is answered after the commit that holds it, and a commit holds many."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from spark_schemas.api import UploadReceipt
from spark_service.db.batch import KeyedUpload
from spark_service.errors import OverloadedError, RequestError, StorageError

__all__ = ["GroupCommit", "Limits", "Queue", "Waiting"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a commit is due, and how much may wait for one. A session is one row, whatever its phases."""

    due_rows: int = 32
    due_seconds: float = 0.05
    """After the first upload that waits."""
    batch_rows: int = 128
    """Most rows of one commit, unless a single upload has more."""
    waiting_rows: int = 512
    """Uploads that find so many rows waiting are refused."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An upload in the queue; ``future`` gets its receipt or its error."""

    upload: KeyedUpload
    since_seconds: float
    """On the clock that the queue is asked with."""
    future: Future[UploadReceipt] = field(default_factory=Future)

    @property
    def rows(self) -> int:
        """Sessions that it holds."""
        return len(self.upload.upload.sessions)


class Queue:
    """What waits for a commit, in order of arrival. No thread and no clock of its own: callers bring both."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: deque[Waiting] = deque()
        self._rows = 0

    @property
    def rows(self) -> int:
        """Sessions that wait."""
        return self._rows

    def offer(self, waiting: Waiting) -> bool:
        """Add an upload, or return False where too many rows wait."""
        if self._rows >= self._limits.waiting_rows:
            return False
        self._waiting.append(waiting)
        self._rows += waiting.rows
        return True

    def due_in_seconds(self, now_seconds: float) -> float | None:
        """Time until the next commit is due, 0 if it is now, or None where nothing waits."""
        if not self._waiting:
            return None
        if self._rows >= self._limits.due_rows:
            return 0.0
        return max(0.0, self._waiting[0].since_seconds + self._limits.due_seconds - now_seconds)

    def take(self) -> list[Waiting]:
        """Remove and return the next batch: the oldest uploads, at least one if any waits."""
        batch: list[Waiting] = []
        rows = 0
        while self._waiting and (not batch or rows + self._waiting[0].rows <= self._limits.batch_rows):
            batch.append(self._waiting.popleft())
            rows += batch[-1].rows
        self._rows -= rows
        return batch


class GroupCommit:
    """One thread that commits what all others submit. It starts with the first upload."""

    def __init__(
        self,
        write: Callable[[Sequence[KeyedUpload]], Sequence[UploadReceipt | RequestError]],
        limits: Limits | None = None,
    ) -> None:
        """``write`` commits a batch and returns each upload's outcome, or raises and has then stored nothing."""
        self._write = write
        self._queue = Queue(limits or Limits())
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def submit(self, upload: KeyedUpload) -> Future[UploadReceipt]:
        """Queue an upload. The future gets its receipt once it is committed, or the error that kept it out.

        Raises :class:`OverloadedError` when too much waits, :class:`StorageError` after :meth:`close`.
        """
        waiting = Waiting(upload, time.monotonic())
        # From now on it cannot be cancelled: a client that goes away does not take its upload back.
        waiting.future.set_running_or_notify_cancel()
        with self._changed:
            if self._closing:
                raise StorageError("the service is stopping: found an upload after the last commit", "retry later")
            if not self._queue.offer(waiting):
                raise OverloadedError(
                    503,
                    "overloaded",
                    f"found {self._queue.rows} histograms waiting to be stored, expected fewer; this one was not kept",
                    hint="send it again after the time that Retry-After says",
                    headers={"Retry-After": "1"},
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="group-commit")
                self._thread.start()
            self._changed.notify()
        return waiting.future

    def close(self) -> None:
        """Commit and answer everything that waits, then stop; closing twice is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while batch := self._next():
            self._commit(batch)

    def _next(self) -> list[Waiting]:
        """Wait for the next batch; an empty one is the end."""
        with self._changed:
            while True:
                due_seconds = self._queue.due_in_seconds(time.monotonic())
                if self._closing or due_seconds == 0:
                    return self._queue.take()
                self._changed.wait(due_seconds)

    def _commit(self, batch: Sequence[Waiting]) -> None:
        try:
            outcomes = self._write([waiting.upload for waiting in batch])
        except Exception as error:  # whatever it is, it is this upload's answer
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            # One upload may be what the database refuses: its neighbours must not pay for it.
            log.warning("storing %d uploads together failed, trying each alone: %s", len(batch), error)
            for waiting in batch:
                self._commit([waiting])
            return
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, RequestError):
                waiting.future.set_exception(outcome)
            else:
                waiting.future.set_result(outcome)
