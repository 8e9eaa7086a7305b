"""What a person knows of a model that a file does not say."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Hints"]


@dataclass(frozen=True, slots=True)
class Hints:
    """All optional; from the command line, or from a GGUF file."""

    n_experts: int | None = None
    top_k: int | None = None
    domain: str | None = None
    """Which of several profiles in one file."""
