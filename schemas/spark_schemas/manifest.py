"""Placement manifests: what an agent needs to place a model's experts within a memory budget."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spark_schemas.base import Schema
from spark_schemas.ids import Count, Fingerprint, Phase, Revision, SiblingId, Verdict
from spark_schemas.mix import ProfileName

__all__ = ["PRIOR_SCALE", "Expectation", "LayerPlacement", "PlacementManifest", "TierBytes"]

PRIOR_SCALE = 65535
"""Prior scores are frequencies relative to the hottest expert of the layer, in steps of 1/65535."""


class LayerPlacement(Schema):
    """Slots and prior of one block."""

    block: Annotated[int, Field(ge=0)]
    n_experts: Annotated[int, Field(ge=1)]
    top_k: Annotated[int, Field(ge=1)]
    slots: Annotated[int, Field(ge=1)]
    expert_bytes: Annotated[int, Field(ge=1)]
    prior: Annotated[tuple[Annotated[int, Field(ge=0, le=PRIOR_SCALE)], ...], Field(min_length=1)]
    """Score of every expert; the hot set is the ``slots`` highest, ties by lower id."""
    total_share: Annotated[float, Field(gt=0.0)]
    """Sum of ``prior`` / PRIOR_SCALE: divides a prior score back into a frequency."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.prior) != self.n_experts:
            raise ValueError(
                f"block {self.block}: {len(self.prior)} prior scores, expected n_experts = {self.n_experts}"
            )
        if self.slots > self.n_experts:
            raise ValueError(f"block {self.block}: {self.slots} slots, expected at most n_experts = {self.n_experts}")
        floor = min(2 * self.top_k, self.n_experts)
        if self.slots < floor:
            raise ValueError(f"block {self.block}: {self.slots} slots, expected at least 2 * top_k = {floor}")
        return self

    @property
    def hot_set(self) -> tuple[int, ...]:
        """Expert ids that start in video memory, hottest first."""
        order = sorted(range(self.n_experts), key=lambda expert: (-self.prior[expert], expert))
        return tuple(order[: self.slots])


class TierBytes(Schema):
    """Exact bytes by tier."""

    vram_core: Count
    vram_kv: Count
    """Keys and values of the whole context, and the states of recurrent blocks."""
    vram_slots: Count
    vram_reserve: Count
    vram_total: Count
    host_experts: Count
    """Every expert stays in host memory, so that an eviction never writes."""
    disk: Count

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        parts = self.vram_core + self.vram_kv + self.vram_slots + self.vram_reserve
        if self.vram_total != parts:
            raise ValueError(f"vram_total is {self.vram_total}, expected the sum of its parts, {parts}")
        return self


class Expectation(Schema):
    """What the hot set would miss on held-out sessions, were it never to change (95% interval over sessions)."""

    policy: Literal["static"] = "static"
    cold_hit_rate: Annotated[float, Field(ge=0.0, le=1.0)]
    low: Annotated[float, Field(ge=0.0, le=1.0)]
    high: Annotated[float, Field(ge=0.0, le=1.0)]
    uniform_cold_hit_rate: Annotated[float, Field(ge=0.0, le=1.0)]
    """The same slots' bytes given to the first experts of each layer."""


class PlacementManifest(Schema):
    """Placement of one model for one workload, memory budget and context length."""

    schema_version: Literal[1] = 1
    fingerprint: Fingerprint
    sibling: SiblingId
    workload: ProfileName
    phase: Phase
    profile_revision: Revision
    vram_budget_bytes: Count
    n_ctx: Annotated[int, Field(ge=1)]
    layers: Annotated[tuple[LayerPlacement, ...], Field(min_length=1)]
    bytes: TierBytes
    expected: Expectation | None
    """``None`` without held-out sessions: nothing honest can be promised."""
    verdict: Verdict | None
    verdict_reason: str
    n_calibration: Count
    n_held_out: Count

    @model_validator(mode="after")
    def _within_budget(self) -> Self:
        slots = sum(layer.slots * layer.expert_bytes for layer in self.layers)
        if slots != self.bytes.vram_slots:
            raise ValueError(f"bytes.vram_slots is {self.bytes.vram_slots}, expected the layers' sum {slots}")
        if self.bytes.vram_total > self.vram_budget_bytes:
            raise ValueError(
                f"bytes.vram_total is {self.bytes.vram_total}, over the budget of {self.vram_budget_bytes}"
            )
        return self
