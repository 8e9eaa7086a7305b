"""What was built for whom, remembered by revision and by question. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from spark_runtime.calibration.tally import Window
from spark_schemas.ids import Phase
from spark_schemas.mix import Mix
from spark_service.builders import BuiltProfile

__all__ = ["Asked", "BuildMemory", "Latest"]


@dataclass(frozen=True, slots=True)
class Latest:
    """The profile built last for a question, and until when it will do, unless something was deleted."""

    built: BuiltProfile
    deletions: int
    good_until_seconds: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What a profile is asked of: sessions of which model's file, of which workloads, and from when."""

    source: str
    mix: Mix
    phase: Phase
    window: Window
    of_a_reader: bool
    """Whether a reader put it together: a mix, or a window that is not the service's own."""
    until_day: int | None = None
    """Only sessions whose last part came on this day (since 1970) or earlier; ``None``: all."""


@dataclass(slots=True)
class BuildMemory:
    """What was built, by revision and by question, the last used last."""

    remembered: int
    built: OrderedDict[str, BuiltProfile] = field(default_factory=OrderedDict)
    latest: OrderedDict[tuple[str, Asked], Latest] = field(default_factory=OrderedDict)

    def keep(self, revision: str, question: tuple[str, Asked], latest: Latest) -> None:
        """Remember what answers a question now, in place of what was used longest ago."""
        self.built[revision] = latest.built
        self.built.move_to_end(revision)
        self.latest[question] = latest
        self.latest.move_to_end(question)
        for kept in (self.built, self.latest):
            while len(kept) > self.remembered:
                kept.popitem(last=False)
