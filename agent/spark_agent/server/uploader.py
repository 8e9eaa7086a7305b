"""Sending what the spool holds while the server runs, if the person has said yes.

Never in a request's way: a thread of its own, and a service that is down costs one warning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_agent.context import AgentContext
from spark_agent.errors import RefusedError
from spark_agent.spool import Spool
from spark_agent.upload import FlushReport, RetryPolicy, flush

__all__ = ["Uploader"]

INTERVAL_S = 600.0
_LAST_CALL = RetryPolicy(attempts=1, timeout_s=5.0)


class Uploader:
    """Flushes the spool every ten minutes and once more at the end."""

    def __init__(
        self,
        context: AgentContext,
        spool: Spool,
        reload: Callable[[], AgentContext],
        on_flush: Callable[[FlushReport | None], None] = lambda _: None,
    ) -> None:
        """``reload`` reads settings again before each flush: consent may be given or taken back at any time.

        ``on_flush`` is told of every flush that was allowed: its report, or ``None`` where it failed altogether.
        """
        self._on_flush = on_flush
        self._output = context.output
        self._spool = spool
        self._reload = reload
        self._ending = threading.Event()
        self._warned: str | None = None
        self._thread = threading.Thread(target=self._run, name="spark-upload")

    def start(self) -> None:
        """Start waiting for the first interval."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is there, once and briefly, and return."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(INTERVAL_S):
            self._flush(RetryPolicy())
        self._flush(_LAST_CALL)

    def _flush(self, retry: RetryPolicy) -> None:
        try:
            context = self._reload()
            with context.client() as client:
                report = flush(
                    self._spool,
                    client,
                    context.config.consent,
                    environment=context.environment,
                    paused=context.config.paused,
                    retry=retry,
                )
        except RefusedError:
            return  # nobody has said yes, or not for this service
        except Exception as error:
            # Uploading must never end serving: whatever failed is said once and tried again later.
            self._warn(str(error))
            self._on_flush(None)
            return
        self._on_flush(report)
        if report.last_error is not None:
            self._warn(report.last_error)

    def _warn(self, reason: str) -> None:
        if reason != self._warned:
            self._warned = reason
            self._output.warning(f"histograms stay in the spool: {reason}")
