"""How much video memory to ask a placement for where nobody says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spark_agent.context import AgentContext
from spark_agent.errors import SparkError
from spark_agent.sizes import format_size

if TYPE_CHECKING:
    from spark_schemas.model import ModelShape

__all__ = ["DEFAULT_RESIDENCY", "default_budget"]

DEFAULT_RESIDENCY = 0.6
GRAIN_BYTES = 16 * 2**20
"""What is free changes from minute to minute; a budget that followed it byte by byte would never be asked for twice."""


def default_budget(context: AgentContext, path: Path, shape: ModelShape, n_ctx: int, reserve_bytes: int) -> int:
    """Bytes for weights, context, experts and ``reserve_bytes``: what fits beside everything else a load takes.

    On machines without a GPU, and where nothing fits now, as much as :data:`DEFAULT_RESIDENCY` of the experts take.
    """
    from spark_runtime.placement import layer_sizes, residency_budget

    sizes = layer_sizes(shape)
    fixed = shape.core_bytes + shape.context_bytes(n_ctx) + reserve_bytes
    fitting = _on_cards(context, path, shape, n_ctx)
    if fitting is not None:
        everything = residency_budget(sizes, 1.0)
        least = residency_budget(sizes, 0.0)
        room = fitting - reserve_bytes
        experts = max(least, min(everything, room if room >= everything else room // GRAIN_BYTES * GRAIN_BYTES))
        context.output.info(
            f"no --vram: planning for what the GPU has free but a reserve, {format_size(fixed + experts)} in all, "
            f"{experts / everything:.0%} of the experts"
        )
        return fixed + experts
    experts = residency_budget(sizes, DEFAULT_RESIDENCY)
    context.output.info(
        f"no --vram: planning for {DEFAULT_RESIDENCY:.0%} of the experts, {format_size(fixed + experts)} in all"
    )
    return fixed + experts


def _on_cards(context: AgentContext, path: Path, shape: ModelShape, n_ctx: int) -> int | None:
    """Bytes of experts that would fit into this machine's GPUs now; ``None`` without one."""
    from spark_agent.tiering import TierOptions, plan_for
    from spark_runtime.errors import SparkRuntimeError
    from spark_runtime.gguf_file import read_gguf
    from spark_runtime.tier_plan import cards

    if not cards():
        return None
    try:
        plan = plan_for(read_gguf(path), shape, TierOptions(), None, n_ctx)
    except (SparkError, SparkRuntimeError) as error:
        context.output.warning(f"nothing fits into the GPU as it is now: {error}")
        return None
    return None if plan is None else sum(part.experts for part in plan.memory.devices)
