from __future__ import annotations

import pytest

from spark_agent.context_choice import choose_context, context_steps, host_sequences
from spark_agent.errors import SparkError
from spark_runtime.host_memory import HostMemory
from spark_runtime.memory_plan import DeviceMemory, DeviceNeeds, Needs
from spark_runtime.memory_planner import plan_memory
from spark_runtime.tier_plan import TierPlan
from spark_runtime.tier_start import slots_start
from spark_schemas.model import ExpertLayer, ModelShape

GIB = 2**30


@pytest.fixture
def shape() -> ModelShape:
    """16 GiB of experts, 96 KiB of keys and values for a token: the sizes of a model of 30 billion parameters."""
    layers = tuple(
        ExpertLayer(block=block, n_experts=128, top_k=8, expert_bytes=GIB // 4 // 96, tensor_types={"up": "q4_K"})
        for block in range(48)
    )
    return ModelShape(
        fingerprint="mf1-" + "a" * 32,
        sibling="ms1-" + "b" * 32,
        architecture="test",
        n_blocks=48,
        context_length=262144,
        core_bytes=GIB,
        kv_bytes_per_token=96 * 1024,
        layers=layers,
    )


def planner(shape: ModelShape, free_gib: float, *, asked: list[int] | None = None):
    """Plans on one GPU with so much free memory."""
    host = HostMemory(64 * GIB, "made up", 64 * GIB, "made up")
    device = DeviceMemory("GPU", int(free_gib * GIB), int(free_gib * GIB))

    def needs(n_ctx: int, _: int) -> Needs:
        every = tuple(range(len(shape.layers)))
        return Needs((DeviceNeeds(shape.core_bytes, shape.context_bytes(n_ctx), 300 * 2**20, every),))

    def plan_at(n_ctx: int) -> TierPlan:
        if asked is not None:
            asked.append(n_ctx)
        try:
            memory = plan_memory(shape, needs, n_ctx=n_ctx, n_ubatch=512, devices=[device], host=host)
        except Exception as error:
            raise SparkError(str(error)) from error
        start = None if memory.fits_entirely else slots_start(shape, memory.slots)
        return TierPlan(memory, start, 1, memory.devices[0].experts / shape.expert_bytes_total)

    return plan_at


def test_steps():
    assert context_steps(262144) == [8192, 16384, 32768, 65536, 262144]
    assert context_steps(40960) == [8192, 16384, 32768, 40960]
    assert context_steps(8192) == [8192]
    assert context_steps(1024) == [1024]


@pytest.mark.parametrize(
    ("free_gib", "n_ctx", "word"),
    [
        (80, 262144, "every expert still fits"),
        (24, 32768, "every expert still fits"),
        (21, 16384, "every expert still fits"),
        (14, 32768, "of the experts less than with 8192"),
        (6, 16384, "of the experts less than with 8192"),
    ],
)
def test_the_longest_that_costs_little(shape, free_gib, n_ctx, word):
    found, plan, choice = choose_context(shape, planner(shape, free_gib), 64 * GIB)
    assert found == plan.memory.n_ctx == n_ctx
    assert choice.what == "context"
    assert choice.value == f"{n_ctx} tokens"
    assert word in choice.reason


def test_what_fits_entirely_is_never_tiered_for_a_longer_context(shape):
    for free_gib in range(19, 60):
        plan_at = planner(shape, free_gib)
        _, plan, _ = choose_context(shape, plan_at, 64 * GIB)
        assert (plan.start is None) == (plan_at(8192).start is None)


def test_no_more_is_given_up_than_said(shape):
    for free_gib in range(6, 19):
        plan_at = planner(shape, free_gib)
        n_ctx, plan, _ = choose_context(shape, plan_at, 64 * GIB)
        lost = plan_at(8192).resident_share - plan.resident_share
        assert lost <= {8192: 0, 16384: 0.10, 32768: 0.15}.get(n_ctx, 0.03)


def test_what_does_not_fit_at_all_is_refused_at_the_shortest(shape):
    asked: list[int] = []
    with pytest.raises(SparkError, match="needs"):
        choose_context(shape, planner(shape, 3, asked=asked), 64 * GIB)
    assert asked == [8192]


def test_a_model_of_short_texts(shape):
    short = shape.model_copy(update={"context_length": 1024})
    assert choose_context(short, lambda _: None, 0)[2].reason == "as long as the model was trained for"


@pytest.mark.parametrize(("host_gib", "n_ctx"), [(200, 262144), (30, 65536), (13, 32768), (7, 16384), (2, 8192)])
def test_without_a_plan_the_hosts_memory_decides(shape, host_gib, n_ctx):
    found, plan, choice = choose_context(shape, lambda _: None, host_gib * GIB)
    assert (found, plan) == (n_ctx, None)
    assert choice.reason


@pytest.mark.parametrize(("host_gib", "kept"), [(200, 4), (100, 4), (0, 1)])
def test_in_host_memory_conversations_take_a_quarter_of_what_is_free(shape, host_gib, kept):
    found = host_sequences(shape, 32768, host_gib * GIB)
    assert found == kept
    assert found == 1 or found * shape.context_bytes(32768) <= host_gib * GIB / 4
