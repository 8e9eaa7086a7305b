"""Where every byte of a model goes: what there is, what is needed, and the plan of :mod:`memory_planner`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from spark_runtime.host_memory import HostMemory

__all__ = [
    "DeviceMemory",
    "DeviceNeeds",
    "DevicePlan",
    "HostPlan",
    "Measure",
    "MemoryPlan",
    "Needs",
    "Row",
    "split_budget",
]

GPU_GRAIN_BYTES = 2 * 2**20
"""CUDA hands out device memory in pages of this size, one allocation after another."""
GPU_OVERHEAD_BYTES = 160 * 2**20
"""What a GPU takes after its context exists and nobody asks for: kernels loaded on first use, workspaces of matrix
libraries, captured graphs, temporary copies of activations. An H200 took 113 to 120 MB for 512 tokens at once, all
resident or tiered (infra/benchmarks/results/tier-speed-h200.json, after_decode less after_load); larger batches take
more."""
RESERVE_BYTES = 256 * 2**20
RESERVE_SHARE = 0.03
"""Left free on a device: other programs' memory grows while the model runs (a desktop draws, a browser opens), by about
as much on any card, hence the floor; and what no plan foresees (fragments of freed memory, the estimate above) grows
with the card, hence the share, the same 3% by which a plan may be wrong."""
HOST_GRAIN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device has."""

    name: str
    free_bytes: int
    total_bytes: int
    budget_bytes: int | None = None
    """Most that Spark may use; ``None`` takes all that is free but the reserve."""
    grain_bytes: int = GPU_GRAIN_BYTES
    overhead_bytes: int = GPU_OVERHEAD_BYTES
    is_host: bool = False
    """A device over the CPU: its memory is the host's."""

    @classmethod
    def over_host(cls, name: str, host: HostMemory, budget_bytes: int | None = None) -> Self:
        """A device over the CPU."""
        free = host.available_bytes
        return cls(name, free, free, budget_bytes, grain_bytes=HOST_GRAIN_BYTES, overhead_bytes=0, is_host=True)

    @property
    def reserve_bytes(self) -> int:
        """Left alone, whatever the budget."""
        return 0 if self.is_host else max(RESERVE_BYTES, int(RESERVE_SHARE * self.total_bytes))

    @property
    def room_bytes(self) -> int:
        """Most that a plan may use."""
        room = max(0, self.free_bytes - self.reserve_bytes)
        return room if self.budget_bytes is None else min(room, self.budget_bytes)


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """What llama.cpp allocates on one device beside experts."""

    core_bytes: int
    context_bytes: int
    compute_bytes: int
    layers: tuple[int, ...]
    """The MoE layers it computes, as indices into the shape's layers."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What llama.cpp allocates for one context length and batch size beside experts."""

    devices: tuple[DeviceNeeds, ...]
    host_core_bytes: int = 0
    """Weights that are never offloaded, such as token embeddings."""
    host_compute_bytes: int = 0
    """The CPU's part of compute buffers, and logits."""


Measure = Callable[[int, int], Needs]
"""``measure(n_ctx, n_ubatch)``; asked again with smaller values only when a plan does not fit."""


class Row(NamedTuple):
    """One line of a plan's table."""

    tier: str
    what: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Bytes on one device."""

    core: int
    experts: int
    """Hot experts in slots, or all of them."""
    scratch: int
    """Two whole layers of the largest kind, for long prompts."""
    tables: int
    context: int
    compute: int
    alignment: int
    overhead: int

    @property
    def total(self) -> int:
        """Bytes that the device is expected to lose at the peak."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Bytes in host memory, beside devices over the CPU."""

    experts: int
    """Every expert, so that an eviction never writes; none where all are on devices."""
    core: int
    compute: int
    pinned: bool
    """Whether all experts may be pinned; pageable memory costs a copy for every expert that is fetched."""
    reason: str
    """Why they may or may not."""
    guesses: int = 0
    """What GPUs guess the next layers' selections from, once more: it is read and kept from here."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.experts + self.core + self.compute + self.guesses


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where everything goes."""

    n_ctx: int
    n_ubatch: int
    fits_entirely: bool
    """Every expert is on its device without slots: nothing needs to be tiered."""
    slots: tuple[int, ...]
    """Slots of every layer of the shape."""
    memory: tuple[DeviceMemory, ...]
    devices: tuple[DevicePlan, ...]
    host: HostPlan

    def rows(self) -> list[Row]:
        """The table of the plan: tier, what, bytes; what takes nothing is left out, what is left comes last."""
        rows: list[Row] = []
        experts = "experts" if self.fits_entirely else "experts in slots"
        for memory, plan in zip(self.memory, self.devices, strict=True):
            named = [
                ("core weights", plan.core),
                (experts, plan.experts),
                ("prefill scratch", plan.scratch),
                ("tables", plan.tables),
                ("context", plan.context),
                ("compute buffers", plan.compute),
                ("alignment", plan.alignment),
                ("driver", plan.overhead),
                ("reserve", memory.reserve_bytes),
                ("unused", memory.room_bytes - plan.total),
            ]
            rows += [Row(memory.name, what, n_bytes) for what, n_bytes in named if n_bytes]
        kind = "pinned" if self.host.pinned else "pageable"
        named = [
            (f"experts, {kind}", self.host.experts),
            ("core weights", self.host.core),
            ("compute buffers", self.host.compute),
            ("guesses", self.host.guesses),
        ]
        return rows + [Row("host", what, n_bytes) for what, n_bytes in named if n_bytes]


def split_budget(devices: Sequence[DeviceMemory], budget_bytes: int) -> tuple[DeviceMemory, ...]:
    """The same devices with one budget shared by their free memory, as llama.cpp shares out layers."""
    free = sum(device.free_bytes for device in devices) or 1
    return tuple(replace(device, budget_bytes=budget_bytes * device.free_bytes // free) for device in devices)
