"""Text that comes in pieces, read from its front by generators that wait where it ends."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

__all__ = ["Source", "Waits"]

_T = TypeVar("_T")
Waits = Generator[None, None, _T]
"""Reads on, and yields where more text is needed."""
_SPACE = re.compile(r"\s*")


class Source:
    """Text of which more may come. What was taken can be given back until it is settled."""

    def __init__(self, text: str) -> None:
        self.rest = text
        """What was not taken."""
        self.final = False
        """No more will come: who reads must not wait."""
        self.cut = False
        """The text ends where it was cut off, not where its writer ended it."""
        self.settled = False
        """Whether anything was settled."""
        self._taken: list[str] = []

    def push(self, text: str) -> None:
        """More has come."""
        self.rest += text

    def take(self, length: int) -> str:
        """Take so many characters."""
        text, self.rest = self.rest[:length], self.rest[length:]
        self._taken.append(text)
        return text

    def take_all(self, pattern: re.Pattern[str]) -> str:
        """Take what the pattern matches at the front; nothing if it does not."""
        found = pattern.match(self.rest)
        return self.take(found.end()) if found is not None and found.end() else ""

    def settle(self) -> None:
        """What was taken is not given back any more."""
        self._taken.clear()
        self.settled = True

    @property
    def given_back(self) -> str:
        """Everything that is not settled."""
        return "".join(self._taken) + self.rest

    def char(self) -> Waits[str]:
        """The next character, not taken; empty at the end."""
        while not self.rest and not self.final:
            yield
        return self.rest[:1]

    def skip_space(self) -> Waits[str]:
        """Take white space; the next character, not taken."""
        while True:
            self.take_all(_SPACE)
            if self.rest or self.final:
                return self.rest[:1]
            yield

    def word(self, words: Sequence[str]) -> Waits[str]:
        """Which of the words stands here, not taken; empty where none does."""
        while True:
            found = next((word for word in words if self.rest.startswith(word)), None)
            if found is not None:
                return found
            if self.final or not any(word.startswith(self.rest) for word in words):
                return ""
            yield

    def until(self, word: str, most: int | None = None) -> Waits[str | None]:
        """Take the text before a word, which is left; ``None`` if it does not come within ``most`` characters."""
        seen = 0
        while True:
            at = self.rest.find(word, seen)
            if at >= 0 and (most is None or at <= most):
                return self.take(at)
            seen = max(0, len(self.rest) - len(word) + 1)
            if self.final or at >= 0 or (most is not None and seen > most):
                return None
            yield

    def skip_closers(self, closers: Sequence[str]) -> Waits[None]:
        """Take those of the words that follow, in order, with white space before each.

        Models forget closers; what is missing is not missed.
        """
        for closer in closers:
            while True:
                space = _SPACE.match(self.rest)
                begin = space.end() if space is not None else 0
                if self.rest.startswith(closer, begin):
                    self.take(begin + len(closer))
                    break
                if self.final or not closer.startswith(self.rest[begin:]):
                    break
                yield
