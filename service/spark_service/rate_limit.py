"""Token buckets: how many requests a key may make, in bounded memory. Pure apart from the clock it is given."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["MAX_BUCKETS", "NANOSECONDS_PER_SECOND", "Rate", "RateLimiter", "Rates", "retry_after_seconds"]

MAX_BUCKETS = 65_536
"""Keys remembered at most; beyond that the one unused for longest is forgotten, which can only admit more."""
NANOSECONDS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """``per_second`` requests in the long run (0: no limit), ``burst`` at once."""

    per_second: float
    burst: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits of a service: reads and uploads by token, failed authentication by address.

    The defaults stop a client that has run wild, not one that works hard.
    """

    reads: Rate = Rate(5000, 10_000)
    uploads: Rate = Rate(2000, 4000)
    failures: Rate = Rate(1, 60)


class RateLimiter:
    """One bucket per key. Not for several threads.

    A bucket is kept as one integer: the moment, in nanoseconds, at which it will be full again. So nothing is rounded,
    and a bucket that is full equals one that was never used and is dropped.
    """

    def __init__(
        self, rate: Rate, clock_ns: Callable[[], int] = time.monotonic_ns, max_buckets: int = MAX_BUCKETS
    ) -> None:
        """Start with every bucket full. ``clock_ns`` never goes back."""
        self._unlimited = rate.per_second <= 0
        self._interval_ns = 0 if self._unlimited else math.ceil(NANOSECONDS_PER_SECOND / rate.per_second)
        self._tolerance_ns = (max(rate.burst, 1) - 1) * self._interval_ns
        self._clock_ns = clock_ns
        self._max_buckets = max_buckets
        # Least recently admitted first.
        self._full_at_ns: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        """Buckets in memory."""
        return len(self._full_at_ns)

    def take(self, key: str) -> int:
        """Take one from a key's bucket; return 0, or the nanoseconds until there is one to take."""
        if self._unlimited:
            return 0
        now_ns = self._clock_ns()
        missing_ns = max(self._full_at_ns.get(key, now_ns) - now_ns, 0)
        if missing_ns > self._tolerance_ns:
            return missing_ns - self._tolerance_ns
        self._full_at_ns[key] = now_ns + missing_ns + self._interval_ns
        self._full_at_ns.move_to_end(key)
        self._drop(now_ns)
        return 0

    def _drop(self, now_ns: int) -> None:
        # Whatever stands behind a bucket that is not full yet was used later; it waits for its turn.
        while self._full_at_ns:
            key, full_at_ns = next(iter(self._full_at_ns.items()))
            if full_at_ns > now_ns and len(self._full_at_ns) <= self._max_buckets:
                return
            del self._full_at_ns[key]


def retry_after_seconds(wait_ns: int) -> int:
    """Value of a ``Retry-After`` header: whole seconds, at least one."""
    return max(1, -(-wait_ns // NANOSECONDS_PER_SECOND))
