"""Grammars of texts that go on up to a marker, as automata: whatever stands before it, parts of it too. Pure.

A state is how much of the marker the last characters are, as in Knuth, Morris and Pratt, "Fast pattern matching in
strings", SIAM J. Comput. 6, 1977. A rule refers to another one at its end only, where llama.cpp keeps no stack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

__all__ = ["text_rules"]

_State = tuple[int, int]
_START = (0, 0)


def text_rules(prefix: str, end: str, before: str = "") -> dict[str, str]:
    """Rules of a text with its end, which stands in it once, right after ``before``; the first one is its root.

    Their names begin with ``prefix``.
    """
    whole = before + end
    names: dict[_State, str] = {_START: f"{prefix}0"}
    rules: dict[str, str] = {}
    waiting = [_START]
    for state in waiting:
        leading: dict[str, list[str]] = defaultdict(list)
        special = []
        for letter in sorted(set(whole)):
            following = (_longest(whole, state[0], letter), _longest(end, state[1], letter))
            if following == _START:
                continue
            special.append(letter)
            if following[1] < len(end):
                if following not in names:
                    names[following] = f"{prefix}{len(names)}"
                    waiting.append(following)
                leading[f" {names[following]}"].append(letter)
            elif following[0] == len(whole):
                leading[""].append(letter)
        ways = [f"{_one_of(letters)}{rest}" for rest, letters in leading.items()]
        rules[names[state]] = " | ".join([f"{_one_of(special, negated=True)} {prefix}0", *ways])
    return rules


def _longest(word: str, matched: int, letter: str) -> int:
    """How much of the word's beginning a text ends with, of which that much was it, after one more letter."""
    text = word[:matched] + letter
    return next(length for length in range(min(len(text), len(word)), -1, -1) if text.endswith(word[:length]))


def _one_of(letters: Iterable[str], *, negated: bool = False) -> str:
    spelled = (letter if letter.isalnum() and letter.isascii() else f"\\U{ord(letter):08x}" for letter in letters)
    return f"[{'^' if negated else ''}{''.join(spelled)}]"
