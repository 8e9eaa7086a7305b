"""What is known of one workload before any profile: its sessions' votes, by side of the split and by day. Pure.

Exact sums: sessions can be added, taken away and merged in any order, and give the same bits as all of them at once.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from spark_runtime.calibration.sessions import Sessions
from spark_runtime.votes import Votes
from spark_schemas.ids import Split

__all__ = ["DayTally", "Tally", "Window", "tally_of"]

_FORMAT = 1
_SIDES: tuple[Split, ...] = ("calibration", "held_out")


@dataclass(frozen=True, slots=True)
class DayTally:
    """Sessions of one side and day. ``identity`` is the sum of theirs modulo 2^256."""

    votes: Votes
    identity: int

    def combined(self, other: DayTally, sign: Literal[1, -1]) -> DayTally:
        """With the other's sessions added or taken away."""
        votes = self.votes + other.votes if sign == 1 else self.votes - other.votes
        return DayTally(votes, (self.identity + sign * other.identity) % 2**256)


@dataclass(frozen=True, slots=True)
class Window:
    """Which sessions count, and how much: those of the last ``days``, each worth half after ``half_life_days``.

    ``today`` is in days since 1970; zeros mean all sessions and no fading.
    """

    today: int = 0
    days: int = 0
    half_life_days: float = 0.0

    def factor(self, day: int) -> float:
        """Worth of a session of a day, from 0 to 1."""
        age = max(0, self.today - day)
        if self.days and age >= self.days:
            return 0.0
        return float(0.5 ** (age / self.half_life_days)) if self.half_life_days else 1.0


@dataclass(frozen=True, slots=True)
class Tally:
    """All sessions of one model, workload and phase.

    Held-out sessions are a full vote each, as they are in a mean of their rates; calibration sessions vote by their
    length.
    """

    n_experts: tuple[int, ...]
    sides: Mapping[Split, Mapping[int, DayTally]] = field(default_factory=lambda: {side: {} for side in _SIDES})
    """By day, days since 1970; a day without sessions is absent."""

    def __add__(self, other: Tally) -> Tally:
        """Both sets of sessions together."""
        return self._combined(other, 1)

    def __sub__(self, other: Tally) -> Tally:
        """Without sessions that were added before."""
        return self._combined(other, -1)

    def _combined(self, other: Tally, sign: Literal[1, -1]) -> Tally:
        if self.n_experts != other.n_experts:
            raise ValueError("tallies of two models, expected layers with the same numbers of experts")
        sides: dict[Split, dict[int, DayTally]] = {}
        nothing = DayTally(Votes.none(self.n_experts), 0)
        for side in _SIDES:
            days = dict(self.sides[side])
            for day, more in other.sides[side].items():
                days[day] = days.get(day, nothing).combined(more, sign)
                if not days[day].votes.n_sessions:
                    del days[day]
            sides[side] = days
        return Tally(self.n_experts, sides)

    def votes(self, side: Split, window: Window | None = None) -> Votes:
        """Sums of a side's sessions, within a window if one is given."""
        total = Votes.none(self.n_experts)
        for day in sorted(self.sides[side]):
            votes = self.sides[side][day].votes
            factor = 1.0 if window is None else window.factor(day)
            if factor:
                total += votes if factor == 1.0 else votes.scaled(factor)
        return total

    def since(self, day: int) -> Tally:
        """The sessions whose last part came on a day or later."""
        return Tally(
            self.n_experts,
            {side: {one: tally for one, tally in days.items() if one >= day} for side, days in self.sides.items()},
        )

    def until(self, day: int) -> Tally:
        """The sessions whose last part came on a day or earlier."""
        return Tally(
            self.n_experts,
            {side: {one: tally for one, tally in days.items() if one <= day} for side, days in self.sides.items()},
        )

    def n_sessions(self, side: Split, window: Window) -> int:
        """How many sessions of a side are in a window."""
        return sum(tally.votes.n_sessions for day, tally in self.sides[side].items() if window.factor(day))

    def identity(self, side: Split, window: Window | None = None) -> int:
        """What a side is made of, within a window: changes when a session comes, goes or grows."""
        days = self.sides[side].items()
        return sum(tally.identity for day, tally in days if window is None or window.factor(day)) % 2**256

    def to_bytes(self) -> bytes:
        """For the database; :meth:`from_bytes` reads it."""
        days = [(side, day, self.sides[side][day]) for side in _SIDES for day in sorted(self.sides[side])]
        arrays = {
            "format": np.array([_FORMAT]),
            "n_experts": np.array(self.n_experts, dtype=np.int64),
            "side": np.array([_SIDES.index(side) for side, _, _ in days], dtype=np.int64),
            "day": np.array([day for _, day, _ in days], dtype=np.int64),
            "n_sessions": np.array([tally.votes.n_sessions for _, _, tally in days], dtype=np.int64),
            "numbers": np.frombuffer(b"".join(_numbers(tally) for _, _, tally in days), dtype=np.uint8),
        }
        for name in ("weight", "votes", "low", "high"):
            width = len(self.n_experts) if name == "weight" else sum(self.n_experts)
            values = [getattr(tally.votes, name) for _, _, tally in days]
            arrays[name] = np.stack(values) if values else np.zeros((0, width), dtype=np.int64)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises ``ValueError`` for anything but what :meth:`to_bytes` of this version wrote."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                return cls._read(arrays)
        except (zipfile.BadZipFile, KeyError, OSError, EOFError) as error:
            raise ValueError(f"no tally: {error}") from error

    @classmethod
    def _read(cls, arrays: Mapping[str, Any]) -> Self:
        if arrays["format"].tolist() != [_FORMAT]:
            raise ValueError(f"a tally in format {arrays['format'].tolist()}, expected {_FORMAT}")
        n_experts = tuple(arrays["n_experts"].tolist())
        sides: dict[Split, dict[int, DayTally]] = {side: {} for side in _SIDES}
        numbers = arrays["numbers"].tobytes()
        columns = [arrays[name] for name in ("weight", "votes", "low", "high")]
        keys = zip(arrays["side"].tolist(), arrays["day"].tolist(), arrays["n_sessions"].tolist(), strict=True)
        for row, (side, day, n_sessions) in enumerate(keys):
            tokens, identity = _read_numbers(numbers, row)
            votes = Votes(n_experts, n_sessions, tokens, *(column[row] for column in columns))
            sides[_SIDES[side]][day] = DayTally(votes, identity)
        return cls(n_experts, sides)


_TOKEN_BYTES, _IDENTITY_BYTES = 16, 32


def _numbers(tally: DayTally) -> bytes:
    return tally.votes.tokens.to_bytes(_TOKEN_BYTES, "big") + tally.identity.to_bytes(_IDENTITY_BYTES, "big")


def _read_numbers(numbers: bytes, row: int) -> tuple[int, int]:
    size = _TOKEN_BYTES + _IDENTITY_BYTES
    part = numbers[row * size : (row + 1) * size]
    return int.from_bytes(part[:_TOKEN_BYTES], "big"), int.from_bytes(part[_TOKEN_BYTES:], "big")


def tally_of(n_experts: Sequence[int], sessions: Sessions) -> Tally:
    """The tally of some sessions; no session may be in two of them that are added."""
    held_out = sessions.held_out
    sides: dict[Split, dict[int, DayTally]] = {}
    for side, mask in (("calibration", ~held_out), ("held_out", held_out)):
        sides[side] = dict(_by_day(n_experts, sessions.where(mask), weigh=side == "calibration"))  # type: ignore[index]
    return Tally(tuple(n_experts), sides)


def _by_day(n_experts: Sequence[int], sessions: Sessions, *, weigh: bool) -> Iterable[tuple[int, DayTally]]:
    if not len(sessions):
        return
    order = np.argsort(sessions.days, kind="stable")
    days, starts = np.unique(sessions.days[order], return_index=True)
    groups = Votes.grouped(n_experts, sessions.counts[order], sessions.tokens[order], starts.tolist(), weigh=weigh)
    for day, votes, members in zip(days.tolist(), groups, np.split(order, starts[1:]), strict=True):
        yield day, DayTally(votes, sum(sessions.identities[index] for index in members) % 2**256)
