"""Flags by which plain llama.cpp keeps as many experts in video memory as a budget holds.

It moves whole layers (``--n-cpu-moe N`` leaves the experts of the first N blocks in host memory, ``-ot REGEX=CPU`` any
tensors). A token reads as many experts of each layer, so which experts are hot changes nothing here; what counts is the
bytes that a token reads from host memory, and a layer's share of those is its share of all bytes. The largest layers
that fit together are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_schemas.model import ModelShape

__all__ = ["LlamaFlags", "flags_for"]


@dataclass(frozen=True, slots=True)
class LlamaFlags:
    """Flags, and what they keep."""

    override: str
    """For ``-ot``; empty when every layer fits."""
    n_cpu_moe: int
    """For ``--n-cpu-moe``: the simplest flag, over the first blocks."""
    resident_bytes: int
    """Of experts, with ``-ot``."""
    resident_bytes_n_cpu_moe: int
    blocks_on_cpu: tuple[int, ...]


def flags_for(shape: ModelShape, budget_bytes: int) -> LlamaFlags:
    """Flags for so many bytes of experts in video memory."""
    sizes = {layer.block: layer.n_experts * layer.expert_bytes for layer in shape.layers}
    left, kept = budget_bytes, set()
    for block in sorted(sizes, key=lambda block: (-sizes[block], -block)):
        if sizes[block] <= left:
            kept.add(block)
            left -= sizes[block]
    on_cpu = tuple(sorted(set(sizes) - kept))
    first = 0
    while sum(size for block, size in sizes.items() if block >= first) > budget_bytes:
        first += 1
    override = ""
    if on_cpu:
        # All kinds of expert tensors: up, down, gate, fused, with their biases and scales.
        override = rf"blk\.({'|'.join(str(block) for block in on_cpu)})\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    return LlamaFlags(
        override=override,
        n_cpu_moe=first,
        resident_bytes=budget_bytes - left,
        resident_bytes_n_cpu_moe=sum(size for block, size in sizes.items() if block >= first),
        blocks_on_cpu=on_cpu,
    )
