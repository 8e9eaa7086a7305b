"""From tokens to text as it streams."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["TextStream"]


class TextStream:
    """Turns token bytes into text that never ends inside a character or inside a possible stop string."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._n_decoded = self._n_taken = 0
        self.stop: str | None = None
        """The stop string that was met; nothing more comes out after it."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self.stop is not None

    @property
    def end(self) -> int:
        """Characters that the text has with everything pushed; one that is not complete counts."""
        return self._n_decoded + bool(self._decoder.getstate()[0])

    @property
    def certain(self) -> int:
        """Characters returned so far."""
        return self._n_taken

    def push(self, piece: bytes, *, final: bool = False) -> str:
        """Take bytes, return the text that is certain by now; ``final`` releases what was held back."""
        if self.stopped:
            return ""
        text = self._decoder.decode(piece, final)
        self._n_decoded += len(text)
        if not self._stops:
            self._n_taken = self._n_decoded
            return text
        self._held += text
        # The stop that is complete first, so that the answer does not depend on how the text was cut into pieces.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.stop = min(found)
            return self._take(at)
        return self._take(len(self._held) if final else len(self._held) - self._possible_stop())

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._n_taken += length
        return text
