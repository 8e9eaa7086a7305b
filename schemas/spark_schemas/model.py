"""The shape of a mixture-of-experts model: what placement needs to know about a GGUF."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from spark_schemas.base import FirstVersion, Schema
from spark_schemas.ids import Count, Fingerprint, SiblingId

__all__ = ["MAX_BLOCKS", "MAX_EXPERTS", "ExpertLayer", "ModelShape"]

MAX_BLOCKS = 4096
MAX_EXPERTS = 65536
"""Bounds far above any model, so that a hostile shape cannot ask for unbounded work."""


class ExpertLayer(Schema):
    """One block with routed experts. Blocks without experts are absent."""

    block: Annotated[int, Field(ge=0, lt=MAX_BLOCKS)]
    n_experts: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    top_k: Annotated[int, Field(ge=1)]
    n_shared: Annotated[int, Field(ge=0)] = 0
    fused_gate_up: bool = False
    expert_bytes: Annotated[int, Field(ge=1)]
    """Exact bytes of one expert over all its tensors (weights, biases, scales); equal for all experts of a layer."""
    tensor_types: dict[str, str]
    """ggml type by tensor kind, for example ``{"up": "q4_K", "down": "q6_K"}``."""

    @model_validator(mode="after")
    def _top_k_fits(self) -> Self:
        if self.top_k > self.n_experts:
            raise ValueError(
                f"block {self.block}: top_k is {self.top_k}, expected at most n_experts = {self.n_experts}"
            )
        return self


class ModelShape(Schema):
    """Identity and sizes of one GGUF model."""

    schema_version: FirstVersion = 1
    fingerprint: Fingerprint
    sibling: SiblingId
    architecture: Annotated[str, Field(min_length=1, max_length=64)]
    name: Annotated[str, Field(max_length=200)] | None = None
    n_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    context_length: Annotated[int, Field(ge=1)]
    """Longest context the model was trained for, tokens."""
    core_bytes: Count
    """All tensors that are not routed experts."""
    kv_bytes_per_token: Count
    """Upper bound for a 16-bit KV cache; sliding windows and shared heads may need less."""
    state_bytes: Count = 0
    """Memory of one sequence's states in recurrent blocks, however long it is."""
    layers: Annotated[tuple[ExpertLayer, ...], Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True)]

    @model_validator(mode="after")
    def _layers_ordered(self) -> Self:
        blocks = [layer.block for layer in self.layers]
        if blocks != sorted(set(blocks)):
            raise ValueError(f"layers must be unique and in block order, found blocks {blocks}")
        if blocks[-1] >= self.n_blocks:
            raise ValueError(f"layer block {blocks[-1]} is outside the model's {self.n_blocks} blocks")
        return self

    def context_bytes(self, n_ctx: int) -> int:
        """Bytes that a context of ``n_ctx`` tokens takes: keys and values, and states."""
        return n_ctx * self.kv_bytes_per_token + self.state_bytes

    def may_route_fewer(self, layer: ExpertLayer) -> bool:
        """Whether a layer may route fewer tokens than a prefill has.

        llama.cpp drops rows that need no output before the experts of a model's last block, and of no other.
        """
        return layer.block == self.n_blocks - 1

    @property
    def expert_bytes_total(self) -> int:
        """Bytes of all routed experts."""
        return sum(layer.n_experts * layer.expert_bytes for layer in self.layers)
