"""How often a workload selects each expert, as exact sums over its sessions.

A session votes with the shares of its selections, in whole numbers of a fine unit. Whole numbers add up to the same
whatever their order, so sessions can be added, taken away and merged in any way, by any number of workers, and give
the same bits as one pass over all of them.

Values per (layer, expert) lie one layer after the other in one axis; ``n_experts`` says where layers end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["FULL_WEIGHT_TOKENS", "MOST_SESSIONS", "PRIOR_TOKENS", "Votes", "by_layer", "layer_sums"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_Numbers = TypeVar("_Numbers", FloatArray, IntArray)

FULL_WEIGHT_TOKENS = 256
"""Sessions with fewer tokens vote with a proportionally smaller weight, so that a stray prompt is not a whole vote."""
PRIOR_TOKENS = 4
"""Worth of the uniform prior, in tokens of one full session: experts never seen stay possible, ordered by nothing."""
_UNITS_PER_TOKEN = 2**28
_FULL_VOTE = FULL_WEIGHT_TOKENS * _UNITS_PER_TOKEN
MOST_SESSIONS = 2**26
"""More votes than that could leave 64 bits."""
_LOW_BITS = 32


@dataclass(frozen=True, slots=True)
class Votes:
    """Sums over sessions. Immutable: every operation gives new ones."""

    n_experts: tuple[int, ...]
    n_sessions: int
    tokens: int
    weight: IntArray
    """``[layers]``: votes cast in each layer, in units; a session without selections in a layer casts none there."""
    votes: IntArray
    """``[experts of all layers]``, in units: rounded for each session, so that what is added can be taken away."""
    low: IntArray
    high: IntArray
    """Selections, ``high * 2**32 + low``: their sum may need more than 64 bits."""

    @classmethod
    def none(cls, n_experts: Sequence[int]) -> Self:
        """No session yet."""
        total = sum(n_experts)
        zeros = (np.zeros(size, dtype=np.int64) for size in (len(n_experts), total, total, total))
        return cls(tuple(n_experts), 0, 0, *zeros)

    @classmethod
    def of(cls, n_experts: Sequence[int], counts: IntArray, tokens: IntArray, *, weigh: bool = True) -> Self:
        """Votes of sessions with ``counts[session, expert of all layers]`` and ``tokens[session]``.

        A session's counts are at most 2^53 in sum. Without ``weigh`` each session is one full vote, however short.
        """
        if not len(tokens):
            return cls.none(n_experts)
        return cls.grouped(n_experts, counts, tokens, [0], weigh=weigh)[0]

    @classmethod
    def grouped(
        cls, n_experts: Sequence[int], counts: IntArray, tokens: IntArray, starts: Sequence[int], *, weigh: bool = True
    ) -> list[Self]:
        """:meth:`of` for groups of neighbouring sessions that begin at ``starts``; none is empty."""
        totals = layer_sums(counts, n_experts)
        units = np.minimum(tokens, FULL_WEIGHT_TOKENS) * _UNITS_PER_TOKEN if weigh else np.full(len(tokens), _FULL_VOTE)
        cast = np.where(totals > 0, units[:, None], 0)
        # Products and quotients of single numbers have the same bits on every machine; sums of floats have not.
        scale = np.divide(cast, totals, out=np.zeros(totals.shape), where=totals > 0)
        votes = np.rint(counts * np.repeat(scale, n_experts, axis=1)).astype(np.int64)
        sums = (
            np.add.reduceat(part, starts, axis=0)
            for part in (cast, votes, counts & (2**_LOW_BITS - 1), counts >> _LOW_BITS)
        )
        ends = [*starts[1:], len(tokens)]
        return [
            cls(tuple(n_experts), end - start, sum(tokens[start:end].tolist()), *parts)
            for start, end, *parts in zip(starts, ends, *sums, strict=True)
        ]

    def __add__(self, other: Votes) -> Votes:
        """Both sets of sessions together."""
        return self._combined(other, 1)

    def __sub__(self, other: Votes) -> Votes:
        """Without sessions that were added before."""
        return self._combined(other, -1)

    def _combined(self, other: Votes, sign: int) -> Votes:
        if self.n_experts != other.n_experts:
            raise ValueError("votes of two models, expected layers with the same numbers of experts")
        result = Votes(
            self.n_experts,
            self.n_sessions + sign * other.n_sessions,
            self.tokens + sign * other.tokens,
            self.weight + sign * other.weight,
            self.votes + sign * other.votes,
            self.low + sign * other.low,
            self.high + sign * other.high,
        )
        if not 0 <= result.n_sessions <= MOST_SESSIONS:
            raise ValueError(f"{result.n_sessions} sessions, expected 0 to {MOST_SESSIONS}")
        return result

    def scaled(self, factor: float) -> Votes:
        """Every vote worth ``factor``, at most 1, of what it was, rounded: for votes that fade with their age."""
        weight, votes = (np.rint(part * factor).astype(np.int64) for part in (self.weight, self.votes))
        return Votes(self.n_experts, self.n_sessions, self.tokens, weight, votes, self.low, self.high)

    def frequencies(self) -> list[FloatArray]:
        """Mean shares plus a small uniform prior, one array a layer: positive, and summing to one.

        Raises ``ValueError`` without sessions.
        """
        if not self.n_sessions:
            raise ValueError("no sessions, expected at least one")
        prior = PRIOR_TOKENS * _UNITS_PER_TOKEN
        return [
            np.asarray((votes + prior / len(votes)) / (float(weight) + prior), dtype=np.float64)
            for votes, weight in zip(by_layer(self.votes, self.n_experts), self.weight, strict=True)
        ]

    def mean_shares(self) -> list[FloatArray]:
        """Mean shares without a prior, one array a layer; zeros in a layer that no session selected in."""
        return [
            votes / weight if weight else np.zeros(len(votes))
            for votes, weight in zip(by_layer(self.votes, self.n_experts), self.weight, strict=True)
        ]

    def selections(self, most: int) -> list[list[int]]:
        """Selections per layer and expert, held at ``most``."""
        exact = [(high << _LOW_BITS) + low for high, low in zip(self.high.tolist(), self.low.tolist(), strict=True)]
        ends = np.cumsum(self.n_experts).tolist()
        return [
            [min(count, most) for count in exact[end - size : end]]
            for end, size in zip(ends, self.n_experts, strict=True)
        ]


def by_layer(values: IntArray, sizes: Sequence[int]) -> list[IntArray]:
    """Views of the last axis, one a layer."""
    return np.split(values, np.cumsum(sizes)[:-1], axis=-1)


def layer_sums(values: _Numbers, sizes: Sequence[int]) -> _Numbers:
    """``[…, layers]``: sums over each layer's stretch of the last axis; every layer has at least one entry."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
    sums: _Numbers = np.add.reduceat(values, starts, axis=-1)
    return sums
