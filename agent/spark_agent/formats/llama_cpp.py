"""Flags by which plain llama.cpp keeps as many experts in video memory as a budget holds.

It moves whole layers (``--n-cpu-moe N`` leaves the experts of the first N blocks in host memory, ``-ot REGEX=CPU`` any
tensors whose name the regular expression is found in). A token reads as many experts of each layer, so which experts
are hot changes nothing here; what counts is the bytes that a token reads from host memory. Those layers are kept whose
reads are the most that fit together.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from spark_schemas.model import ModelShape

__all__ = ["LlamaFlags", "flags_for"]

_MOST_STATES = 2**14
"""Selections of layers that are weighed against each other; a model whose layers are of a few sizes has far fewer."""


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
    decode_share: float
    """Of the experts' bytes that a token reads, those read from video memory with ``-ot``."""


def flags_for(shape: ModelShape, budget_bytes: int) -> LlamaFlags:
    """Flags for so many bytes of experts in video memory."""
    sizes = {layer.block: layer.n_experts * layer.expert_bytes for layer in shape.layers}
    reads = {layer.block: layer.top_k * layer.expert_bytes for layer in shape.layers}
    kept = _most_read(sizes, reads, budget_bytes)
    on_cpu = tuple(sorted(set(sizes) - kept))
    first = 0
    while sum(size for block, size in sizes.items() if block >= first) > budget_bytes:
        first += 1
    override = ""
    if on_cpu:
        # All kinds of expert tensors: up, down, gate, fused, with their biases and scales; no shared ones.
        override = rf"blk\.({'|'.join(str(block) for block in on_cpu)})\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    return LlamaFlags(
        override=override,
        n_cpu_moe=first,
        resident_bytes=sum(sizes[block] for block in kept),
        resident_bytes_n_cpu_moe=sum(size for block, size in sizes.items() if block >= first),
        blocks_on_cpu=on_cpu,
        decode_share=sum(reads[block] for block in kept) / sum(reads.values()),
    )


def _most_read(sizes: dict[int, int], reads: dict[int, int], budget_bytes: int) -> set[int]:
    """The blocks that are read most of all that fit together; of blocks that are alike the last ones.

    Exact (Nemhauser and Ullmann 1969): selections that are no better than a smaller one are dropped, kind by kind.
    """
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for block in sorted(sizes, reverse=True):
        alike[sizes[block], reads[block]].append(block)
    states: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for (size, read), blocks in alike.items():
        grown = [
            (taken + count * size, gained + count * read, (*counts, count))
            for taken, gained, counts in states
            for count in range(len(blocks) + 1)
            if taken + count * size <= budget_bytes
        ]
        grown.sort(key=lambda state: (state[0], -state[1]))
        states, best = [], -1
        for state in grown:
            if state[1] > best:
                states.append(state)
                best = state[1]
        if len(states) > _MOST_STATES:
            # Layers of very many sizes: neighbours differ by little.
            states = [*states[:-1:2], states[-1]]
    chosen = states[-1][2]
    return {block for count, blocks in zip(chosen, alike.values(), strict=True) for block in blocks[:count]}
