"""A running agent's hand on its own counts: what closes is kept; a broken file costs a warning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from spark_agent.own_counts import OwnCounts, OwnCountsError, today
from spark_agent.paths import own_counts_path
from spark_agent.workload_name import UNLABELLED

if TYPE_CHECKING:
    from spark_agent.own_profile import OwnProfile
    from spark_runtime.placement import FloatArray
    from spark_schemas.histogram import SessionHistogram
    from spark_schemas.model import ModelShape

__all__ = ["OwnSessions"]


class OwnSessions:
    """One model's own sessions, while it serves. Any thread may use it."""

    def __init__(self, shape: ModelShape, warn: Callable[[str], None]) -> None:
        self._shape = shape
        self._warn = warn
        self._counts = OwnCounts(own_counts_path(), warn)
        self._said: str | None = None
        self.kept = 0
        """Sessions kept so far."""

    def close(self) -> None:
        """Close the file."""
        self._counts.close()

    def keep(self, session: SessionHistogram) -> None:
        """Keep a closed session's counts; a full disk or a broken file is said once and ends nothing."""
        try:
            self._counts.add(self._shape, session)
        except OwnCountsError as error:
            if str(error) != self._said:
                self._warn(f"{error}; the next start will not know this session")
            self._said = str(error)
        else:
            self._said = None
            self.kept += 1

    def profile(self, workload: str) -> OwnProfile | None:
        """The profile of a workload's own sessions as of now. Raises :class:`OwnCountsError`."""
        from spark_agent.own_profile import own_profile

        return own_profile(self._shape, self._counts.parts(self._shape), workload, today())

    def frequencies(self) -> Mapping[str, Sequence[FloatArray]]:
        """What the own sessions of every workload select that enough was served of; nothing where they are broken."""
        from spark_agent.own_profile import own_frequencies

        found: dict[str, Sequence[FloatArray]] = {}
        try:
            for known in self._counts.workloads(self._shape.fingerprint):
                if known.workload != UNLABELLED:
                    groups = self._counts.groups(self._shape, known.workload)
                    frequencies = own_frequencies(self._shape, groups, today())
                    if frequencies is not None:
                        found[known.workload] = frequencies
        except OwnCountsError as error:
            self._warn(f"{error}; nothing is compared with this machine's own sessions")
            return {}
        return found
