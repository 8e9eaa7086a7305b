"""Routing histograms: what an agent counts and, with consent, uploads.

Lists stop at their first bad item (``fail_fast``): a hostile body must not become one error object per item.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field

from spark_schemas.base import FirstOrSecondVersion, Schema
from spark_schemas.ids import Count, SessionHash, Split, WorkloadName
from spark_schemas.live import LiveMisses
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
    live: Annotated[LiveMisses | None, Field(exclude_if=lambda live: live is None)] = None
    """Only with ``decode``, and in uploads of schema version 2; not even named in JSON where it is absent."""

    @property
    def tokens(self) -> int:
        """Tokens of both phases."""
        return sum(phase.tokens for phase in (self.prefill, self.decode) if phase is not None)

    def content_id(self, fingerprint: str) -> str:
        """SHA-256 of the counts' canonical bytes for this model: the same counts sent twice are one histogram.

        What was measured beside them is no part of it: counted again elsewhere, or sent without it to a service that
        does not know it yet, they are still the same counts.
        """
        counts = self.model_dump_json(exclude={"live"})
        return hashlib.sha256(fingerprint.encode() + b"\n" + counts.encode()).hexdigest()


class HistogramUpload(Schema):
    """Body of ``POST /api/v1/histograms``: sessions of one model.

    Counts only: no order, no token ids, no text, no host, no path.
    """

    schema_version: FirstOrSecondVersion = 1
    """2 where a session has ``live``, which version 1 does not know."""
    agent_version: Annotated[str, Field(min_length=1, max_length=64)]
    model: ModelShape
    sessions: Annotated[
        tuple[SessionHistogram, ...], Field(min_length=1, max_length=MAX_SESSIONS_PER_UPLOAD, fail_fast=True)
    ]

    @classmethod
    def of(cls, agent_version: str, model: ModelShape, sessions: Iterable[SessionHistogram]) -> Self:
        """An upload of the lowest version that has room for what was measured, so that older services read it."""
        chosen = tuple(sessions)
        version: Literal[1, 2] = 2 if any(session.live is not None for session in chosen) else 1
        return cls(schema_version=version, agent_version=agent_version, model=model, sessions=chosen)
