"""Retention: parts received too long ago are removed, one day of them at a time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from spark_schemas.ids import Count
from spark_service.db.audit import record
from spark_service.db.removal import days_before, parts_of_day
from spark_service.db.store import Store

__all__ = ["MAX_RETENTION_DAYS", "RetentionReceipt", "RetentionRequest", "apply_retention", "overdue"]

MAX_RETENTION_DAYS = 36_500
_Days = Annotated[int, Field(ge=1, le=MAX_RETENTION_DAYS)]


class RetentionRequest(BaseModel):
    """What an administrator asks for."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    retention_days: _Days | None = Field(None, description="Keep this many days; by default what the service keeps.")
    dry_run: bool = Field(False, description="Only say what would be removed.")


class RetentionReceipt(BaseModel):
    """What a run removed, or would have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    retention_days: int
    dry_run: bool
    parts: Count
    parts_by_day: dict[str, Count]
    """By the day they were received, ISO 8601."""

    @classmethod
    def of(cls, retention_days: int, removed: Mapping[date, int], *, dry_run: bool) -> Self:
        """From what :func:`apply_retention` or :func:`overdue` returned."""
        by_day = {day.isoformat(): count for day, count in removed.items()}
        return cls(retention_days=retention_days, dry_run=dry_run, parts=sum(removed.values()), parts_by_day=by_day)


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
