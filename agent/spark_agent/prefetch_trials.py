"""What trials of fetching early found on this machine, kept beside the benchmarks: a file a model and machine.

A result holds for the conditions it was found under: who fetches, how many experts are in slots, how the guesses are
used, this version of the agent. It is found anew when those change, and after a month.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_agent.paired_gain import GainInterval, gain_interval
from spark_agent.paths import prefetch_trials_dir

__all__ = ["FRESH_DAYS", "Conditions", "KeptTrial", "State", "find_trial", "find_trials", "keep_trial", "trial_of"]

FRESH_DAYS = 30
SAME_SHARE = 0.05
"""Shares of the experts in slots that are as good as the same: free video memory differs a little at every start."""
_MOST_TRIALS = 16
_MOST_BYTES = 2**20

State = Literal["begun", "on", "off", "undecided"]


class Conditions(NamedTuple):
    """What a result holds for."""

    fingerprint: str
    machine: str
    """See ``measured.machine_name``."""
    engine: str
    """Who fetches: ``cuda`` or ``host``."""
    resident_share: float
    """Of the experts' bytes, in slots."""
    experts: int
    threshold: float
    agent_version: str


class KeptTrial(BaseModel):
    """One trial, whether it came to its end or not."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    engine: Annotated[str, Field(max_length=16)]
    resident_share: Annotated[float, Field(ge=0, le=1)]
    experts: Annotated[int, Field(ge=1, le=64)]
    threshold: Annotated[float, Field(allow_inf_nan=False)]
    agent_version: Annotated[str, Field(max_length=64)]
    day: dt.date
    state: State
    """``begun``: cut short, and to be gone on with; ``undecided``: no difference was sure, so it is off."""
    gains: Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(max_length=256)]
    """Speed with fetching early over the speed without, a pair of blocks each."""
    tokens: Annotated[int, Field(ge=0, le=2**31)]
    """Decoded tokens that it took."""

    @property
    def interval(self) -> GainInterval | None:
        """What the pairs say; ``None`` for too few."""
        return gain_interval(self.gains)

    @property
    def reason(self) -> str:
        """What it found, for a person."""
        found, pairs = self.interval, f"{len(self.gains)} pairs of blocks"
        when = f"tried with {self.resident_share:.0%} of the experts in slots on {self.day}"
        if self.state == "begun":
            return f"{when}, {pairs} so far"
        if found is None:
            return f"{when}: its {self.tokens} tokens had too few undisturbed ones to compare"
        told = f"{abs(found.estimate - 1):.1%} {'more' if found.estimate >= 1 else 'fewer'} tokens a second"
        sure = f"99%: {found.low - 1:+.1%} to {found.high - 1:+.1%}, {pairs}"
        return f"{when}: {told} with it ({sure})" + ("; not sure enough" if self.state == "undecided" else "")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1] = 1
    fingerprint: Annotated[str, Field(max_length=64)]
    machine_name: str
    trials: Annotated[list[KeptTrial], Field(max_length=_MOST_TRIALS)]
    """Newest first."""


def find_trials(fingerprint: str, machine: str, agent_version: str, today: dt.date) -> list[KeptTrial]:
    """What still holds of a model on this machine, newest first; a file that cannot be understood holds nothing."""
    path = _path(fingerprint, machine)
    try:
        if path.stat().st_size > _MOST_BYTES:
            return []
        kept = _File.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        # Never tried; or kept by another version: it is tried again.
        return []
    if (kept.fingerprint, kept.machine_name) != (fingerprint, machine):
        return []
    # A day ahead is a clock's or a time zone's; more is no day that this was found on.
    return [
        trial
        for trial in kept.trials
        if trial.agent_version == agent_version and -1 <= (today - trial.day).days <= FRESH_DAYS
    ]


def find_trial(conditions: Conditions, today: dt.date) -> KeptTrial | None:
    """The one under conditions that are as good as these."""
    found = find_trials(conditions.fingerprint, conditions.machine, conditions.agent_version, today)
    return min(
        (trial for trial in found if _is_same(trial, conditions)),
        key=lambda trial: abs(trial.resident_share - conditions.resident_share),
        default=None,
    )


def trial_of(conditions: Conditions, state: State, gains: tuple[float, ...], tokens: int, day: dt.date) -> KeptTrial:
    """What a trial found under these conditions."""
    return KeptTrial(
        engine=conditions.engine,
        resident_share=conditions.resident_share,
        experts=conditions.experts,
        threshold=conditions.threshold,
        agent_version=conditions.agent_version,
        day=day,
        state=state,
        gains=gains,
        tokens=tokens,
    )


def keep_trial(conditions: Conditions, trial: KeptTrial) -> None:
    """Keep one in place of those under the same conditions; raise :class:`SparkError` if it cannot be."""
    others = find_trials(conditions.fingerprint, conditions.machine, conditions.agent_version, trial.day)
    kept = [trial, *(other for other in others if not _is_same(other, conditions))]
    file = _File(fingerprint=conditions.fingerprint, machine_name=conditions.machine, trials=kept[:_MOST_TRIALS])
    path = _path(conditions.fingerprint, conditions.machine)
    try:
        with replacing(path) as opened:
            opened.write(file.model_dump_json().encode())
    except OSError as error:
        raise SparkError(f"cannot keep the trial in {path}: {error.strerror}", "check the folder's space") from error


def _is_same(trial: KeptTrial, conditions: Conditions) -> bool:
    how = (trial.engine, trial.experts, trial.threshold)
    return (
        how == (conditions.engine, conditions.experts, conditions.threshold)
        and abs(trial.resident_share - conditions.resident_share) <= SAME_SHARE
    )


def _path(fingerprint: str, machine: str) -> Path:
    return prefetch_trials_dir() / f"{fingerprint}-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
