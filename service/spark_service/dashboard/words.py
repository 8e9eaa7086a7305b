"""Numbers and verdicts as pages say them: the same words in every page, and those of the commands. Pure."""

from __future__ import annotations

import datetime as dt
import re
from fractions import Fraction

from spark_schemas.ids import Policy, Verdict
from spark_schemas.profile import LivePolicy

__all__ = [
    "CURVES",
    "VERDICTS",
    "count",
    "counted",
    "day",
    "interval",
    "percent",
    "points",
    "size",
    "size_argument",
    "tok_s",
]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_ARGUMENT_UNITS = (("T", 2**40), ("G", 2**30), ("M", 2**20), ("K", 2**10))
_SHORT = re.compile(r"\d{1,6}(?:\.\d{1,3})?")

CURVES: dict[Policy | LivePolicy, str] = {
    "uniform": "uniform: the first experts of every layer",
    "own": "calibrated: this profile, placed once",
    "live_profile": "calibrated + ring: this profile in a cache, as agents ran it",
    "lru": "LRU: a cache without a profile, started empty",
    "live_unprofiled": "ring alone: a cache without a profile, as agents ran it",
    "oracle": "oracle: the best that placing once could do",
    "other": "other profiles: those of the other workloads, their mean",
    "random": "random: any experts, the mean of five draws",
}
"""What each curve is called."""
VERDICTS: dict[Verdict | None, str] = {
    "profile": "Use this profile",
    "pin": "Pin this profile's experts",
    "cache_only": "A cache does the work",
    "no_gain": "No gain",
    None: "No verdict yet",
}
"""Verdicts in a few words."""


def percent(rate: float) -> str:
    """A rate with one digit, as the commands print it."""
    return f"{rate:.1%}"


def points(difference: float) -> str:
    """A difference of two rates."""
    return f"{100 * difference:+.1f} points"


def interval(low: float, high: float) -> str:
    """The two ends of an interval of rates."""
    return f"{percent(low)} to {percent(high)}"


def count(number: int) -> str:
    """A whole number with its thousands apart."""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(n_bytes: int) -> str:
    """A size with a binary unit and three or four digits, as the commands print it."""
    value = float(n_bytes)
    for unit in _UNITS[:-1]:
        # Not 1024: what is printed as 1024.0 belongs to the next unit.
        if value < 1023.95:
            return f"{n_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def size_argument(n_bytes: int) -> str:
    """Exactly so many bytes as an option like ``--vram`` takes them, short where that is exact."""
    for letter, unit in _ARGUMENT_UNITS:
        value = Fraction(n_bytes, unit)
        text = f"{float(value):.3f}".rstrip("0").rstrip(".")
        if value >= 1 and _SHORT.fullmatch(text) and Fraction(text) == value:
            return text + letter
    return str(n_bytes)


def tok_s(low: float, high: float) -> str:
    """Tokens a second, as a range unless both ends are printed alike."""
    digits = 0 if low >= 10 else 1
    ends = [f"{value:,.{digits}f}" for value in (low, high)]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def day(number: int) -> str:
    """A day since 1970 as a date."""
    return (dt.date(1970, 1, 1) + dt.timedelta(days=number)).isoformat()
