"""How much faster one of two ways is, from pairs that were measured by turns. Pure.

The estimate is that of Hodges and Lehmann: the median of all means of two gains (of logarithms, so that twice as fast
and half as fast weigh the same). Its interval leaves out as many of those means at each end as Wilcoxon's signed-rank
test does, whose distribution is counted exactly. A few pairs that something else disturbed move neither far.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["GainInterval", "gain_interval"]


class GainInterval(NamedTuple):
    """Ratios of speeds: above 1 is faster."""

    estimate: float
    low: float
    high: float


def gain_interval(gains: Sequence[float], confidence: float = 0.99) -> GainInterval | None:
    """What ``gains``, ratios above 0, say together; ``None`` for fewer than such an interval needs."""
    left_out = _left_out(len(gains), confidence)
    if not left_out:
        return None
    logs = [math.log(gain) for gain in gains]
    means = sorted((logs[i] + logs[j]) / 2 for i in range(len(logs)) for j in range(i + 1))
    return GainInterval(
        math.exp(statistics.median(means)), math.exp(means[left_out - 1]), math.exp(means[len(means) - left_out])
    )


@functools.cache
def _left_out(n: int, confidence: float) -> int:
    """How many of the ordered means, counted from one end, up to the interval's end; 0: there is none so sure.

    The rank sum of so many or fewer below the end has at most half the probability outside of the interval.
    """
    ways = [1]  # by rank sum: subsets of the ranks 1 to n
    for rank in range(1, n + 1):
        ways = [
            (ways[total] if total < len(ways) else 0) + (ways[total - rank] if total >= rank else 0)
            for total in range(len(ways) + rank)
        ]
    below, found = 0, 0
    for count in ways:
        below += count
        if below > (1 - confidence) / 2 * 2**n:
            break
        found += 1
    return found
