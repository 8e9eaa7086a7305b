"""Shapes of models that do not exist, for measuring the service, whose work depends on sizes alone."""

from __future__ import annotations

from spark_schemas.model import ExpertLayer, ModelShape

TOP_K = 8


def shape_of(n_layers: int, n_experts: int) -> ModelShape:
    """A model of ``n_layers`` equal layers of ``n_experts``, with :data:`TOP_K` selected a token."""
    types = {"gate": "q4_K", "up": "q4_K", "down": "q6_K"}
    layers = tuple(
        ExpertLayer(block=b, n_experts=n_experts, top_k=TOP_K, expert_bytes=2_654_208, tensor_types=types)
        for b in range(n_layers)
    )
    return ModelShape(
        fingerprint="mf1-" + "0" * 32,
        sibling="ms1-" + "0" * 32,
        architecture="synthetic",
        n_blocks=n_layers,
        context_length=32768,
        core_bytes=0,
        kv_bytes_per_token=0,
        layers=layers,
    )
