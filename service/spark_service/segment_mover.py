"""The background task that moves old histograms into segments, at the start and once a day."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta

from spark_service.db.store import Store
from spark_service.errors import StorageError

__all__ = ["last_day_to_keep", "segment_mover"]

log = logging.getLogger(__name__)

DAY_SECONDS = 24 * 60 * 60.0


def last_day_to_keep(after_days: int, today: date) -> date:
    """The earliest day of receipt whose histograms stay in the database."""
    return today - timedelta(days=after_days)


@contextmanager
def segment_mover(store: Store, after_days: int, *, interval_seconds: float = DAY_SECONDS) -> Iterator[None]:
    """Move histograms older than ``after_days`` in a thread of its own for as long as this is open; 0 means never."""
    if after_days == 0:
        yield
        return
    stop = threading.Event()

    def run() -> None:
        while True:
            try:
                _move(store, last_day_to_keep(after_days, datetime.now(UTC).date()), stop)
            except StorageError as error:
                # Nothing was lost: they stay in the database until the next attempt.
                log.error("moving old histograms into segments: %s", error)
            if stop.wait(interval_seconds):
                return

    thread = threading.Thread(target=run, name="segment-mover")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _move(store: Store, before: date, stop: threading.Event) -> None:
    store.sweep_segments()
    total = 0
    while not stop.is_set() and (moved := store.age_out(before)):
        total += moved
    if total:
        log.info("moved %d histograms received before %s into segments", total, before)
