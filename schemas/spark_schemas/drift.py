"""Whether a workload's traffic is still what its manifests were made for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spark_schemas.base import Schema
from spark_schemas.ids import Count, Fingerprint, WorkloadName

__all__ = ["Drift", "DriftList", "DriftState", "RateInterval", "WorkloadDrift"]

_Rate = Annotated[float, Field(ge=0.0, le=1.0)]
DriftState = Literal["steady", "moved"]


class RateInterval(Schema):
    """A mean cold-hit rate with its 95% interval over sessions."""

    cold_hit_rate: _Rate
    low: _Rate
    high: _Rate


class Drift(Schema):
    """What recent sessions' hot sets missed against what their manifests had promised, as of the last look."""

    state: DriftState
    """``moved`` while recent sessions miss more than they were promised, beyond chance."""
    since: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None
    """UTC day on which the last change began; it stays when the traffic is steady again."""
    rebuilt: bool
    """Whether profiles are built from the traffic since that day alone."""
    n_sessions: Count
    """Recent sessions that the rates are of."""
    promised: RateInterval | None
    """Mean of their manifests' expectations; ``None`` where too few sessions tell."""
    measured: RateInterval | None
    """What their manifests' hot sets, never changed, missed on them: the same question as the promise's."""


class WorkloadDrift(Drift):
    """The drift of one workload of a model."""

    fingerprint: Fingerprint
    workload: WorkloadName


class DriftList(Schema):
    """Every workload that was looked at."""

    workloads: tuple[WorkloadDrift, ...]
