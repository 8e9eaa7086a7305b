"""Prompts to tokens, of which only what is new is tokenised: a conversation comes whole with each of its turns.

llama.cpp cuts a prompt at the texts of its special tokens, the longest of them first, and tokenises what is between
two of them by itself. So where nothing can stand in a marker's way (:func:`clean_markers`), the tokens of a prompt are
those of its parts, and those of a part are the same in every prompt.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["PromptTokenizer", "SpecialToken", "Vocabulary", "clean_markers"]

KEPT_BYTES = 4 << 20
"""For texts that are remembered, with their tokens: two million characters of English."""
_BYTES_AN_ENTRY = 256
"""What keeping one takes besides."""


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that llama.cpp looks for as text, before any other."""

    token: int
    text: bytes
    strips: bool
    """White space beside it is dropped."""


class Vocabulary(Protocol):
    """What tokenises."""

    @property
    def ends_prompts(self) -> bool:
        """Whether ``add_special`` adds something at the end."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""

    def special_tokens(self) -> list[SpecialToken]:
        """Every special token; none of a vocabulary that does not tokenise what is between two of them by itself."""


def clean_markers(specials: Sequence[SpecialToken], wanted: Iterable[int]) -> dict[str, int]:
    """Those of the ``wanted`` tokens, by text, that llama.cpp takes for themselves wherever their text stands.

    Tokens with longer texts are looked for first, those of the same length in no known order: none of them may share
    text with a marker. White space is dropped only up to a marker, which has none at its ends.
    """
    wanted = set(wanted)
    found = {}
    for one in specials:
        if one.token not in wanted or one.strips or not one.text or one.text.strip() != one.text:
            continue
        rivals = (other for other in specials if other is not one and len(other.text) >= len(one.text))
        if _overlaps(one.text, one.text) or any(
            one.text in other.text or _overlaps(one.text, other.text) or _overlaps(other.text, one.text)
            for other in rivals
        ):
            continue
        try:
            found[one.text.decode()] = one.token
        except UnicodeDecodeError:
            continue  # no text has it
    return found


def _overlaps(left: bytes, right: bytes) -> bool:
    """Whether an end of one begins the other."""
    return any(left.endswith(right[:length]) for length in range(1, min(len(left), len(right))))


class PromptTokenizer:
    """Tokenises prompts, whole ones until it has :meth:`learned`. Threads may share one."""

    def __init__(self, vocabulary: Vocabulary, kept_bytes: int = KEPT_BYTES) -> None:
        self._vocabulary = vocabulary
        self._markers: tuple[re.Pattern[str], dict[str, int]] | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._kept_bytes = 0
        self._most_bytes = kept_bytes

    def learn(self, sample: str) -> None:
        """Find the markers by which to cut prompts, among the special tokens of a prompt such as those that will come.

        It looks at the whole vocabulary: a tenth of a second for a large one.
        """
        whole = self._whole(sample, add_special=False)
        markers = clean_markers(self._vocabulary.special_tokens(), whole)
        if not markers:
            return
        # The longer first, as in the vocabulary.
        pattern = re.compile("(" + "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) + ")")
        if self._parts(pattern, markers, sample, add_special=False) == whole:
            self._markers = pattern, markers

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a prompt in which markers are read as tokens."""
        markers = self._markers
        if markers is None or (add_special and self._vocabulary.ends_prompts):
            return self._whole(text, add_special=add_special)
        return self._parts(*markers, text, add_special=add_special)

    def _whole(self, text: str, *, add_special: bool) -> list[int]:
        return self._vocabulary.tokenize(text, add_special=add_special, parse_special=True)

    def _parts(self, pattern: re.Pattern[str], markers: dict[str, int], text: str, *, add_special: bool) -> list[int]:
        first, *rest = pattern.split(text)
        tokens = list(self._part(first, add_special)) if first or add_special else []
        for marker, part in zip(rest[::2], rest[1::2], strict=True):
            tokens.append(markers[marker])
            if part:
                tokens.extend(self._part(part, False))
        return tokens

    def _part(self, text: str, starts: bool) -> Sequence[int]:
        key = text, starts
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        tokens = array("i", self._whole(text, add_special=starts))
        with self._lock:
            size = _bytes(text, tokens)
            if key not in self._kept and size <= self._most_bytes:
                self._kept[key] = tokens
                self._kept_bytes += size
            while self._kept_bytes > self._most_bytes:
                (oldest, _), its_tokens = self._kept.popitem(last=False)
                self._kept_bytes -= _bytes(oldest, its_tokens)
        return tokens


def _bytes(text: str, tokens: array[int]) -> int:
    return sys.getsizeof(text) + tokens.itemsize * len(tokens) + _BYTES_AN_ENTRY
