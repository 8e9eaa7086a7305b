"""How long the service builds what readers put together themselves. Pure apart from the clock it is given.

There are as many mixes and windows as anybody cares to ask for, and each is a build. What everybody asks for never
waits for this budget, and is never put off by it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from spark_service.errors import RequestError

__all__ = ["BUILD_SHARE", "BURST_SECONDS", "BuildBudget"]

BUILD_SHARE = 1 / 20
"""Share of the time, in the long run."""
BURST_SECONDS = 60.0
"""Seconds of building that may be spent at once."""


class BuildBudget:
    """Seconds that may be spent; what was spent comes back with time. May be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._left_seconds = BURST_SECONDS
        self._as_of_seconds = clock()

    def missing_seconds(self) -> float:
        """How long to wait until something may be built; 0 where it may be now."""
        with self._lock:
            self._refill()
            return max(0.0, -self._left_seconds / BUILD_SHARE)

    def spend(self, seconds: float) -> None:
        """Account for a build, however long it took in the end."""
        with self._lock:
            self._refill()
            self._left_seconds -= seconds

    def require(self) -> None:
        """Raise :class:`RequestError` (429) unless something may be built now."""
        missing_seconds = self.missing_seconds()
        if missing_seconds:
            raise RequestError(
                429,
                "too_many_builds",
                f"found more mixes and windows to build than {BUILD_SHARE:.0%} of the time is enough for, "
                "expected a question that was asked lately, or a pause",
                hint="ask again later, or for a single workload in the service's own window: those are always built",
                headers={"Retry-After": str(math.ceil(missing_seconds))},
            )

    def _refill(self) -> None:
        now_seconds = self._clock()
        came_back = (now_seconds - self._as_of_seconds) * BUILD_SHARE
        self._left_seconds = min(BURST_SECONDS, self._left_seconds + came_back)
        self._as_of_seconds = now_seconds
