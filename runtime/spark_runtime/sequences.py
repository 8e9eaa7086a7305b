"""Which sequence of a context a prompt goes to, so that conversations that alternate keep what was computed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Cached", "Choice", "choose_sequence", "common_length"]

KEEP_SHARE = 0.8
"""A sequence is taken over if at least so much of it stays; else it is another conversation's, and to be kept."""
MIN_COPY_TOKENS = 256
"""Fewer are computed sooner than a sequence's whole memory is copied."""
_STRIDE = 1024


@dataclass(frozen=True, slots=True)
class Cached:
    """What a sequence holds."""

    tokens: Sequence[int]
    last_use: int
    """Larger is later."""
    busy: bool = False
    """A generation is using it: it can be copied from, and not taken."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a prompt goes."""

    sequence: int
    copy_from: int | None = None
    """Another sequence that holds a longer part of the prompt, and has to stay."""


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences, of whichever types, begin with alike."""
    most = min(len(a), len(b))
    for start in range(0, most, _STRIDE):
        end = min(start + _STRIDE, most)
        # Whole parts compare much quicker than single tokens; a list never equals a tuple.
        part, other = list(a[start:end]), list(b[start:end])
        if part != other:
            return start + next(at for at, (x, y) in enumerate(zip(part, other, strict=True)) if x != y)
    return most


def choose_sequence(prompt: Sequence[int], cached: Sequence[Cached]) -> Choice:
    """The sequence for a prompt; at least one must be free.

    The free one with the longest common beginning, if that is at least :data:`KEEP_SHARE` of what it holds: the
    conversation goes on there. Else the one whose loss matters least: an empty one, or the least recently used. It
    starts from a copy of the longest common beginning, wherever that is, if that is worth copying.
    """
    common = [common_length(prompt, sequence.tokens) for sequence in cached]
    free = [index for index, sequence in enumerate(cached) if not sequence.busy]
    if not free:
        raise ValueError("every sequence is busy, expected a free one")
    going_on = [index for index in free if common[index] and common[index] >= KEEP_SHARE * len(cached[index].tokens)]
    if going_on:
        chosen = max(going_on, key=lambda index: (common[index], cached[index].last_use))
    else:
        chosen = min(free, key=lambda index: (len(cached[index].tokens) > 0, cached[index].last_use))
    source = max(range(len(cached)), key=lambda index: common[index])
    worth = common[source] - common[chosen] >= MIN_COPY_TOKENS
    return Choice(chosen, source if worth else None)
