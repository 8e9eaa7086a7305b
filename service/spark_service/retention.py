"""Retention: parts received too long ago are removed, one day of them at a time."""

from __future__ import annotations

from datetime import date, timedelta

from spark_service.db.audit import record
from spark_service.db.removal import days_before, parts_of_day
from spark_service.db.store import Store

__all__ = ["apply_retention", "overdue"]


def overdue(store: Store, retention_days: int, today: date) -> dict[date, int]:
    """Parts that a run would remove, by the day they were received. Empty for ``retention_days`` 0: all is kept."""
    if not retention_days:
        return {}
    with store.reading() as cursor:
        return {day: parts_of_day(cursor, day) for day in days_before(cursor, _cutoff(retention_days, today))}


def apply_retention(store: Store, retention_days: int, today: date, actor: str) -> dict[date, int]:
    """Remove what was received more than ``retention_days`` before ``today``; return the parts removed by day.

    Each day is a transaction of its own with its entry in the audit log: uploads get their turn in between, and what
    fails later leaves the days before it done. Raises :class:`StorageError`.
    """
    removed: dict[date, int] = {}
    for day in overdue(store, retention_days, today):
        with store.removing("received_day", day) as (cursor, removal):
            removed[day] = removal.day(cursor, day)
            detail = {"removed": removed[day], "retention_days": retention_days}
            record(cursor, actor, "retention.run", day.isoformat(), detail)
    return removed


def _cutoff(retention_days: int, today: date) -> date:
    """The first day that is kept."""
    # Before the calendar begins there is nothing to remove.
    return today - timedelta(days=min(retention_days, today.toordinal() - 1))
