"""Profiles: how often a workload selects each expert, and how well that predicted sessions it never saw."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spark_schemas.base import Schema
from spark_schemas.drift import Drift
from spark_schemas.ids import Count, Fingerprint, Phase, Policy, Revision, Verdict, WorkloadName
from spark_schemas.mix import ProfileName

__all__ = [
    "CurvePoint",
    "LayerFrequencies",
    "LiveComparison",
    "LivePoint",
    "LivePolicy",
    "Mismatch",
    "Profile",
    "ProfileSummary",
]

LivePolicy = Literal["live_profile", "live_unprofiled"]
"""The scored policy as agents ran it: started from and primed by a manifest of the workload, or by nothing."""

Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class CurvePoint(Schema):
    """Cold-hit rate of one policy at one residency over the held-out sessions, with a 95% bootstrap interval."""

    policy: Policy
    residency: Annotated[float, Field(gt=0.0, le=1.0)]
    """Share of all expert bytes in video memory."""
    cold_hit_rate: Rate
    low: Rate
    high: Rate
    profiles: tuple[WorkloadName, ...] = ()
    """Whose profiles placed the experts: this workload's, of a mix those that are mixed, or for ``other`` the ones
    averaged over.
    """


class Mismatch(Schema):
    """Cold-hit rate that another workload's profile has on this workload's held-out sessions, with its interval.

    Of a mix also that of each of its workloads' own profile alone on the sessions of the whole mix.
    """

    workload: WorkloadName
    residency: Annotated[float, Field(gt=0.0, le=1.0)]
    cold_hit_rate: Rate
    low: Rate
    high: Rate


class LivePoint(Schema):
    """Cold-hit rate that agents measured on held-out sessions, with a 95% bootstrap interval over them.

    These are other sessions than those of the curves, and their slots held what earlier sessions had left there: a
    point cannot be compared with a curve session by session.
    """

    policy: LivePolicy
    residency: Annotated[float, Field(gt=0.0, le=1.0)]
    """Share of all expert bytes in video memory, as it was, to a whole percent."""
    cold_hit_rate: Rate
    low: Rate
    high: Rate
    n_sessions: Count


class LiveComparison(Schema):
    """Mean cold-hit rate of the sessions that ran with the profile minus that of those without, at one residency.

    Different sessions, each kind resampled by itself: below zero, interval included, the profile's is lower.
    """

    residency: Annotated[float, Field(gt=0.0, le=1.0)]
    difference: Annotated[float, Field(ge=-1.0, le=1.0)]
    low: Annotated[float, Field(ge=-1.0, le=1.0)]
    high: Annotated[float, Field(ge=-1.0, le=1.0)]
    n_profile: Count
    n_unprofiled: Count


def _absent(value: object) -> bool:
    return not value


class LayerFrequencies(Schema):
    """Expected share of a block's selections per expert; sums to one."""

    block: Annotated[int, Field(ge=0)]
    shares: Annotated[tuple[Rate, ...], Field(min_length=1)]
    selections: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Token-weighted sum over the calibration sessions, kept beside the mean of shares."""


class ProfileSummary(Schema):
    """What a list of profiles shows."""

    fingerprint: Fingerprint
    model_name: str | None
    workload: WorkloadName
    phase: Phase
    revision: Revision
    n_calibration: Count
    n_held_out: Count
    verdict: Verdict | None
    drift: Annotated[Drift | None, Field(exclude_if=_absent)] = None
    """Not named in JSON while nothing is known of it."""


class Profile(Schema):
    """Expert frequencies of one (fingerprint, workload, phase) with their evaluation on held-out sessions.

    Of a mix, frequencies are the weighted mean of its workloads' own, rates the weighted mean of their mean rates, and
    numbers of sessions, tokens and selections plain sums.
    """

    schema_version: Literal[1] = 1
    fingerprint: Fingerprint
    workload: ProfileName
    phase: Phase
    revision: Revision
    """SHA-256 over everything the profile was built from; changes exactly when its inputs change."""
    n_calibration: Count
    n_held_out: Count
    tokens_calibration: Count
    tokens_held_out: Count
    layers: tuple[LayerFrequencies, ...]
    curves: tuple[CurvePoint, ...]
    mismatch: tuple[Mismatch, ...] = ()
    """One row of the mismatch matrix: every other workload of the model, and of a mix each of its own, at every
    residency.
    """
    live: Annotated[tuple[LivePoint, ...], Field(exclude_if=_absent)] = ()
    """What agents measured; not named in JSON where nothing can be said, like the two that follow."""
    live_comparisons: Annotated[tuple[LiveComparison, ...], Field(exclude_if=_absent)] = ()
    """Where sessions ran both with the profile and without one, at the same residency."""
    drift: Annotated[Drift | None, Field(exclude_if=_absent)] = None
    warnings: tuple[str, ...] = ()
    """What a reader must know before trusting it."""
    verdict: Verdict | None
    """``None`` while too few held-out sessions support one; ``verdict_reason`` says how many are missing."""
    verdict_reason: str
