"""What to tier on this machine: from a model and what a person asked for to a memory plan and a start for the slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spark_runtime.buffer_sizes import HOST, buffer_sizes, needs_of
from spark_runtime.confidence import covering_slots
from spark_runtime.devices import Device, device_at, registered_devices
from spark_runtime.errors import PlanError, TierError
from spark_runtime.host_probe import probe_host
from spark_runtime.memory_plan import DeviceMemory, Measure, MemoryPlan, Needs, split_budget
from spark_runtime.memory_planner import plan_memory, plan_whole
from spark_runtime.native_tier import proxy_devices
from spark_runtime.placement import FloatArray, greedy_slots, layer_sizes, residency_budget, uniform_slots
from spark_runtime.tier_start import TierStart, manifest_frequency, profile_start, slots_start

if TYPE_CHECKING:
    from spark_runtime.gguf_file import GgufModel
    from spark_runtime.host_memory import HostMemory
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.model import ModelShape

__all__ = ["BATCH", "TierPlan", "TierRequest", "cards", "plan_tiers", "plan_untiered", "worthwhile_sequences"]

MAX_SEQUENCES = 4
SEQUENCE_SHARE = 0.02
"""Of all experts' bytes, for more conversations than one: without, each turn of another computes its whole prompt."""
BATCH = 512
"""Tokens of a prompt that are computed at once where nothing is fetched meanwhile."""
TIERED_BATCHES = (2048, 1024, BATCH)
"""A layer's missing experts are fetched while the one before computes, which takes longer for a larger batch. On an
H200 with 60% of the experts resident, prompts of 4,096 tokens ran at 97, 90 and about 50% of all-resident speed."""


@dataclass(frozen=True, slots=True)
class TierRequest:
    """What a person asked for."""

    n_ctx: int
    n_ubatch: int = 0
    """Tokens of a prompt that are computed at once; 0 takes the largest of :data:`TIERED_BATCHES` that fits."""
    budget_bytes: int | None = None
    """Most memory of the devices, all together; ``None`` takes what is free but a reserve."""
    residency: float | None = None
    """Share of the experts' bytes in slots; ``None`` takes the manifest's slots, or what fits."""
    coverage: float | None = None
    """Share of the selections that the profile expects for which slots are made, and no more of them."""
    n_devices: int = 0
    """Devices to spread the layers over; 0 takes every GPU, or one device over the CPU."""
    n_outputs_max: int = 1
    n_seq_max: int = 1
    """Conversations that the context holds at once, each of ``n_ctx`` tokens; 0: :func:`worthwhile_sequences`."""
    manifest: PlacementManifest | None = None
    """Its slots count where neither a budget nor a residency is asked for, its priors in any case."""
    frequency: Sequence[FloatArray] | None = None
    """A profile, where there is no manifest."""
    pinned_share: float = 0.0
    always_tiered: bool = False
    """Even if every expert fits its device."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What comes of it."""

    memory: MemoryPlan
    start: TierStart | None
    """``None`` when everything fits and nothing is to be tiered."""
    n_devices: int
    resident_share: float
    """Of the experts' bytes."""
    n_seq_max: int = 1
    """Conversations, as asked for or as chosen."""


def cards() -> list[Device]:
    """GPUs that experts can be tiered on; without any, tiers are over the CPU and gain nothing."""
    return [device for device in registered_devices() if device.is_card]


def worthwhile_sequences(context_bytes: int, unused_bytes: int, expert_bytes: int) -> int:
    """How many conversations a context should hold, when nobody says.

    As many as fit the memory that nothing else would use, or that cost at most :data:`SEQUENCE_SHARE` of the experts'
    bytes beyond it, at most :data:`MAX_SEQUENCES`. ``context_bytes`` is what one more takes, ``unused_bytes`` what a
    plan for one leaves, ``expert_bytes`` what all experts take.
    """
    affordable = unused_bytes + int(SEQUENCE_SHARE * expert_bytes)
    return max(1, min(MAX_SEQUENCES, 1 + affordable // max(1, context_bytes)))


def plan_tiers(model: GgufModel, shape: ModelShape, request: TierRequest) -> TierPlan:
    """Plan a load through the proxy devices.

    With ``n_seq_max`` 0 it first plans for one conversation, and then for as many as are worth their bytes.

    Raises :class:`PlanError` with the changes that would fit, :class:`TierError` for more devices than there are, and
    what a dry load raises.
    """
    if request.n_seq_max == 0:
        return _with_sequences(lambda chosen: plan_tiers(model, shape, chosen), shape, request)
    host, found = probe_host(), cards()
    n_devices = request.n_devices or len(found) or 1
    proxies = [device_at(address) for address in proxy_devices(n_devices)]
    devices = _memories(proxies, host, request.budget_bytes, on_cards=bool(found))
    measure = _measure(model, shape, [proxy.address for proxy in proxies], devices, request)
    frequency = request.frequency
    if frequency is None and request.manifest is not None:
        frequency = manifest_frequency(request.manifest)
    slots = _fixed_slots(shape, request, frequency)
    always = request.always_tiered or request.residency is not None or request.coverage is not None
    if request.manifest is not None and slots is not None:
        always = always or any(count < layer.n_experts for count, layer in zip(slots, shape.layers, strict=True))

    def plan(n_ubatch: int) -> MemoryPlan:
        return plan_memory(
            shape,
            measure,
            n_ctx=request.n_ctx,
            n_ubatch=n_ubatch,
            devices=devices,
            host=host,
            frequency=frequency,
            slots=slots,
            always_tiered=always,
        )

    memory = _first_that_fits(plan, _batches(request, on_cards=bool(found)))
    start = None if memory.fits_entirely else _start(shape, request, frequency, memory.slots)
    resident = sum(part.experts for part in memory.devices) / shape.expert_bytes_total
    return TierPlan(memory, start, n_devices, resident, request.n_seq_max)


def plan_untiered(model: GgufModel, shape: ModelShape, request: TierRequest) -> TierPlan:
    """Plan a load as llama.cpp does it, with every expert on its device; raises as :func:`plan_tiers`.

    Without a GPU there is one device, however many proxies there may be over it.
    """
    if request.n_seq_max == 0:
        return _with_sequences(lambda chosen: plan_untiered(model, shape, chosen), shape, request)
    host, found = probe_host(), cards()
    if found and request.n_devices > len(found):
        raise TierError(f"{request.n_devices} devices, but this machine has {len(found)}", f"use at most {len(found)}")
    chosen = found[: request.n_devices] if request.n_devices else found
    places = chosen or [device for device in registered_devices() if device.buffers == HOST]
    devices = _memories(places, host, request.budget_bytes, on_cards=bool(found))
    measure = _measure(model, shape, [device.address for device in chosen], devices, request)
    n_ubatch = min(request.n_ubatch or BATCH, request.n_ctx)
    memory = plan_whole(shape, measure, n_ctx=request.n_ctx, n_ubatch=n_ubatch, devices=devices, host=host)
    return TierPlan(memory, None, len(places), 1.0, request.n_seq_max)


def _with_sequences(plan: Callable[[TierRequest], TierPlan], shape: ModelShape, request: TierRequest) -> TierPlan:
    """The plan with as many conversations as are worth their bytes; memory may hold fewer."""
    alone = plan(replace(request, n_seq_max=1))
    parts = list(zip(alone.memory.memory, alone.memory.devices, strict=True))
    context_bytes = sum(part.context for _, part in parts)
    unused = sum(max(0, memory.room_bytes - part.total) for memory, part in parts)
    chosen = worthwhile_sequences(context_bytes, unused, shape.expert_bytes_total)
    for n_seq_max in range(chosen, 1, -1):
        with contextlib.suppress(PlanError):
            several = plan(replace(request, n_seq_max=n_seq_max, n_ubatch=alone.memory.n_ubatch))
            # More conversations are never a reason to begin tiering.
            if several.memory.fits_entirely or not alone.memory.fits_entirely:
                return several
    return alone


def _memories(
    places: Sequence[Device], host: HostMemory, budget_bytes: int | None, *, on_cards: bool
) -> tuple[DeviceMemory, ...]:
    devices = tuple(
        DeviceMemory(place.buffers, *place.memory()) if on_cards else DeviceMemory.over_host(place.buffers, host)
        for place in places
    )
    return devices if budget_bytes is None else split_budget(devices, budget_bytes)


def _measure(
    model: GgufModel,
    shape: ModelShape,
    addresses: Sequence[int],
    devices: Sequence[DeviceMemory],
    request: TierRequest,
) -> Measure:
    def measure(n_ctx: int, n_ubatch: int) -> Needs:
        sizes = buffer_sizes(
            model,
            n_ctx=n_ctx,
            n_batch=min(max(n_ubatch, BATCH), n_ctx),
            n_ubatch=min(n_ubatch, n_ctx),
            n_outputs_max=request.n_outputs_max,
            n_seq_max=request.n_seq_max,
            devices=addresses,
        )
        return needs_of(shape, sizes, [device.name for device in devices])

    return measure


def _fixed_slots(shape: ModelShape, request: TierRequest, frequency: Sequence[FloatArray] | None) -> list[int] | None:
    """Slots of every layer where they are given; ``None`` where they follow from the memory that there is."""
    if request.residency is not None:
        sizes = layer_sizes(shape)
        budget = residency_budget(sizes, request.residency)
        return uniform_slots(sizes, budget) if frequency is None else greedy_slots(frequency, sizes, budget)
    if request.coverage is not None and frequency is not None:
        return covering_slots(frequency, layer_sizes(shape), request.coverage)
    if request.manifest is not None and request.budget_bytes is None:
        return [layer.slots for layer in request.manifest.layers]
    return None


def _batches(request: TierRequest, *, on_cards: bool) -> list[int]:
    if request.n_ubatch:
        return [min(request.n_ubatch, request.n_ctx)]
    batches = TIERED_BATCHES if on_cards else (BATCH,)
    return sorted({min(batch, request.n_ctx) for batch in batches}, reverse=True)


def _first_that_fits(plan: Callable[[int], MemoryPlan], batches: Sequence[int]) -> MemoryPlan:
    """The plan with the largest batch that fits; but if a small one makes tiers needless, with that."""
    smallest = plan(batches[-1])
    if smallest.fits_entirely:
        return smallest
    for batch in batches[:-1]:
        with contextlib.suppress(PlanError):
            return plan(batch)
    return smallest


def _start(
    shape: ModelShape, request: TierRequest, frequency: Sequence[FloatArray] | None, slots: Sequence[int]
) -> TierStart:
    if frequency is None:
        return slots_start(shape, slots)
    return profile_start(shape, frequency, slots, pinned_share=request.pinned_share)
