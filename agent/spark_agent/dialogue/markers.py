"""Markers in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["possible_start"]


def possible_start(text: str, markers: Sequence[str]) -> int:
    """Where the longest end of the text begins that is the beginning of a marker; its length if there is none."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return len(text) - longest
