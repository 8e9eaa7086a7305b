"""Plans a model's memory before anything of it is loaded, or refuses with what would fit. Pure.

A plan is made per device, as llama.cpp gives whole layers to devices. What cannot move comes first (core weights,
context, compute buffers, the tier's own scratch and tables, the driver); slots for experts take what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_runtime.errors import PlanError
from spark_runtime.memory_fix import Fix, Shortage, context_and_batch_fixes, memory_fix, memory_text
from spark_runtime.memory_plan import DeviceMemory, DeviceNeeds, DevicePlan, HostPlan, Measure, MemoryPlan, Needs
from spark_runtime.placement import FloatArray, LayerSizes, greedy_slots, layer_sizes, uniform_slots

if TYPE_CHECKING:
    from spark_runtime.host_memory import HostMemory
    from spark_schemas.model import ModelShape

__all__ = ["plan_memory", "plan_whole"]

SCRATCH_LAYERS = 2
"""A long prompt's layer is computed while the next one is fetched."""
TENSOR_PADDING_BYTES = 16 * 2**10
"""Quantised kernels read past a layer's last expert, at most 512 values in each of its tensors."""
TABLE_BYTES_PER_EXPERT = 128
"""Slot, score and prior (22), selections and reuse by phase (32), and remapped ids of 8 tokens (32), rounded up."""
TABLE_BYTES_PER_LAYER = 1024
_ID_BYTES = 4
_WEIGHT_BYTES = 2


def plan_memory(
    shape: ModelShape,
    measure: Measure,
    *,
    n_ctx: int,
    n_ubatch: int,
    devices: Sequence[DeviceMemory],
    host: HostMemory,
    frequency: Sequence[FloatArray] | None = None,
    slots: Sequence[int] | None = None,
    always_tiered: bool = False,
) -> MemoryPlan:
    """The plan for a model on its devices.

    Where everything fits nothing is tiered, unless ``always_tiered``. Else ``slots`` are a manifest's, one number a
    layer; without them the slots that there is room for are placed by ``frequency``, or the same share of every layer
    without one. Raises :class:`PlanError` with the changes that would fit.
    """
    sizes = layer_sizes(shape)
    if slots is not None:
        _check_slots(shape, slots)
    planner = _Planner(shape, sizes, tuple(devices), host, frequency, always_tiered)
    needs = measure(n_ctx, n_ubatch)
    if planner.fits_entirely(needs):
        return planner.plan(needs, n_ctx, n_ubatch, [size.n_experts for size in sizes])
    chosen = list(slots) if slots is not None else planner.best_slots(needs, n_ubatch)
    if chosen is None or planner.missing(needs, n_ubatch, chosen):
        raise planner.refusal(measure, n_ctx, n_ubatch, chosen)
    return planner.plan(needs, n_ctx, n_ubatch, chosen)


def plan_whole(
    shape: ModelShape,
    measure: Measure,
    *,
    n_ctx: int,
    n_ubatch: int,
    devices: Sequence[DeviceMemory],
    host: HostMemory,
) -> MemoryPlan:
    """The plan with every expert on its device and nothing tiered; :class:`PlanError` where that does not fit."""
    sizes = layer_sizes(shape)
    planner = _Planner(shape, sizes, tuple(devices), host, None, always_tiered=False)
    needs = measure(n_ctx, n_ubatch)
    if not planner.fits_entirely(needs):
        raise planner.refusal_of_whole(measure, n_ctx, n_ubatch)
    return planner.plan(needs, n_ctx, n_ubatch, [size.n_experts for size in sizes])


def _check_slots(shape: ModelShape, slots: Sequence[int]) -> None:
    if len(slots) != len(shape.layers):
        raise PlanError(f"slots for {len(slots)} layers, but the model has {len(shape.layers)} with experts")
    for layer, size, count in zip(shape.layers, layer_sizes(shape), slots, strict=True):
        if not size.floor_slots <= count <= size.n_experts:
            raise PlanError(
                f"block {layer.block}: {count} slots, expected {size.floor_slots} (2 * top_k) to {size.n_experts}"
            )


@dataclass(frozen=True, slots=True)
class _Planner:
    shape: ModelShape
    sizes: tuple[LayerSizes, ...]
    devices: tuple[DeviceMemory, ...]
    host: HostMemory
    frequency: Sequence[FloatArray] | None
    always_tiered: bool

    @property
    def _name(self) -> str:
        return self.shape.name or self.shape.architecture

    def fits_entirely(self, needs: Needs) -> bool:
        return not self.always_tiered and all(
            self._whole(memory, need).total <= memory.room_bytes
            for memory, need in zip(self.devices, needs.devices, strict=True)
        )

    def plan(self, needs: Needs, n_ctx: int, n_ubatch: int, slots: Sequence[int]) -> MemoryPlan:
        """The plan with these slots, which the devices have room for; the host may still lack memory."""
        whole = self.fits_entirely(needs)
        parts = tuple(
            self._whole(memory, need) if whole else self._tiered(memory, need, n_ubatch, slots)
            for memory, need in zip(self.devices, needs.devices, strict=True)
        )
        experts = 0 if whole else self.shape.expert_bytes_total
        pinned, reason = experts <= self.host.pinnable_bytes, self.host.pinnable_reason
        if all(memory.is_host for memory in self.devices):
            pinned, reason = False, "no GPU reads them"
        guesses = sum(
            self._guess_bytes(need, slots)
            for memory, need in zip(self.devices, needs.devices, strict=True)
            if not (whole or memory.is_host)
        )
        host = HostPlan(experts, needs.host_core_bytes, needs.host_compute_bytes, pinned, reason, guesses)
        in_host = sum(part.total for memory, part in zip(self.devices, parts, strict=True) if memory.is_host)
        if (lacking := host.total + in_host - self.host.available_bytes) > 0:
            raise PlanError(
                f"{self._name} needs {memory_text(host.total + in_host)} of host memory, expected at most "
                f"{memory_text(self.host.available_bytes)} ({self.host.available_reason})",
                [memory_fix([Shortage("the host", lacking)])],
            )
        return MemoryPlan(n_ctx, n_ubatch, whole, tuple(slots), self.devices, parts, host)

    def best_slots(self, needs: Needs, n_ubatch: int) -> list[int] | None:
        """The slots that fill every device; ``None`` where one does not hold the floor."""
        slots = [size.floor_slots for size in self.sizes]
        if self.missing(needs, n_ubatch, slots):
            return None
        every = [size.n_experts for size in self.sizes]
        for memory, need in zip(self.devices, needs.devices, strict=True):
            # With every expert in a slot a device needs no scratch.
            if self._tiered(memory, need, n_ubatch, every).total <= memory.room_bytes:
                placed = [every[index] for index in need.layers]
            else:
                sizes = [self.sizes[index] for index in need.layers]
                part = self._tiered(memory, need, n_ubatch, slots)
                budget = memory.room_bytes - part.total + part.experts
                placed = self._placed(need, sizes, budget)
            for index, count in zip(need.layers, placed, strict=True):
                slots[index] = count
        return slots

    def _placed(self, need: DeviceNeeds, sizes: Sequence[LayerSizes], budget: int) -> list[int]:
        if self.frequency is None:
            return uniform_slots(sizes, budget)
        return greedy_slots([self.frequency[index] for index in need.layers], sizes, budget)

    def missing(self, needs: Needs, n_ubatch: int, slots: Sequence[int]) -> dict[str, int]:
        """Bytes that devices lack, by name."""
        lacking = {
            memory.name: self._tiered(memory, need, n_ubatch, slots).total - memory.room_bytes
            for memory, need in zip(self.devices, needs.devices, strict=True)
        }
        return {name: n_bytes for name, n_bytes in lacking.items() if n_bytes > 0}

    def refusal(self, measure: Measure, n_ctx: int, n_ubatch: int, asked: Sequence[int] | None) -> PlanError:
        slots = asked or [size.floor_slots for size in self.sizes]

        def fits(tokens: int, batch: int) -> bool:
            needs = measure(tokens, batch)
            return self.fits_entirely(needs) or not self.missing(needs, batch, slots)

        needs = measure(n_ctx, n_ubatch)
        missing = self.missing(needs, n_ubatch, slots)
        fixes: list[Fix] = []
        # Fewer slots cost speed alone, so they come before anything that takes something away.
        if asked is not None and (best := self.best_slots(needs, n_ubatch)) is not None:
            text = f"use {sum(best)} slots instead of {sum(asked)}"
            fixes.append(Fix("slots", text, slots=tuple(best)))
        fixes += context_and_batch_fixes(fits, n_ctx, n_ubatch)
        fixes.append(
            memory_fix(
                [self._shortage(memory, missing[memory.name]) for memory in self.devices if memory.name in missing]
            )
        )
        worst = max(missing, key=lambda name: missing[name])
        room = next(memory.room_bytes for memory in self.devices if memory.name == worst)
        what = "2 * top_k slots in every layer" if asked is None else f"{sum(asked)} slots"
        return PlanError(
            f"{self._name} with {what}, a context of {n_ctx} tokens and a batch of {n_ubatch} needs "
            f"{memory_text(room + missing[worst])} on {worst}, expected at most {memory_text(room)}",
            fixes,
        )

    def refusal_of_whole(self, measure: Measure, n_ctx: int, n_ubatch: int) -> PlanError:
        lacking = [
            self._shortage(memory, missing)
            for memory, need in zip(self.devices, measure(n_ctx, n_ubatch).devices, strict=True)
            if (missing := self._whole(memory, need).total - memory.room_bytes) > 0
        ]
        fixes = context_and_batch_fixes(
            lambda tokens, batch: self.fits_entirely(measure(tokens, batch)), n_ctx, n_ubatch
        )
        what = " and ".join(shortage.device for shortage in lacking)
        return PlanError(
            f"{self._name} with every expert resident, a context of {n_ctx} tokens and a batch of {n_ubatch} does not "
            f"fit {what}",
            [*fixes, memory_fix(lacking)],
        )

    def _shortage(self, memory: DeviceMemory, lacking: int) -> Shortage:
        needed = memory.room_bytes + lacking
        return Shortage(
            memory.name,
            free_bytes=max(0, needed + memory.reserve_bytes - memory.free_bytes),
            budget_bytes=needed if memory.budget_bytes is not None and memory.budget_bytes < needed else 0,
        )

    def _whole(self, memory: DeviceMemory, need: DeviceNeeds) -> DevicePlan:
        experts = sum(self.sizes[index].n_experts * self.sizes[index].expert_bytes for index in need.layers)
        return _device_plan(memory, need, experts, pools=1)

    def _guess_bytes(self, need: DeviceNeeds, slots: Sequence[int]) -> int:
        """What guesses of the next layers are made from: a row for each expert of the two layers before.

        None where every expert is in a slot.
        """
        layers = [self.shape.layers[index] for index in need.layers]
        if all(slots[index] == layer.n_experts for index, layer in zip(need.layers, layers, strict=True)):
            return 0
        return sum(_WEIGHT_BYTES * layer.n_experts * (2 * layer.n_experts + 1) for layer in layers)

    def _tiered(self, memory: DeviceMemory, need: DeviceNeeds, n_ubatch: int, slots: Sequence[int]) -> DevicePlan:
        layers = [(self.shape.layers[index], slots[index]) for index in need.layers]
        layouts = {(layer.expert_bytes, tuple(sorted(layer.tensor_types.items()))) for layer, _ in layers}
        largest = max((layer.n_experts * layer.expert_bytes for layer, _ in layers), default=0)
        partial = any(count < layer.n_experts for layer, count in layers)
        tables = sum(TABLE_BYTES_PER_LAYER + TABLE_BYTES_PER_EXPERT * layer.n_experts for layer, _ in layers)
        ids = _ID_BYTES * n_ubatch * max((layer.top_k for layer, _ in layers), default=0)
        tables += self._guess_bytes(need, slots)
        if memory.is_host:
            # The CPU reads what is not in slots where it is, and the host's own tables are too small to count.
            partial, tables, ids = False, 0, 0
        return _device_plan(
            memory,
            need,
            sum(count * layer.expert_bytes for layer, count in layers),
            pools=sum(len(kinds) for _, kinds in layouts),
            scratch=SCRATCH_LAYERS * (largest + TENSOR_PADDING_BYTES) if partial else 0,
            tables=tables + ids,
        )


def _device_plan(
    memory: DeviceMemory, need: DeviceNeeds, experts: int, *, pools: int, scratch: int = 0, tables: int = 0
) -> DevicePlan:
    grain = memory.grain_bytes
    buffers = (need.core_bytes, need.context_bytes, need.compute_bytes, scratch, tables)
    # Slots come in one pool for each tensor of a layout; how each rounds up is not known before they are chosen.
    alignment = sum(-size % grain for size in buffers) + pools * (grain + TENSOR_PADDING_BYTES)
    return DevicePlan(
        core=need.core_bytes,
        experts=experts,
        scratch=scratch,
        tables=tables,
        context=need.context_bytes,
        compute=need.compute_bytes,
        alignment=alignment,
        overhead=memory.overhead_bytes,
    )
