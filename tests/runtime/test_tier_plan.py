"""Plans on this machine, over the CPU where it has no GPU: what is planned is what a load takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_runtime import tier_plan as module
from spark_runtime.buffer_sizes import HOST, log_lines, read_buffer_sizes
from spark_runtime.devices import registered_devices
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import PlanError, TierError
from spark_runtime.gguf_file import GgufModel, read_gguf
from spark_runtime.memory_plan import MemoryPlan
from spark_runtime.model_shape import shape_of
from spark_runtime.tier_plan import BATCH, TierPlan, TierRequest, cards, plan_tiers, plan_untiered
from spark_schemas.manifest import PRIOR_SCALE, LayerPlacement, PlacementManifest, TierBytes
from spark_schemas.model import ModelShape

MIB = 2**20
N_CTX = 512
pytestmark = pytest.mark.skipif(bool(cards()), reason="the numbers are those of a machine without a GPU")


@pytest.fixture(scope="module")
def model() -> GgufModel:
    from spark_runtime.models import demo_model_path

    return read_gguf(demo_model_path())


@pytest.fixture(scope="module")
def shape(model: GgufModel) -> ModelShape:
    return shape_of(model)


@pytest.fixture(scope="module")
def manifest(shape: ModelShape) -> PlacementManifest:
    """The last experts are the hottest, and every layer has 20 slots."""
    layers = tuple(
        LayerPlacement(
            block=layer.block,
            n_experts=layer.n_experts,
            top_k=layer.top_k,
            slots=20,
            expert_bytes=layer.expert_bytes,
            prior=tuple(PRIOR_SCALE * (index + 1) // layer.n_experts for index in range(layer.n_experts)),
            total_share=1.0,
        )
        for layer in shape.layers
    )
    slots = sum(layer.slots * layer.expert_bytes for layer in layers)
    sizes = TierBytes(
        vram_core=1, vram_kv=1, vram_slots=slots, vram_reserve=0, vram_total=slots + 2, host_experts=1, disk=0
    )
    return PlacementManifest(
        fingerprint=shape.fingerprint,
        sibling=shape.sibling,
        workload="chat",
        phase="decode",
        profile_revision="c" * 64,
        vram_budget_bytes=slots + 2,
        n_ctx=N_CTX,
        layers=layers,
        bytes=sizes,
        expected=None,
        verdict=None,
        verdict_reason="made up",
        n_calibration=1,
        n_held_out=0,
    )


def total(plan: MemoryPlan) -> int:
    return sum(device.total for device in plan.devices)


def load(path: Path, plan: TierPlan) -> tuple[int, int]:
    """Bytes that a load of the plan takes of its devices, and slots that are resident."""
    options = EngineOptions(
        n_ctx=plan.memory.n_ctx,
        n_ubatch=plan.memory.n_ubatch,
        n_threads=1,
        n_outputs_max=1,
        tier=plan.start,
        devices=plan.n_devices if plan.start is not None else 0,
        mapped=False,
        repack=False,
    )
    with log_lines() as lines:
        engine = Engine.load(path, options)
    with engine:
        sizes = read_buffer_sizes(lines)
        kinds = (sizes.model, sizes.context, sizes.compute, sizes.output)
        taken = sum(kind.get(device.name, 0) for kind in kinds for device in plan.memory.memory)
        if engine.tier is None:
            return taken, 0
        memory = engine.tier.memory()
        resident = sum(len(ids) for ids in engine.tier.resident())
        return taken + memory.slots + memory.scratch + memory.tables, resident


@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("residency", [0.31, 0.6, 1.0])
def test_what_is_planned_is_what_a_load_takes(
    model: GgufModel, shape: ModelShape, residency: float, n_devices: int
) -> None:
    plan = plan_tiers(model, shape, TierRequest(n_ctx=N_CTX, residency=residency, n_devices=n_devices))
    assert plan.start is not None
    assert plan.resident_share == pytest.approx(residency, abs=0.01)
    taken, resident = load(model.path, plan)
    assert resident == plan.start.slots == sum(plan.memory.slots)
    assert abs(taken / total(plan.memory) - 1) < 0.03


def test_an_untiered_plan_is_what_a_load_takes(model: GgufModel, shape: ModelShape) -> None:
    plan = plan_untiered(model, shape, TierRequest(n_ctx=N_CTX))
    assert (plan.start, plan.resident_share, plan.memory.n_ubatch) == (None, 1.0, BATCH)
    taken, _ = load(model.path, plan)
    assert abs(taken / total(plan.memory) - 1) < 0.03


def test_a_budget_is_filled_and_not_exceeded(model: GgufModel, shape: ModelShape) -> None:
    budget = 16 * MIB
    plan = plan_tiers(model, shape, TierRequest(n_ctx=N_CTX, budget_bytes=budget))
    assert plan.start is not None
    assert budget - shape.layers[0].expert_bytes < total(plan.memory) <= budget
    taken, _ = load(model.path, plan)
    assert taken <= budget


def test_a_budget_for_everything_tiers_nothing(model: GgufModel, shape: ModelShape) -> None:
    plan = plan_tiers(model, shape, TierRequest(n_ctx=N_CTX, budget_bytes=2**30))
    assert (plan.start, plan.resident_share) == (None, 1.0)
    assert plan.memory.host.experts == 0
    always = plan_tiers(model, shape, TierRequest(n_ctx=N_CTX, budget_bytes=2**30, always_tiered=True))
    assert always.start is not None
    assert always.start.slots == sum(layer.n_experts for layer in shape.layers)


def test_too_small_a_budget_is_refused_with_what_fits(model: GgufModel, shape: ModelShape) -> None:
    request = TierRequest(n_ctx=N_CTX, budget_bytes=8 * MIB)
    with pytest.raises(PlanError, match=r"2 \* top_k slots in every layer") as refused:
        plan_tiers(model, shape, request)
    smaller = next(fix for fix in refused.value.fixes if fix.n_ubatch and not fix.n_ctx)
    plan = plan_tiers(model, shape, replace(request, n_ubatch=smaller.n_ubatch))
    assert total(plan.memory) <= 8 * MIB
    with pytest.raises(PlanError, match="with every expert resident") as untiered:
        plan_untiered(model, shape, request)
    (shortage,) = untiered.value.fixes[-1].shortages
    assert plan_untiered(model, shape, replace(request, budget_bytes=shortage.budget_bytes)).start is None


def test_a_manifest_gives_slots_order_and_priors(
    model: GgufModel, shape: ModelShape, manifest: PlacementManifest
) -> None:
    plan = plan_tiers(model, shape, TierRequest(n_ctx=N_CTX, manifest=manifest, pinned_share=0.1))
    assert plan.memory.slots == (20,) * len(shape.layers)
    assert plan.start is not None
    for layer in plan.start.layers:
        assert layer.order[:20].tolist() == list(range(63, 43, -1))
        assert layer.pinned == 2
        assert layer.prior[63] == layer.prior.max() > layer.prior[0] > 0


def test_a_budget_or_a_residency_overrides_a_manifests_slots(
    model: GgufModel, shape: ModelShape, manifest: PlacementManifest
) -> None:
    for changes in ({"budget_bytes": 16 * MIB}, {"residency": 0.5}):
        plan = plan_tiers(model, shape, TierRequest(n_ctx=N_CTX, manifest=manifest, **changes))  # type: ignore[arg-type]
        assert sum(plan.memory.slots) > 20 * len(shape.layers)
        assert plan.start is not None
        assert plan.start.layers[0].order[0] == 63, "its priors stay"


def test_a_manifest_that_holds_everything_needs_no_tiers(
    model: GgufModel, shape: ModelShape, manifest: PlacementManifest
) -> None:
    layers = tuple(layer.model_copy(update={"slots": layer.n_experts}) for layer in manifest.layers)
    whole = manifest.model_copy(update={"layers": layers})
    assert plan_tiers(model, shape, TierRequest(n_ctx=N_CTX, manifest=whole)).start is None


def test_a_profile_places_by_frequency(model: GgufModel, shape: ModelShape) -> None:
    frequency = [np.full(layer.n_experts, 1 / layer.n_experts) for layer in shape.layers]
    frequency[0] = np.eye(64)[5]
    plan = plan_tiers(model, shape, TierRequest(n_ctx=N_CTX, residency=0.5, frequency=frequency))
    assert plan.memory.slots[0] == 2 * shape.layers[0].top_k, "nothing but one expert of it is ever needed"
    assert plan.start is not None
    assert plan.start.layers[0].order[0] == 5


def test_more_devices_than_there_are(model: GgufModel, shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TierError, match="3 devices, but this machine has 2"):
        plan_tiers(model, shape, TierRequest(n_ctx=N_CTX, n_devices=3))
    assert plan_untiered(model, shape, TierRequest(n_ctx=N_CTX, n_devices=2)).n_devices == 1
    cpu = next(device for device in registered_devices() if device.buffers == HOST)
    monkeypatch.setattr(module, "cards", lambda: [cpu])
    with pytest.raises(TierError, match="2 devices, but this machine has 1"):
        plan_untiered(model, shape, TierRequest(n_ctx=N_CTX, n_devices=2))


@pytest.mark.parametrize(("room", "expected"), [(5, 2048), (3, 1024), (2, 512), (1, None)])
def test_the_largest_batch_that_fits(room: int, expected: int | None) -> None:
    """``room`` is in batches of 512 tokens, of which a plan needs one more."""

    def plan(batch: int) -> MemoryPlan:
        if batch // 512 + 1 > room:
            raise PlanError(f"{batch} tokens do not fit")
        return MemoryPlan(N_CTX, batch, False, (), (), (), None)  # type: ignore[arg-type]

    if expected is None:
        with pytest.raises(PlanError, match="512 tokens"):
            module._first_that_fits(plan, module.TIERED_BATCHES)
    else:
        assert module._first_that_fits(plan, module.TIERED_BATCHES).n_ubatch == expected


def test_a_small_batch_that_needs_no_tiers_comes_first() -> None:
    def plan(batch: int) -> MemoryPlan:
        return MemoryPlan(N_CTX, batch, batch == 512, (), (), (), None)  # type: ignore[arg-type]

    chosen = module._first_that_fits(plan, module.TIERED_BATCHES)
    assert (chosen.n_ubatch, chosen.fits_entirely) == (512, True)


def test_batches_are_no_longer_than_the_context() -> None:
    def batches(**changes: int) -> list[int]:
        return module._batches(TierRequest(**{"n_ctx": 8192, **changes}), on_cards=True)

    assert batches() == [2048, 1024, 512]
    assert batches(n_ctx=1024) == [1024, 512]
    assert batches(n_ctx=100) == [100]
    assert batches(n_ubatch=256) == [256]
    assert module._batches(TierRequest(n_ctx=8192), on_cards=False) == [512]
