"""From misses to tokens a second, with a machine's own figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Machine", "MeasuredRun"]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One way of running a model that was measured."""

    decode_tok_s: float
    loads_per_token: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What one model's tokens and an expert's copy take on one machine.

    A token takes its time with every expert resident, and for each expert that has to be copied first what the copy's
    launch takes and its bytes over the link. Copies are not hidden: a layer cannot start before its experts are there.
    """

    token_s: float
    """A decoded token with every expert resident."""
    miss_s: float
    """For each copy, whatever its size."""
    link_bytes_per_s: float | None = None
    """Of copies from host memory to slots; ``None`` where ``miss_s`` is the whole copy of this model's experts."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for figures that no machine has."""
        if (
            not self.token_s > 0
            or not self.miss_s >= 0
            or not (self.link_bytes_per_s is None or self.link_bytes_per_s > 0)
        ):
            raise ValueError(f"{self}: times and rates, expected numbers above 0")

    def decode_tok_s(self, loads_per_token: float, expert_bytes: float = 0.0) -> float:
        """Tokens a second when so many experts are copied for each; ``expert_bytes`` is their mean size."""
        copy_s = 0.0 if self.link_bytes_per_s is None else expert_bytes / self.link_bytes_per_s
        return 1.0 / (self.token_s + loads_per_token * (self.miss_s + copy_s))

    @classmethod
    def fitted(
        cls,
        token_s: float,
        runs: Sequence[MeasuredRun],
        expert_bytes: float = 0.0,
        link_bytes_per_s: float | None = None,
    ) -> Machine:
        """The time of a miss from measured runs, by least squares through the all-resident token.

        With the link's rate known, what is left of it is the launch (never below 0). Raises ``ValueError`` without a
        run that missed.
        """
        weight = sum(run.loads_per_token**2 for run in runs)
        if not weight:
            raise ValueError("no measured run copied experts, so nothing says what a copy takes")
        more = sum(run.loads_per_token * (1.0 / run.decode_tok_s - token_s) for run in runs)
        miss_s = max(0.0, more / weight)
        if link_bytes_per_s is not None:
            miss_s = max(0.0, miss_s - expert_bytes / link_bytes_per_s)
        return cls(token_s, miss_s, link_bytes_per_s)
