"""How long a context is where nobody says. Pure: plans are asked for by a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from spark_agent.errors import SparkError
from spark_agent.sizes import format_size

if TYPE_CHECKING:
    from spark_runtime.tier_plan import TierPlan
    from spark_schemas.model import ModelShape

__all__ = ["Choice", "choose_context", "context_steps", "host_sequences"]

SHORTEST = 8192
COSTS = {16384: 0.10, 32768: 0.15, 65536: 0.03}
"""Share of the experts that a longer context may push out of video memory. A coding tool's instructions and tools alone
are some 20 thousand tokens, so much is given up for the first steps, and little beyond."""
COST_BEYOND = 0.03
HOST_SHARE = 0.25
"""Of the host's free memory that a context nobody asked for may take there."""

MOST_SEQUENCES = 4
"""Where nobody says how many: a main conversation, what it delegates, and its short requests on the side."""


class Choice(NamedTuple):
    """Something that was chosen, and why."""

    what: str
    value: str
    reason: str


def context_steps(trained: int) -> list[int]:
    """Lengths to choose among, tokens, the shortest first."""
    return sorted({min(step, trained) for step in (SHORTEST, *COSTS, trained)})


def choose_context(
    shape: ModelShape, plan_at: Callable[[int], TierPlan | None], host_bytes: int
) -> tuple[int, TierPlan | None, Choice]:
    """The longest context that costs little, with its plan and the reason.

    ``plan_at`` plans with a context of so many tokens, or gives ``None`` where nothing needs a plan; what it raises for
    the shortest is raised. ``host_bytes`` are free in host memory, beside weights.
    """
    steps = context_steps(shape.context_length)
    shortest, best = steps[0], plan_at(steps[0])
    if len(steps) == 1:
        return shortest, best, _chosen(shortest, "as long as the model was trained for")
    for step in reversed(steps[1:]):
        more = shape.context_bytes(step) - shape.context_bytes(shortest)
        in_host = best is None or all(memory.is_host for memory in best.memory.memory)
        if in_host and shape.context_bytes(step) > HOST_SHARE * host_bytes:
            continue
        if best is None:
            taken = format_size(shape.context_bytes(step))
            return step, None, _chosen(step, f"keys and values take {taken} of {format_size(host_bytes)} free")
        if not _may_fit(shape, best, more, step):
            continue
        try:
            plan = plan_at(step)
        except SparkError:
            continue
        lost = best.resident_share - (0.0 if plan is None else plan.resident_share)
        if plan is not None and (plan.start is None) == (best.start is None) and lost <= _cost(step):
            return step, plan, _chosen(step, _reason(plan, lost, shortest))
    return shortest, best, _chosen(shortest, f"longer ones ({steps[1]} and more) take too much from experts; see --ctx")


def host_sequences(shape: ModelShape, n_ctx: int, host_bytes: int) -> int:
    """How many conversations of ``n_ctx`` tokens where all is in host memory, of which ``host_bytes`` are free."""
    return max(1, min(MOST_SEQUENCES, int(HOST_SHARE * host_bytes) // max(1, shape.context_bytes(n_ctx))))


def _chosen(n_ctx: int, reason: str) -> Choice:
    return Choice("context", f"{n_ctx} tokens", reason)


def _cost(step: int) -> float:
    return COSTS.get(step, COST_BEYOND)


def _may_fit(shape: ModelShape, shortest: TierPlan, more_bytes: int, step: int) -> bool:
    """Whether it is worth a plan: keys and values are an upper bound, which sliding windows may halve."""
    unused = sum(
        max(0, memory.room_bytes - part.total)
        for memory, part in zip(shortest.memory.memory, shortest.memory.devices, strict=True)
    )
    spare = unused if shortest.start is None else unused + _cost(step) * shape.expert_bytes_total
    return more_bytes / 2 <= spare


def _reason(plan: TierPlan, lost: float, shortest: int) -> str:
    if plan.start is None:
        return "every expert still fits beside it"
    if lost < 0.0005:
        return f"it takes no expert's place that {shortest} tokens leave"
    return f"{lost:.1%} of the experts less than with {shortest}: coding tools need more"
