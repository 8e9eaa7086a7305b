"""Moments in the database: UTC without a zone, to the second."""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["from_utc", "to_utc"]


def from_utc(moment: datetime) -> datetime:
    """The stored form of an aware moment."""
    return moment.astimezone(UTC).replace(microsecond=0, tzinfo=None)


def to_utc(stored: datetime) -> datetime:
    """An aware moment from its stored form."""
    return stored.replace(tzinfo=UTC)
