"""Reasoning with a limit: when it has had its tokens, what ends it is written for the model. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ThoughtLimit", "ThoughtWatch"]


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """How long a model may think before it answers."""

    tokens: int
    """0: none at all."""
    opening: bytes
    closing: bytes
    ending: tuple[int, ...]
    """The tokens that are written for the model; their text holds ``closing``."""
    opened: bool
    """Whether the prompt has opened the reasoning; otherwise the answer's first text may."""

    @property
    def over(self) -> bool:
        """Whether the reasoning has had its tokens before it begins."""
        return self.opened and self.tokens == 0


class ThoughtWatch:
    """Follows an answer's bytes as they are generated, up to the end of its reasoning."""

    def __init__(self, limit: ThoughtLimit) -> None:
        self._limit = limit
        begins: Literal["before", "inside"] = "inside" if limit.opened else "before"
        self._state: Literal["before", "inside", "over"] = "over" if limit.over else begins
        self._held = b""
        self._tokens = 0

    def is_over(self, piece: bytes) -> bool:
        """Take a token's bytes; whether the reasoning has had its tokens by now and has not ended. ``True`` once."""
        if self._state == "over":
            return False
        self._held += piece
        if self._state == "before":
            text, opening = self._held.lstrip(), self._limit.opening
            if text.startswith(opening):
                self._state, self._held = "inside", text[len(opening) :]
                if self._limit.tokens == 0:
                    self._state = "over"
                    return self._limit.closing not in self._held
            elif not opening.startswith(text):
                self._state = "over"
                return False
            else:
                return False
        self._tokens += 1
        if self._limit.closing in self._held:
            self._state = "over"
            return False
        self._held = self._held[-len(self._limit.closing) :]
        if self._tokens >= self._limit.tokens:
            self._state = "over"
            return True
        return False
