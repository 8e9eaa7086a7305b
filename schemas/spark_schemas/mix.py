"""Mixes: several workloads under one name, each with a weight, for somebody who does all of them.

``code-heavy:7+chat:3`` is traffic of which seven parts are code-heavy and three are chat. A name without a weight has
the weight 1. One workload alone is a mix of one, spelt as that workload. Every mix has one canonical spelling: names
sorted, weights divided by their greatest common divisor and always written. Pure.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import AfterValidator, StringConstraints

from spark_schemas.ids import WORKLOAD_PATTERN

__all__ = ["MAX_WEIGHT", "MAX_WORKLOADS", "MIX_EXPECTED", "MIX_PATTERN", "Mix", "MixError", "ProfileName"]

MAX_WORKLOADS = 8
MAX_WEIGHT = 1000

MIX_EXPECTED = (
    f"a workload's name (1 to 63 lower-case letters, digits and hyphens), or 2 to {MAX_WORKLOADS} different ones "
    f"joined by +, each with :WEIGHT from 1 to {MAX_WEIGHT} or without one, which is 1"
)
"""The grammar in words."""

_NAME = WORKLOAD_PATTERN.strip("^$")
_WEIGHT = "(?:[1-9][0-9]{0,2}|1000)"
_CANONICAL_PATTERN = rf"^(?:{_NAME}|{_NAME}:{_WEIGHT}(?:\+{_NAME}:{_WEIGHT}){{1,{MAX_WORKLOADS - 1}}})$"
MIX_PATTERN = rf"^{_NAME}(?::{_WEIGHT})?(?:\+{_NAME}(?::{_WEIGHT})?){{0,{MAX_WORKLOADS - 1}}}$"
"""What any spelling matches; that no name is there twice no pattern says."""

_MEMBER = re.compile(rf"({_NAME})(?::({_WEIGHT}))?", re.ASCII)


class MixError(ValueError):
    """A text that names no mix. ``found`` is the part that is wrong, ``expected`` what it should be."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"found {found}, expected {expected}")
        self.found = found
        self.expected = expected


@dataclass(frozen=True, slots=True)
class Mix:
    """Names with weights, canonical: sorted by name, weights without a common divisor."""

    members: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read any spelling. Raises :class:`MixError`."""
        parts = text.split("+")
        if len(parts) > MAX_WORKLOADS:
            raise MixError(f"{len(parts)} workloads", f"at most {MAX_WORKLOADS}")
        weights: dict[str, int] = {}
        for part in parts:
            found = _MEMBER.fullmatch(part)
            if found is None:
                raise MixError(repr(part[:80]), MIX_EXPECTED)
            name, weight = found.groups()
            if name in weights:
                raise MixError(f"{name} twice", "every workload once")
            weights[name] = int(weight or 1)
        divisor = math.gcd(*weights.values())
        return cls(tuple((name, weights[name] // divisor) for name in sorted(weights)))

    def __str__(self) -> str:
        """The canonical spelling: of one workload its name alone."""
        if len(self.members) == 1:
            return self.members[0][0]
        return "+".join(f"{name}:{weight}" for name, weight in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        """The workloads, sorted."""
        return tuple(name for name, _ in self.members)


def _require_canonical(text: str) -> str:
    canonical = str(Mix.parse(text))
    if canonical != text:
        raise ValueError(f"found {text}, expected its canonical spelling {canonical}")
    return text


ProfileName = Annotated[str, StringConstraints(pattern=_CANONICAL_PATTERN), AfterValidator(_require_canonical)]
"""What a profile is of: a workload, or a mix in its canonical spelling."""
