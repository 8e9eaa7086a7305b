"""From a command's options to a plan of where a model's experts go, and how it is told."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_agent.errors import SparkError, UsageError
from spark_agent.sizes import format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_agent.context import AgentContext
    from spark_agent.imported_start import ImportedStart
    from spark_runtime.early_fetch import EarlyFetch
    from spark_runtime.engine import Engine, EngineOptions
    from spark_runtime.gguf_file import GgufModel
    from spark_runtime.memory_fix import Fix
    from spark_runtime.placement import FloatArray
    from spark_runtime.tier_plan import TierPlan
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.model import ModelShape

__all__ = [
    "MOST_PARALLEL",
    "MOST_THREADS",
    "TierOptions",
    "plan_for",
    "plan_table",
    "planned_options",
    "serving_threads",
    "tiers_of",
    "warn_about_tiers",
]


MOST_THREADS = 512
"""What ggml's CPU backend has room for (``GGML_MAX_N_THREADS``)."""


MOST_PARALLEL = 64
"""Conversations; llama.cpp has room for 256 sequences, each with its own keys and values."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What a person may say about tiers; nothing said leaves it to the machine."""

    vram: str | None = None
    residency: float | None = None
    ubatch: int = 0
    devices: int = 0
    pinned_share: float = 0.0
    no_tier: bool = False
    coverage: float | None = None
    parallel: int = 1
    """Conversations that the context holds at once; 0: as many as are worth their bytes."""

    def check(self, manifest: PlacementManifest | ImportedStart | None) -> None:
        """Raise :class:`UsageError` for what contradicts itself."""
        if self.vram is not None and self.residency is not None:
            raise UsageError("--vram and --residency both say how many experts to keep", "pass one of them")
        if self.coverage is not None and (self.vram is not None or self.residency is not None):
            raise UsageError(
                "--coverage says how many experts to keep, as --vram and --residency do", "pass one of them"
            )
        if self.coverage is not None and not 0 < self.coverage <= 1:
            raise UsageError(f"--coverage: found {self.coverage:g}, expected a share above 0, at most 1", "e.g. 0.95")
        if self.no_tier and self.coverage is not None:
            raise UsageError("--no-tier keeps every expert resident", "leave out --coverage")
        if self.no_tier and (self.residency is not None or self.pinned_share):
            raise UsageError("--no-tier keeps every expert resident", "leave out --residency and --pinned-share")
        if self.pinned_share and manifest is None:
            raise UsageError("--pinned-share pins the hottest experts, and no profile says which", "pass --manifest")
        if self.residency is not None and not 0 < self.residency <= 1:
            raise UsageError(f"--residency: found {self.residency:g}, expected a share above 0, at most 1", "e.g. 0.6")
        if self.budget_bytes == 0:
            raise UsageError("--vram: found 0 bytes", "e.g. --vram 14G")

    @property
    def budget_bytes(self) -> int | None:
        """``--vram`` in bytes; raise :class:`UsageError` when it is no size."""
        return None if self.vram is None else parse_size(self.vram, "--vram")


def plan_for(
    model: GgufModel,
    shape: ModelShape,
    options: TierOptions,
    manifest: PlacementManifest | None,
    n_ctx: int,
    *,
    wanted: bool = False,
    n_outputs_max: int = 1,
    always: bool = False,
    frequency: Sequence[FloatArray] | None = None,
) -> TierPlan | None:
    """The plan; ``None`` where nothing is to be tiered and the host's memory is all there is, unless ``always``.

    Without a GPU there is nothing to gain by tiers, so they have to be asked for, or ``wanted``. There the operating
    system pages weights in and out of the mapped file, so no plan refuses a model that is larger than the memory.
    ``frequency`` is what the slots start from where nobody named a manifest. Raises what ``tier_plan.plan_tiers``
    raises.
    """
    from spark_runtime.errors import InstallationError, PlanError
    from spark_runtime.tier_plan import TierRequest, cards, plan_tiers, plan_untiered

    request = TierRequest(
        n_ctx=n_ctx,
        n_ubatch=options.ubatch,
        budget_bytes=options.budget_bytes,
        residency=options.residency,
        coverage=options.coverage,
        n_devices=options.devices,
        n_seq_max=options.parallel,
        n_outputs_max=n_outputs_max,
        manifest=manifest,
        frequency=frequency,
        pinned_share=options.pinned_share,
    )
    if options.coverage is not None and manifest is None and frequency is None:
        raise UsageError("--coverage needs a profile: nothing else says what covers how much", "pass --manifest")
    asked = (
        options.vram is not None
        or options.coverage is not None
        or options.residency is not None
        or manifest is not None
        or wanted
    )
    found = cards()
    on_cards, one = bool(found), (options.devices or len(found)) <= 1
    try:
        if not options.no_tier and (asked or on_cards):
            return plan_tiers(model, shape, request)
        return plan_untiered(model, shape, request) if on_cards or always else None
    except PlanError as error:
        orders = [_order(fix, shape, one_device=one) for fix in error.fixes]
        raise SparkError(str(error), "; or ".join(orders) or None) from error
    except InstallationError:
        if asked:
            raise
        # llama.cpp alone may still do; that nothing native can be built is said when it is opened.
        return plan_untiered(model, shape, request)


def _order(fix: Fix, shape: ModelShape, *, one_device: bool) -> str:
    """A change as a person makes it; a budget for several devices is not the sum of what some of them lack."""
    options = []
    if fix.n_ctx:
        options.append(f"--ctx {fix.n_ctx}")
    if fix.n_ubatch:
        options.append(f"--ubatch {fix.n_ubatch}")
    if fix.slots:
        kept = sum(count * layer.expert_bytes for count, layer in zip(fix.slots, shape.layers, strict=True))
        options.append(f"--residency {math.floor(100 * kept / shape.expert_bytes_total) / 100:g}")
    needed = sum(shortage.budget_bytes for shortage in fix.shortages)
    if needed and one_device:
        options.append(f"--vram {-(-needed // 2**20)}M")
    return f"{fix.text} ({' '.join(options)})" if options else fix.text


def planned_options(
    plan: TierPlan | None,
    options: TierOptions,
    n_ctx: int,
    threads: int,
    *,
    n_outputs_max: int = 1,
    early: EarlyFetch | None = None,
) -> EngineOptions:
    """How the engine is opened. Where one token at a time is generated, one row of logits is enough."""
    from spark_runtime.early_fetch import NO_EARLY_FETCH
    from spark_runtime.engine import EngineOptions
    from spark_runtime.tier_plan import BATCH

    ubatch = options.ubatch if plan is None else plan.memory.n_ubatch
    return EngineOptions(
        n_ctx=n_ctx,
        n_threads=threads,
        n_batch=max(BATCH, ubatch),
        n_ubatch=ubatch,
        n_outputs_max=n_outputs_max,
        n_seq_max=max(1, options.parallel) if plan is None else plan.n_seq_max,
        tier=None if plan is None else plan.start,
        early=early or NO_EARLY_FETCH,
        devices=options.devices,
    )


def serving_threads() -> int:
    """Threads that compute while others answer: all processors but one.

    llama.cpp's threads wait for each other many times a token. One whose processor is sending the last token holds up
    all of them, which costs more than a processor (``infra/benchmarks/serving_overhead.py``).
    """
    return max(1, len(os.sched_getaffinity(0)) - 1)


def plan_table(plan: TierPlan) -> str:
    """The plan for a person: what takes how much, tier by tier."""
    rows = [(row.tier, row.what, format_size(row.n_bytes)) for row in plan.memory.rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines, last = [], ""
    for tier, what, size in rows:
        name, last = ("" if tier == last else tier), tier
        lines.append(f"{name:{widths[0]}}  {what:{widths[1]}}  {size:>{widths[2]}}")
    if plan.start is None:
        lines.append("every expert is resident: nothing is tiered")
    else:
        lines.append(
            f"{plan.start.slots} of {sum(len(layer.order) for layer in plan.start.layers)} experts in slots "
            f"({plan.resident_share:.1%}), prompts in batches of {plan.memory.n_ubatch} tokens"
        )
    return "\n".join(lines)


def tiers_of(
    shape: ModelShape, n_ctx: int, plan: TierPlan | None, engine: Engine | None, *, on_gpu: bool
) -> dict[str, Any]:
    """The ``tiers`` of a start-up object; before loading (``engine`` is ``None``) without what only shows then."""
    tier = None if engine is None else engine.tier
    kinds = sorted({device.engine for device in tier.devices}) if tier is not None else []
    memory = tier.memory() if tier is not None else None
    start = None if plan is None else plan.start
    n_contexts = len(engine.conversations) if engine is not None else 1 if plan is None else plan.n_seq_max
    return {
        "backend": "spark" if start is not None else "llama.cpp",
        "device": "gpu" if on_gpu else "cpu",
        "tiered": start is not None,
        "engine": "/".join(kinds) or None,
        "residency": 1.0 if plan is None else plan.resident_share,
        "slots": sum(layer.n_experts for layer in shape.layers) if start is None else start.slots,
        "n_ubatch": None if plan is None else plan.memory.n_ubatch,
        "core_bytes": shape.core_bytes,
        "expert_bytes": shape.expert_bytes_total,
        "kv_bytes": n_contexts * shape.context_bytes(n_ctx),
        "prefetch": None
        if tier is None or not tier.early.experts
        else {"experts": tier.early.experts, "threshold": tier.early.threshold},
        "slot_bytes": None if memory is None else memory.slots,
        "host_bytes": None if memory is None else memory.host,
        "host_pinned_bytes": None if memory is None else memory.host_pinned,
        "plan": None
        if plan is None
        else [{"tier": row.tier, "what": row.what, "bytes": row.n_bytes} for row in plan.memory.rows()],
    }


def warn_about_tiers(context: AgentContext, engine: Engine) -> None:
    """Say why tiers are slower than they could be on this machine's GPUs."""
    from spark_runtime.native_tier import kernel_fault
    from spark_runtime.tier_plan import cards

    if engine.tier is None or not cards():
        return
    for index, device in enumerate(engine.tier.devices):
        fault = kernel_fault(index) if device.engine == "host" else None
        if fault is not None:
            context.output.warning(f"every layer waits for the host: {fault}")
            if fault.hint is not None:
                context.output.hint(fault.hint)
    memory = engine.tier.memory()
    if memory.host_pinned < memory.host:
        context.output.warning(
            f"{format_size(memory.host - memory.host_pinned)} of the experts are in pageable memory, from which every "
            "fetch is copied twice"
        )
