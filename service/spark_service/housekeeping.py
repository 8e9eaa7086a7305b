"""What a running service does by itself: store who was there, remove what is too old, look out for drift."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, date, datetime
from typing import Self

from spark_service.db.store import Store
from spark_service.drift_watch import DriftWatch
from spark_service.errors import StorageError
from spark_service.keyring import Keyring
from spark_service.retention import apply_retention

__all__ = ["INTERVAL_SECONDS", "SERVICE_ACTOR", "Housekeeping"]

INTERVAL_SECONDS = 60.0
SERVICE_ACTOR = "service"

log = logging.getLogger(__name__)


class Housekeeping:
    """A thread that wakes once a minute while the service runs; retention comes at start and once a day (UTC).

    A database that refuses is logged and asked again a minute later.
    """

    def __init__(
        self,
        store: Store,
        keyring: Keyring,
        retention_days: int,
        interval_seconds: float = INTERVAL_SECONDS,
        *,
        watch: DriftWatch | None = None,
    ):
        self._store = store
        self._watch = watch or DriftWatch(store)
        self._keyring = keyring
        self._retention_days = retention_days
        self._interval_seconds = interval_seconds
        self._retained_on: date | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="housekeeping")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ending.set()
        self._thread.join()
        # What was used since the last round.
        self._attempt_flush()

    def work(self, today: date) -> None:
        """Do what is due. ``today`` is the day in UTC."""
        self._attempt_flush()
        self._attempt_retention(today)
        try:
            self._watch.review_if_due()
        except StorageError as error:
            log.error("drift: %s", error)

    def _attempt_retention(self, today: date) -> None:
        if self._retained_on == today:
            return
        try:
            removed = apply_retention(self._store, self._retention_days, today, SERVICE_ACTOR)
        except StorageError as error:
            log.error("retention: %s", error)
            return
        self._retained_on = today
        if removed:
            log.info("retention: removed %d parts of %d days", sum(removed.values()), len(removed))

    def _attempt_flush(self) -> None:
        try:
            self._keyring.flush_uses()
        except StorageError as error:
            log.error("last use of tokens: %s", error)
        try:
            self._store.flush_agents()
        except StorageError as error:
            log.error("versions of agents: %s", error)

    def _run(self) -> None:
        while True:
            self.work(datetime.now(UTC).date())
            if self._ending.wait(self._interval_seconds):
                return
