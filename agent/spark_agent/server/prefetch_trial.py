"""Whether fetching early pays, tried on what is decoded anyway: blocks of tokens by turns with it and without. Pure.

Two blocks are a pair, and every other pair begins with the other way, so that a context that grows and a machine that
warms up favour neither. Right after a change, a prompt or a pause tokens are not timed: graphs are captured again, and
the slots hold what the other way brought. A block's figure is the mean of its tokens without the fastest and the
slowest eighth. The pairs are looked at a few times only; what is not sure by the last one is not used.

What is fetched early changes time alone, so a trial changes no output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spark_agent.paired_gain import GainInterval, gain_interval
from spark_agent.prefetching import GAIN_TO_START

__all__ = ["PrefetchTrial", "TrialRules"]


@dataclass(frozen=True, slots=True)
class TrialRules:
    """How long, and how sure. Lengths are decoded tokens."""

    learning_tokens: int = 1024
    """With fetching early, before the first pair, where nothing was learned of the model's selections yet: on an H200
    the pairs after 256 found a third to half of what is gained later."""
    settling_tokens: int = 16
    """Not timed after a change of the way or of the placement."""
    resumed_tokens: int = 2
    """Not timed after a prompt or a pause."""
    timed_tokens: int = 48
    """Of a block."""
    pause_s: float = 1.0
    """A card left alone for longer lowers its clock."""
    looks: tuple[int, ...] = (8, 12, 16, 24, 32)
    """Numbers of pairs after which it may be decided; the last one ends the trial."""
    most_tokens: int = 8192
    """All together, timed or not: the trial ends then, whatever it knows."""


class PrefetchTrial:
    """One trial. Not thread-safe."""

    def __init__(
        self,
        gains: Sequence[float] = (),
        tokens: int = 0,
        *,
        learned: bool = False,
        rules: TrialRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Go on where one ended that was cut short: its pairs' ``gains`` and how many ``tokens`` it took."""
        self.rules = rules or TrialRules()
        self.gains = list(gains)
        """Speed with fetching early over the speed without, a pair each."""
        self.tokens = tokens
        self.over = False
        self._clock = clock
        self._learning = 0 if learned else self.rules.learning_tokens
        self._untimed = self.rules.settling_tokens
        self._timed: list[float] = []
        self._first_s: float | None = None
        self._ended_s: float | None = None
        self.early = True
        """Whether the next tokens are to be decoded with fetching early; after the trial whether it pays."""
        if not self._learning:
            self._begin_pair()

    @property
    def interval(self) -> GainInterval | None:
        """What the pairs say so far."""
        return gain_interval(tuple(self.gains))  # others may read it meanwhile

    @property
    def pays(self) -> bool | None:
        """What is sure by now: that it pays, or that it does not pay enough; ``None``: neither."""
        found = self.interval
        if found is not None and found.low > 1 and found.estimate >= GAIN_TO_START:
            return True
        return False if found is not None and found.high < GAIN_TO_START else None

    def interrupted(self) -> None:
        """Something else was computed, or waited for."""
        self._untimed = max(self._untimed, self.rules.resumed_tokens)

    def restart(self) -> None:
        """The experts were placed anew: the pair begins again."""
        self._untimed = self.rules.settling_tokens
        if not self._learning and not self.over:
            self._begin_pair()

    def decoded(self, seconds: float) -> None:
        """One token was, alone, in so many seconds, in the way that :attr:`early` says."""
        if self.over:
            return
        now, before = self._clock(), self._ended_s
        self._ended_s = now
        self.tokens += 1
        if before is not None and now - before - seconds > self.rules.pause_s:
            self.interrupted()
        if self._learning:
            self._learning -= 1
            if not self._learning:
                self._begin_pair()
        elif self._untimed:
            self._untimed -= 1
        else:
            self._timed.append(seconds)
            if len(self._timed) == self.rules.timed_tokens:
                self._end_block()
        if self.tokens >= self.rules.most_tokens:
            self._end()

    def _begin_pair(self) -> None:
        self._first_s = None
        self._begin_block(early=len(self.gains) % 2 == 0)

    def _begin_block(self, *, early: bool) -> None:
        self._timed.clear()
        if early != self.early:
            self.early = early
            self._untimed = self.rules.settling_tokens

    def _end_block(self) -> None:
        taken_s = _typical(self._timed)
        if taken_s <= 0:  # of a clock that stands still
            self._begin_pair()
        elif self._first_s is None:
            self._first_s = taken_s
            self._begin_block(early=not self.early)
        else:
            with_s, without_s = (taken_s, self._first_s) if self.early else (self._first_s, taken_s)
            self.gains.append(without_s / with_s)
            last = len(self.gains) >= self.rules.looks[-1]
            if last or (len(self.gains) in self.rules.looks and self.pays is not None):
                self._end()
            else:
                self._begin_pair()

    def _end(self) -> None:
        self.over = True
        self.early = self.pays is True


def _typical(seconds: Sequence[float]) -> float:
    """Mean without the least and the greatest eighth."""
    left_out = len(seconds) // 8
    kept = sorted(seconds)[left_out : len(seconds) - left_out]
    return sum(kept) / len(kept)
