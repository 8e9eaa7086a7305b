"""What the tests of readers ask of a profile that was read."""

from __future__ import annotations

from typing import Any

COUNTS = [[4, 0, 2], [1, 5, 0]]


def counts(profile: Any) -> list[list[int]]:
    return [list(layer.counts) for layer in profile.histograms]


def rankings(profile: Any) -> list[list[int]]:
    return [list(layer.ranking) for layer in profile.histograms]


def says(profile: Any, text: str) -> bool:
    return any(text in warning for warning in profile.warnings)
