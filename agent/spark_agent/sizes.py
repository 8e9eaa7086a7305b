"""Sizes as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from spark_agent.errors import UsageError

__all__ = ["format_size", "parse_size"]

_PATTERN = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kmgt])(i?))?(b?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_size(text: str, option: str) -> int:
    """Bytes of ``14G``, ``14GiB`` (both binary, as memory is sold), ``14GB`` (decimal) or a plain number of bytes.

    Raises :class:`UsageError`, which names the option that the text was given for.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option}: found {text!r}, expected a number with a unit", "e.g. 14G, 14GiB or 6.5GB")
    number, power, binary, suffix = match.groups()
    base = 1000 if suffix and not binary else 1024
    return int(Fraction(number) * base ** _POWERS[(power or "").lower()])


def format_size(n_bytes: int) -> str:
    """A size with a binary unit and three or four digits."""
    value = float(n_bytes)
    for unit in _UNITS:
        # Not 1024: what is printed as 1024.0 belongs to the next unit.
        if value < 1023.95 or unit == _UNITS[-1]:
            return f"{n_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit always returns")
