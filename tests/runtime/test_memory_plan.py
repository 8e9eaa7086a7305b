"""Plans on made-up models and devices: every byte is counted, and what is suggested really fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spark_runtime.errors import PlanError
from spark_runtime.host_memory import HostMemory
from spark_runtime.memory_fix import context_and_batch_fixes, memory_text
from spark_runtime.memory_plan import DeviceMemory, DeviceNeeds, Measure, MemoryPlan, Needs, split_budget
from spark_runtime.memory_planner import plan_memory
from spark_runtime.placement import layer_sizes
from spark_schemas.model import ExpertLayer, ModelShape

MIB, GIB = 2**20, 2**30
AMPLE = HostMemory(2**50, "made up", 2**50, "made up")


def model(layers: Sequence[tuple[int, int, int]]) -> ModelShape:
    """``(n_experts, top_k, expert_bytes)`` of every block."""
    return ModelShape(
        fingerprint="mf1-" + "0" * 32,
        sibling="ms1-" + "0" * 32,
        architecture="toy",
        n_blocks=len(layers),
        context_length=131072,
        core_bytes=100 * MIB,
        kv_bytes_per_token=8192,
        layers=tuple(
            ExpertLayer(block=block, n_experts=n, top_k=k, expert_bytes=size, tensor_types={"up": f"t{size}"})
            for block, (n, k, size) in enumerate(layers)
        ),
    )


def measure(shape: ModelShape, cut: int | None = None) -> Measure:
    """Sizes that grow with the context and the batch; layers from ``cut`` on are on a second device."""
    n = len(shape.layers)
    parts = [range(n)] if cut is None else [range(cut), range(cut, n)]

    def needs(n_ctx: int, n_ubatch: int) -> Needs:
        devices = tuple(
            DeviceNeeds(
                core_bytes=shape.core_bytes * len(part) // n,
                context_bytes=shape.context_bytes(n_ctx) * len(part) // n,
                compute_bytes=n_ubatch * 100_000,
                layers=tuple(part),
            )
            for part in parts
        )
        return Needs(devices, host_core_bytes=50 * MIB, host_compute_bytes=n_ubatch * 8)

    return needs


def gpu(free: int, budget: int | None = None, name: str = "GPU0") -> DeviceMemory:
    return DeviceMemory(name, free, max(free, 8 * GIB), budget)


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    layers = []
    for _ in range(draw(st.integers(1, 6))):
        n_experts = draw(st.integers(4, 64))
        layers.append((n_experts, draw(st.integers(1, n_experts)), draw(st.integers(1000, 8 * MIB))))
    return model(layers)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelShape, Measure, list[DeviceMemory]]:
    shape = draw(models())
    cut = draw(st.integers(0, len(shape.layers))) if draw(st.booleans()) else None
    budgets = st.one_of(st.none(), st.integers(0, 6 * GIB))
    devices = [
        gpu(draw(st.integers(0, 6 * GIB)), draw(budgets), f"GPU{index}") for index in range(1 if cut is None else 2)
    ]
    return shape, measure(shape, cut), devices


def refusal_of(call: Callable[[], object]) -> PlanError | None:
    try:
        call()
    except PlanError as error:
        return error
    return None


def check(plan: MemoryPlan, shape: ModelShape, devices: Sequence[DeviceMemory], needs: Needs) -> None:
    sizes = layer_sizes(shape)
    for memory, part, need in zip(devices, plan.devices, needs.devices, strict=True):
        assert part.total <= memory.room_bytes
        assert part.total + memory.reserve_bytes <= memory.free_bytes
        if memory.budget_bytes is not None:
            assert part.total <= memory.budget_bytes
        assert part.experts == sum(plan.slots[index] * sizes[index].expert_bytes for index in need.layers)
        assert (part.core, part.context, part.compute) == (need.core_bytes, need.context_bytes, need.compute_bytes)
    for size, slots in zip(sizes, plan.slots, strict=True):
        assert size.floor_slots <= slots <= size.n_experts
    for memory in devices:
        total = sum(row.n_bytes for row in plan.rows() if row.tier == memory.name)
        assert total == memory.room_bytes + memory.reserve_bytes
    assert sum(row.n_bytes for row in plan.rows() if row.tier == "host") == plan.host.total


@given(cases(), st.integers(1, 32768), st.integers(1, 2048), st.booleans(), st.booleans())
def test_a_plan_fits_and_what_is_suggested_makes_it_fit(
    case: tuple[ModelShape, Measure, list[DeviceMemory]], n_ctx: int, n_ubatch: int, by_frequency: bool, tiered: bool
) -> None:
    shape, sizes, devices = case
    rng = np.random.default_rng(n_ctx)
    frequency = [rng.dirichlet(np.ones(layer.n_experts)) for layer in shape.layers] if by_frequency else None

    def plan(n_ctx: int, n_ubatch: int, devices: Sequence[DeviceMemory]) -> MemoryPlan:
        found = plan_memory(
            shape,
            sizes,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            devices=devices,
            host=AMPLE,
            frequency=frequency,
            always_tiered=tiered,
        )
        check(found, shape, devices, sizes(n_ctx, n_ubatch))
        return found

    error = refusal_of(lambda: plan(n_ctx, n_ubatch, devices))
    if error is not None:
        assert error.hint is not None
        assert error.fixes[-1].kind == "memory"
        for fix in error.fixes:
            assert fix.text in error.hint
            given_more = {shortage.device: shortage for shortage in fix.shortages}
            changed = [
                replace(
                    device,
                    free_bytes=device.free_bytes + given_more[device.name].free_bytes,
                    budget_bytes=given_more[device.name].budget_bytes or device.budget_bytes,
                )
                if device.name in given_more
                else device
                for device in devices
            ]
            assert fix.n_ctx < n_ctx
            assert fix.n_ubatch < n_ubatch
            plan(fix.n_ctx or n_ctx, fix.n_ubatch or n_ubatch, changed)
    else:
        found = plan(n_ctx, n_ubatch, devices)
        assert not (tiered and found.fits_entirely)
        if found.fits_entirely:
            assert found.host.experts == 0
            assert found.slots == tuple(layer.n_experts for layer in shape.layers)
        else:
            assert found.host.experts == shape.expert_bytes_total


@given(models(), st.integers(0, 6 * GIB), st.integers(0, GIB))
def test_more_memory_never_holds_less(shape: ModelShape, budget: int, more: int) -> None:
    largest = max(layer.expert_bytes for layer in shape.layers)
    held = []
    for size in (budget, budget + more):
        try:
            plan = plan_memory(
                shape, measure(shape), n_ctx=4096, n_ubatch=128, devices=[gpu(16 * GIB, size)], host=AMPLE
            )
            held.append(plan.devices[0].experts)
        except PlanError:
            held.append(0)
    # One expert of another size may take the place of several smaller ones.
    assert held[1] >= held[0] - largest * (len({layer.expert_bytes for layer in shape.layers}) > 1)
    assert held[1] or not held[0]


@given(models(), st.data())
def test_a_manifest_with_too_many_slots_is_told_how_many_fit(shape: ModelShape, data: st.DataObject) -> None:
    floors = [size.floor_slots for size in layer_sizes(shape)]
    slots = [data.draw(st.integers(low, layer.n_experts)) for low, layer in zip(floors, shape.layers, strict=True)]
    devices = [gpu(16 * GIB, data.draw(st.integers(300 * MIB, 4 * GIB)))]

    def plan(slots: Sequence[int]) -> MemoryPlan:
        return plan_memory(
            shape, measure(shape), n_ctx=2048, n_ubatch=64, devices=devices, host=AMPLE, slots=slots, always_tiered=True
        )

    error = refusal_of(lambda: plan(slots))
    if error is None:
        assert plan(slots).slots == tuple(slots)
        return
    for fix in error.fixes:
        if fix.kind == "slots":
            assert fix is error.fixes[0]
            check(plan(fix.slots), shape, devices, measure(shape)(2048, 64))


def test_a_plan_names_the_smallest_fix_first() -> None:
    shape = model([(64, 8, MIB)] * 8)
    with pytest.raises(PlanError) as error:
        plan_memory(shape, measure(shape), n_ctx=65536, n_ubatch=512, devices=[gpu(1200 * MIB)], host=AMPLE)
    # 16 slots of 8 layers, 2 layers of scratch, 100 MiB of core, 512 MiB of context, 49 MiB of compute, 160 of driver.
    assert str(error.value) == (
        "toy with 2 * top_k slots in every layer, a context of 65536 tokens and a batch of 512 needs 1085 MiB on GPU0, "
        "expected at most 944 MiB"
    )
    assert error.value.hint == "use a context of 47360 tokens; or free 141 MiB on GPU0"
    assert [fix.kind for fix in error.value.fixes] == ["n_ctx", "memory"]


def test_slots_that_cannot_be_are_refused() -> None:
    shape = model([(16, 4, MIB), (16, 2, MIB)])
    for slots, message in (
        ([7, 16], r"block 0: 7 slots, expected 8 \(2 \* top_k\) to 16"),
        ([16, 17], r"block 1: 17 slots, expected 4 \(2 \* top_k\) to 16"),
        ([16], "slots for 1 layers, but the model has 2 with experts"),
    ):
        with pytest.raises(PlanError, match=message):
            plan_memory(shape, measure(shape), n_ctx=256, n_ubatch=32, devices=[gpu(16 * GIB)], host=AMPLE, slots=slots)


def test_a_model_that_fits_needs_no_tiers() -> None:
    shape = model([(16, 4, MIB)] * 4)
    plan = plan_memory(shape, measure(shape), n_ctx=256, n_ubatch=32, devices=[gpu(8 * GIB)], host=AMPLE)
    assert plan.fits_entirely
    assert plan.devices[0].scratch == plan.devices[0].tables == plan.host.experts == 0
    assert plan.devices[0].experts == shape.expert_bytes_total


def test_the_reserve_follows_the_size_of_the_device() -> None:
    assert DeviceMemory("GPU0", 4 * GIB, 4 * GIB).reserve_bytes == 256 * MIB
    assert DeviceMemory("GPU0", 100 * GIB, 100 * GIB).reserve_bytes == 3 * GIB
    assert DeviceMemory("GPU0", 0, 4 * GIB).room_bytes == 0


def test_one_budget_is_shared_by_free_memory() -> None:
    first, second = split_budget([gpu(6 * GIB), gpu(2 * GIB, name="GPU1")], 4 * GIB)
    assert (first.budget_bytes, second.budget_bytes) == (3 * GIB, GIB)


def test_the_host_must_hold_every_expert() -> None:
    shape = model([(64, 4, MIB)] * 4)
    needed = 256 * MIB + 50 * MIB + 512
    common = {"n_ctx": 256, "n_ubatch": 64, "devices": [gpu(16 * GIB)], "always_tiered": True}
    enough = HostMemory(needed, "a limit", needed - 2**27, "a quota")
    plan = plan_memory(shape, measure(shape), host=enough, **common)
    assert plan.host.total == needed
    assert not plan.host.pinned
    assert plan.host.reason == "a quota"
    assert ("host", "experts, pageable", 256 * MIB) in plan.rows()
    with pytest.raises(PlanError, match=r"needs 307 MiB of host memory, expected at most 307 MiB \(a limit\)") as error:
        plan_memory(shape, measure(shape), host=replace(enough, available_bytes=needed - 1), **common)
    assert error.value.hint == "free 1 KiB on the host"


def test_guesses_of_a_gpu_lie_on_the_host_as_well() -> None:
    shape = model([(64, 4, MIB)] * 4)
    common = {"n_ctx": 256, "n_ubatch": 64, "host": AMPLE, "always_tiered": True}
    some = plan_memory(shape, measure(shape), devices=[gpu(8 * GIB)], slots=[32] * 4, **common)
    every = plan_memory(shape, measure(shape), devices=[gpu(8 * GIB)], slots=[64] * 4, **common)
    weights = 2 * 4 * 64 * (2 * 64 + 1)
    assert some.host.guesses == weights
    assert ("host", "guesses", weights) in some.rows()
    assert some.devices[0].tables == every.devices[0].tables + weights
    assert every.host.guesses == 0


def test_a_device_over_the_cpu_shares_the_hosts_memory() -> None:
    shape = model([(64, 4, MIB)] * 4)
    host = HostMemory(700 * MIB, "a limit", 700 * MIB, "a limit")
    device = DeviceMemory.over_host("SPARK0", host, 350 * MIB)
    plan = plan_memory(shape, measure(shape), n_ctx=256, n_ubatch=64, devices=[device], host=host)
    assert not plan.fits_entirely
    assert not plan.host.pinned
    assert plan.host.reason == "no GPU reads them"
    assert plan.devices[0].total + plan.host.total <= host.available_bytes
    less = replace(host, available_bytes=600 * MIB)
    with pytest.raises(PlanError, match="host memory"):
        plan_memory(shape, measure(shape), n_ctx=256, n_ubatch=64, devices=[device], host=less)


@given(st.integers(1, 2**40))
def test_sizes_in_messages_are_enough(n_bytes: int) -> None:
    number, unit = memory_text(n_bytes).split()
    assert float(number) * {"KiB": 2**10, "MiB": MIB, "GiB": GIB}[unit] >= n_bytes * (1 - 1e-12)


@given(st.integers(1, 10**6), st.integers(1, 4096), st.integers(1, 10**6), st.integers(1, 4096))
def test_fixes_are_as_small_as_steps_allow(n_ctx: int, n_ubatch: int, context: int, batch: int) -> None:
    asked: list[tuple[int, int]] = []

    def fits(tokens: int, size: int) -> bool:
        asked.append((tokens, size))
        return tokens <= context and size <= batch

    assume(not (n_ctx <= context and n_ubatch <= batch))
    fixes = context_and_batch_fixes(fits, n_ctx, n_ubatch)
    assert len(asked) == len(set(asked)) <= 40
    for fix in fixes:
        tokens, size = fix.n_ctx or n_ctx, fix.n_ubatch or n_ubatch
        assert tokens <= context
        assert size <= batch
        if fix.n_ctx:
            assert tokens + 256 > min(context, n_ctx - 1)
    if n_ctx > 256 and context >= 256 and (n_ubatch <= batch or (n_ubatch > 32 and batch >= 32)):
        assert fixes
