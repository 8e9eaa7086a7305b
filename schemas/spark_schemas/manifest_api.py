"""Shapes of the API around manifests: their history, rollback, and the workload that is nearest to a session."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spark_schemas.base import Schema
from spark_schemas.ids import Count, Fingerprint, Phase, Revision, WorkloadName
from spark_schemas.mix import ProfileName

__all__ = ["NearWorkload", "NearestWorkloads", "Pin", "PinRequest", "ServedHistory", "ServedManifest"]

_Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class ServedManifest(Schema):
    """One manifest that was served, without its bytes."""

    revision: Revision
    """Of its profile; ask for it with ``?revision=``."""
    sha256: Revision
    """Of the bytes that were signed."""
    body_bytes: Count
    first_served_day: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class ServedHistory(Schema):
    """What was served for one question, the latest first."""

    manifests: tuple[ServedManifest, ...]
    pinned: Revision | None
    """Served in place of the newest."""


class PinRequest(Schema):
    """Body of a pin: the revision to serve until it is unpinned."""

    revision: Revision


class Pin(Schema):
    """Which revision is served in place of the newest; ``None``: the newest is."""

    fingerprint: Fingerprint
    workload: ProfileName
    phase: Phase
    revision: Revision | None


class NearWorkload(Schema):
    """How one workload's profile would have served the session that was asked about."""

    workload: WorkloadName
    cold_hit_rate: _Rate
    """Of its hot set, placed once and never changed."""
    mismatch: _Rate
    """Cold-hit rate above that of the best workload's profile."""
    n_calibration: Count


class NearestWorkloads(Schema):
    """Every workload of a model, the nearest first: measured on the counts that were sent, which are not kept."""

    fingerprint: Fingerprint
    phase: Phase
    residency: Annotated[float, Field(gt=0.0, le=1.0)]
    """Share of all expert bytes that every hot set was given."""
    oracle_cold_hit_rate: _Rate
    """What the best static placement for exactly these counts would have missed."""
    workloads: tuple[NearWorkload, ...]
