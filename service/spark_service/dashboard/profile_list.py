"""Every workload of every model in a line: its profile's verdict, or what it still needs. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from spark_runtime.calibration.evaluation import VERDICT_RESIDENCY
from spark_runtime.calibration.tally import Tally, Window
from spark_schemas.drift import DriftState
from spark_schemas.ids import Phase, Verdict
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile
from spark_service.dashboard.profile_page import ModelName, Tone, rate_at, verdict_of
from spark_service.dashboard.words import counted

__all__ = ["ProfileList", "ProfileRow", "missing_row", "profile_row"]


class ProfileRow(BaseModel):
    """One workload of one model."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    model: ModelName
    workload: str
    phase: Phase
    n_calibration: int
    n_held_out: int
    verdict: Verdict | None
    tone: Tone
    headline: str
    residency: float
    """Share of the experts' bytes that the rates are of."""
    own: float | None
    """What the profile misses, placed once, on held-out sessions."""
    uniform: float | None
    lru: float | None
    drift: DriftState | None
    missing: str | None
    """Why there is no profile, or no verdict."""
    has_profile: bool


class ProfileList(BaseModel):
    """All of them."""

    model_config = ConfigDict(frozen=True)

    phase: Phase
    rows: tuple[ProfileRow, ...]


def profile_row(shape: ModelShape, profile: Profile) -> ProfileRow:
    """The line of a profile."""
    verdict = verdict_of(profile)
    return ProfileRow(
        model=ModelName.of(shape),
        workload=profile.workload,
        phase=profile.phase,
        n_calibration=profile.n_calibration,
        n_held_out=profile.n_held_out,
        verdict=verdict.verdict,
        tone=verdict.tone,
        headline=verdict.headline,
        residency=VERDICT_RESIDENCY,
        own=rate_at(profile, "own", VERDICT_RESIDENCY),
        uniform=rate_at(profile, "uniform", VERDICT_RESIDENCY),
        lru=rate_at(profile, "lru", VERDICT_RESIDENCY),
        drift=None if profile.drift is None else profile.drift.state,
        missing=None if profile.verdict is not None else profile.verdict_reason,
        has_profile=True,
    )


def missing_row(
    shape: ModelShape, workload: str, phase: Phase, tally: Tally, window: Window, min_sessions: int
) -> ProfileRow:
    """The line of a workload that has sessions and no profile yet."""
    calibration, held_out = tally.n_sessions("calibration", window), tally.n_sessions("held_out", window)
    if calibration or held_out:
        more = max(1, min_sessions) - calibration
        missing = f"{counted(more, 'more calibration session')} needed ({calibration} of {max(1, min_sessions)})"
    else:
        kind = "generated tokens" if phase == "decode" else "prompts"
        missing = f"none of its sessions has counts of {kind} that count now"
    return ProfileRow(
        model=ModelName.of(shape),
        workload=workload,
        phase=phase,
        n_calibration=calibration,
        n_held_out=held_out,
        verdict=None,
        tone="unknown",
        headline="No profile yet",
        residency=VERDICT_RESIDENCY,
        own=None,
        uniform=None,
        lru=None,
        drift=None,
        missing=missing,
        has_profile=False,
    )
