"""What of a conversation was counted before, so that recording it again, grown or forked, counts only what is new.

Of each counted stretch of tokens keyed digests are kept: of everything up to its end, and up to every 256th token in
it. A conversation that goes on has the digest of its old end; a fork has those up to where it left, so at most 255
tokens before that are counted again. Digests are on this machine only and say nothing without the session key.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Stretch", "missing", "stretches"]

STEP = 256
"""Tokens between two digests within a stretch."""
_DIGEST_BYTES = 8
_KEY_BYTES = 64
"""Most that BLAKE2b takes."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Counted tokens ``start`` to ``end`` of a conversation, and the digests of what leads up to them."""

    start: int
    end: int
    marks: bytes
    """Of the tokens up to each of :attr:`positions`, one after the other."""

    @property
    def positions(self) -> list[int]:
        """Where the digests are: multiples of :data:`STEP` after the start, and the end."""
        return _positions(self.start, self.end)


def stretches(key: bytes, tokens: Sequence[int], ranges: Iterable[tuple[int, int]]) -> list[Stretch]:
    """Describe counted ranges of a conversation's tokens, to be found again by :func:`missing`."""
    wanted = list(ranges)
    digests = _digests(key, tokens, {position for start, end in wanted for position in _positions(start, end)})
    return [
        Stretch(start, end, b"".join(digests[position] for position in _positions(start, end))) for start, end in wanted
    ]


def missing(key: bytes, tokens: Sequence[int], known: Sequence[Stretch]) -> list[tuple[int, int]]:
    """Ranges of a conversation's tokens that no known stretch covers, in order; empty when all was counted."""
    positions = {position for stretch in known for position in stretch.positions if position <= len(tokens)}
    digests = _digests(key, tokens, positions)
    covered = sorted(filter(None, (_shared(stretch, digests) for stretch in known)))
    left: list[tuple[int, int]] = []
    reached = 0
    for start, end in covered:
        if start > reached:
            left.append((reached, start))
        reached = max(reached, end)
    if reached < len(tokens):
        left.append((reached, len(tokens)))
    return left


def _shared(stretch: Stretch, digests: dict[int, bytes]) -> tuple[int, int] | None:
    """The part of a stretch that is in the conversation too."""
    end = stretch.start
    for index, position in enumerate(stretch.positions):
        mark = stretch.marks[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]
        if digests.get(position) != mark:
            break
        end = position
    return (stretch.start, end) if end > stretch.start else None


def _positions(start: int, end: int) -> list[int]:
    return [*range((start // STEP + 1) * STEP, end, STEP), end]


def _digests(key: bytes, tokens: Sequence[int], positions: set[int]) -> dict[int, bytes]:
    state = hashlib.blake2b(key=key[:_KEY_BYTES], digest_size=_DIGEST_BYTES)
    found: dict[int, bytes] = {}
    at = 0
    for position in sorted(positions):
        state.update(array("q", tokens[at:position]).tobytes())
        at = position
        found[position] = state.copy().digest()
    return found
