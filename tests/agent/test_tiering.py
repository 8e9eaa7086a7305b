from __future__ import annotations

import pytest

from spark_agent.errors import SparkError, UsageError
from spark_agent.tiering import TierOptions, plan_for, plan_table, planned_options, tiers_of
from spark_runtime.gguf_file import read_gguf
from spark_runtime.model_shape import shape_of
from spark_runtime.models import demo_model_path
from spark_runtime.tier_plan import cards

N_CTX = 512


@pytest.fixture(scope="module")
def model():
    return read_gguf(demo_model_path())


@pytest.fixture(scope="module")
def shape(model):
    return shape_of(model)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"vram": "1G", "residency": 0.5}, "--vram and --residency"),
        ({"no_tier": True, "residency": 0.5}, "--no-tier"),
        ({"no_tier": True, "pinned_share": 0.5}, "--no-tier"),
        ({"pinned_share": 0.5}, "--pinned-share"),
        ({"residency": 0.0}, "--residency"),
        ({"residency": 1.1}, "--residency"),
        ({"residency": float("nan")}, "--residency"),
        ({"vram": "much"}, "--vram: found"),
        ({"vram": "0"}, "--vram"),
    ],
)
def test_options_that_make_no_sense(options, word):
    with pytest.raises(UsageError, match=word):
        TierOptions(**options).check(None)


def test_a_machine_without_a_gpu_tiers_only_when_asked(model, shape):
    if cards():
        pytest.skip("this machine has a GPU")
    assert plan_for(model, shape, TierOptions(), None, N_CTX) is None
    assert plan_for(model, shape, TierOptions(no_tier=True), None, N_CTX) is None
    whole = plan_for(model, shape, TierOptions(), None, N_CTX, always=True)
    assert whole is not None
    assert whole.start is None
    asked = plan_for(model, shape, TierOptions(residency=0.5), None, N_CTX)
    assert asked is not None
    assert asked.start is not None


def test_the_table_and_the_object_have_every_byte(model, shape):
    plan = plan_for(model, shape, TierOptions(residency=0.5), None, N_CTX)
    text = plan_table(plan)
    assert "experts in slots" in text
    assert f"{plan.start.slots} of 256 experts in slots (50.0%), prompts in batches of 512 tokens" in text
    tiers = tiers_of(shape, N_CTX, plan, None, on_gpu=False)
    assert [(row["tier"], row["what"], row["bytes"]) for row in tiers["plan"]] == plan.memory.rows()
    assert (tiers["tiered"], tiers["slots"], tiers["engine"]) == (True, plan.start.slots, None)
    assert tiers["expert_bytes"] == shape.expert_bytes_total


def test_serving_asks_for_one_row_of_logits(model, shape):
    plan = plan_for(model, shape, TierOptions(residency=0.5, ubatch=128), None, N_CTX)
    options = planned_options(plan, TierOptions(), N_CTX, 1)
    assert (options.n_outputs_max, options.n_ubatch, options.n_batch) == (1, 128, 512)
    assert options.tier is plan.start
    untiered = planned_options(None, TierOptions(ubatch=64), N_CTX, 1)
    assert (untiered.n_ubatch, untiered.tier) == (64, None)


def test_a_refusal_names_the_options_that_fit(model, shape):
    with pytest.raises(SparkError, match="needs") as refused:
        plan_for(model, shape, TierOptions(vram="8M", devices=1), None, N_CTX)
    hint = refused.value.hint
    assert "--ubatch" in hint
    needed = hint.split("--vram ")[1].rstrip(")")
    assert plan_for(model, shape, TierOptions(vram=needed, devices=1), None, N_CTX).start is not None
    with pytest.raises(SparkError) as refused:
        plan_for(model, shape, TierOptions(vram="8M", devices=2), None, N_CTX)
    assert "--vram" not in refused.value.hint, "what one device lacks is no budget for two"


def test_too_many_slots_are_refused_with_as_many_as_fit(model, shape, monkeypatch):
    from spark_runtime import tier_plan
    from spark_runtime.host_memory import HostMemory

    host = HostMemory(2**30, "made up", 0, "made up")
    monkeypatch.setattr(tier_plan, "probe_host", lambda: host)
    # As where the free memory of a GPU is the limit.
    monkeypatch.setattr(TierOptions, "budget_bytes", 14 * 2**20)
    with pytest.raises(SparkError, match="215 slots") as refused:
        plan_for(model, shape, TierOptions(residency=0.84), None, N_CTX)
    residency = float(refused.value.hint.split("--residency ")[1].split(")")[0])
    assert 0.25 < residency < 0.84
    assert plan_for(model, shape, TierOptions(residency=residency), None, N_CTX).start is not None


@pytest.mark.parametrize("asked", [True, False])
def test_without_a_compiler_only_what_was_asked_for_is_refused(model, shape, monkeypatch, asked):
    from spark_runtime import tier_plan
    from spark_runtime.devices import registered_devices
    from spark_runtime.errors import InstallationError

    def refuse(*_):
        raise InstallationError("no C++ compiler")

    monkeypatch.setattr(tier_plan, "plan_tiers", refuse)
    monkeypatch.setattr(tier_plan, "cards", lambda: registered_devices())
    options = TierOptions(residency=0.5) if asked else TierOptions()
    if asked:
        with pytest.raises(InstallationError):
            plan_for(model, shape, options, None, N_CTX)
    else:
        assert plan_for(model, shape, options, None, N_CTX).start is None
