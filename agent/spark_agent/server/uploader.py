"""Sending what the spool holds while the server runs, if the person has said yes.

Never in a request's way: a thread of its own, and a service that is down costs one warning. Never in the way of
ending either: what a service does not take in a few seconds stays in the spool for the next start.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from spark_agent.batch import LONGEST_WAIT_S
from spark_agent.context import AgentContext
from spark_agent.errors import RefusedError, SpoolError
from spark_agent.http import ServiceClient
from spark_agent.output import counted
from spark_agent.spool import Spool
from spark_agent.upload import FlushReport, RetryPolicy, flush

__all__ = ["Uploader"]

FIRST_WAIT_S = 30.0
"""After the start: what an earlier process left behind need not wait for long."""
INTERVAL_S = 600.0
SHORTEST_WAIT_S = 5.0
LAST_CALL_S = 4.0
"""How long the end may take for sending what is there."""
_LEAVE_S = 1.0
"""How long a thread may take to notice that its connection was cut."""
# Waits belong between flushes, where the end of the process interrupts them.
_ONCE = RetryPolicy(attempts=1)


class Uploader:
    """Flushes the spool every ten minutes, sooner where something is due, and once more at the end."""

    def __init__(
        self,
        context: AgentContext,
        spool: Spool,
        reload: Callable[[], AgentContext],
        on_flush: Callable[[FlushReport | None], None] = lambda _: None,
    ) -> None:
        """``reload`` reads settings again before each flush: consent may be given or taken back at any time.

        ``on_flush`` is told of every flush that was allowed, one that found nothing due too: its report, or ``None``
        where it failed altogether.
        """
        self._on_flush = on_flush
        self._output = context.output
        self._spool = spool
        self._reload = reload
        self._ending = threading.Event()
        self._given_up = False
        self._lock = threading.Lock()
        self._client: ServiceClient | None = None
        self._warned: str | None = None
        self._dropped = spool.stats().dropped
        # A name that never resolves cannot be interrupted: then the process ends without this thread.
        self._thread = threading.Thread(target=self._run, name="spark-upload", daemon=True)

    def start(self) -> None:
        """Start waiting for the first flush."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is there, once, and return within a few seconds, whatever the service does."""
        self._ending.set()
        if self._thread.ident is None:
            return
        self._thread.join(LAST_CALL_S)
        if not self._thread.is_alive():
            return
        with self._lock:
            self._given_up = True
            if self._client is not None:
                self._client.abort()
        self._thread.join(_LEAVE_S)
        self._warn("the service did not take them before the end")

    def _run(self) -> None:
        wait = FIRST_WAIT_S
        while not self._ending.wait(wait * random.uniform(0.75, 1.25)):  # noqa: S311 (no secret)
            self._flush()
            wait = self._next_wait()
        self._flush()

    def _next_wait(self) -> float:
        try:
            due = self._spool.stats().next_try
        except SpoolError:
            return INTERVAL_S  # the flush has said so
        left = INTERVAL_S if due is None else due - time.time()
        # Further ahead than any wait: the clock was corrected.
        return INTERVAL_S if left > LONGEST_WAIT_S else min(max(left, SHORTEST_WAIT_S), INTERVAL_S)

    def _flush(self) -> None:
        try:
            context = self._reload()
            with context.client() as client:
                with self._lock:
                    if self._given_up:
                        return
                    self._client = client
                report = flush(
                    self._spool,
                    client,
                    context.config.consent,
                    environment=context.environment,
                    paused=context.config.paused,
                    retry=_ONCE,
                )
        except RefusedError:
            pass  # nobody has said yes, or not for this service
        except Exception as error:
            # Uploading must never end serving: whatever failed is said once and tried again later.
            self._warn(str(error))
            self._on_flush(None)
        else:
            self._on_flush(report)
            if report.last_error is not None:
                self._warn(report.last_error)
        finally:
            with self._lock:
                self._client = None
        self._tell_drops()

    def _tell_drops(self) -> None:
        try:
            dropped = self._spool.stats().dropped
        except SpoolError:
            return  # the flush has said so
        if dropped > self._dropped:
            self._output.warning(
                f"the spool was full: {counted(dropped - self._dropped, 'histogram')}, the oldest, had to leave it"
            )
        self._dropped = dropped

    def _warn(self, reason: str) -> None:
        if reason != self._warned and not self._given_up:
            self._warned = reason
            self._output.warning(f"histograms stay in the spool: {reason}")
