"""Names and identities, as constrained strings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

__all__ = [
    "MAX_COUNT",
    "WORKLOAD_PATTERN",
    "Count",
    "Fingerprint",
    "Phase",
    "Policy",
    "Revision",
    "SessionHash",
    "SiblingId",
    "Split",
    "Verdict",
    "WorkloadName",
]

MAX_COUNT = 2**53
"""Counts stay exact in every JSON reader and in float64."""

Fingerprint = Annotated[str, StringConstraints(pattern=r"^mf1-[0-9a-f]{32}$")]
"""Identity of one GGUF's experts: structure, quantisation and sampled weights."""

SiblingId = Annotated[str, StringConstraints(pattern=r"^ms1-[0-9a-f]{32}$")]
"""Shared by all quantisations of one model: structure and sampled router weights."""

SessionHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""HMAC-SHA256 of a session's lineage under the team's key."""

WORKLOAD_PATTERN = r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$"
WorkloadName = Annotated[str, StringConstraints(pattern=WORKLOAD_PATTERN)]
Revision = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]

Phase = Literal["prefill", "decode"]
Split = Literal["calibration", "held_out"]
Verdict = Literal["profile", "cache_only", "pin", "no_gain"]
Policy = Literal["uniform", "random", "own", "other", "oracle", "lru"]
"""What the service can evaluate from counts alone. ``lru`` is exact, from reuse distances, started empty."""
