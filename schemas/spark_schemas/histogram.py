"""Routing histograms: what an agent counts and, with consent, uploads.

Lists stop at their first bad item (``fail_fast``): a hostile body must not become one error object per item.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import Field

from spark_schemas.base import FirstVersion, Schema
from spark_schemas.ids import Count, SessionHash, Split, WorkloadName
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS, ModelShape

__all__ = [
    "MAX_SESSIONS_PER_UPLOAD",
    "HistogramUpload",
    "LayerCounts",
    "LayerReuse",
    "PhaseHistogram",
    "SessionHistogram",
]

MAX_SESSIONS_PER_UPLOAD = 256


class LayerCounts(Schema):
    """Selections per expert of one block in one phase: ``counts[expert]``."""

    block: Annotated[int, Field(ge=0)]
    tokens: Count
    """Tokens this block routed; in prefill the last block may route fewer than the phase's tokens."""
    counts: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_EXPERTS, fail_fast=True)]


class LayerReuse(Schema):
    """Reuse distances of one block in decode.

    ``distances[d]`` for d < n_experts counts selections whose expert was the d-th most recently used one of the block;
    the last entry counts first selections in the session. A cache of C slots that evicts the least recently used
    expert misses exactly ``sum(distances[C:])`` times.
    """

    block: Annotated[int, Field(ge=0)]
    distances: Annotated[tuple[Count, ...], Field(min_length=2, max_length=MAX_EXPERTS + 1, fail_fast=True)]


class PhaseHistogram(Schema):
    """All blocks with experts, in one phase."""

    tokens: Count
    layers: Annotated[tuple[LayerCounts, ...], Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True)]


class SessionHistogram(Schema):
    """Counts of one session, or of a part of one: parts of the same session add up."""

    session_hash: SessionHash
    split: Split
    workload: WorkloadName
    prefill: PhaseHistogram | None = None
    decode: PhaseHistogram | None = None
    reuse: Annotated[tuple[LayerReuse, ...], Field(max_length=MAX_BLOCKS, fail_fast=True)] | None = None
    """Decode only; present exactly when ``decode`` is."""

    @property
    def tokens(self) -> int:
        """Tokens of both phases."""
        return sum(phase.tokens for phase in (self.prefill, self.decode) if phase is not None)

    def content_id(self, fingerprint: str) -> str:
        """SHA-256 of the canonical bytes for this model: the same counts sent twice are one histogram."""
        return hashlib.sha256(fingerprint.encode() + b"\n" + self.model_dump_json().encode()).hexdigest()


class HistogramUpload(Schema):
    """Body of ``POST /api/v1/histograms``: sessions of one model.

    Counts only: no order, no token ids, no text, no host, no path.
    """

    schema_version: FirstVersion = 1
    agent_version: Annotated[str, Field(min_length=1, max_length=64)]
    model: ModelShape
    sessions: Annotated[
        tuple[SessionHistogram, ...], Field(min_length=1, max_length=MAX_SESSIONS_PER_UPLOAD, fail_fast=True)
    ]
