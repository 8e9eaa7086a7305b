from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest

from spark_agent.forecast import expected_misses, forecast
from spark_agent.measured import Measured, find_benchmark, keep_benchmark, machine_name, measured_of
from spark_agent.paths import benchmarks_dir
from spark_runtime.host_memory import HostMemory
from spark_runtime.memory_plan import DeviceMemory, DeviceNeeds, Needs
from spark_runtime.memory_planner import plan_memory
from spark_runtime.simulator.cost import Machine
from spark_runtime.tier_plan import TierPlan
from spark_runtime.tier_start import slots_start
from spark_schemas.manifest import Expectation

JUDGED = Expectation(cold_hit_rate=0.25, low=0.2, high=0.3, uniform_cold_hit_rate=0.5)
MEASURED = Measured(Machine(0.01, 0.001), 0.1, dt.date(2026, 11, 30))


@pytest.fixture
def shape(make_model):
    return make_model(n_experts=8, top_k=2)


@pytest.fixture
def manifest(make_manifest):
    layer = ((40, 20, 10, 10, 10, 5, 3, 2), 2, 4)
    return make_manifest(layer, layer, expected=JUDGED, n_held_out=12)


def test_nothing_misses_where_everything_is_resident(shape, manifest):
    for slots in (None, (8, 8)):
        misses = expected_misses(shape, slots, manifest)
        assert (misses.basis, misses.cold_hit_rate, misses.cold_hits_per_token) == ("resident", 0.0, 0.0)


def test_without_a_profile_it_is_an_assumption(shape):
    misses = expected_misses(shape, (4, 6), None)
    assert misses.basis == "uniform"
    assert "assuming" in misses.note
    assert misses.cold_hit_rate == pytest.approx((0.5 + 0.25) / 2)
    assert misses.cold_hits_per_token == pytest.approx(2 * 0.5 + 2 * 0.25)
    assert (misses.low, misses.high) == (None, None)


def test_a_manifest_keeps_its_promise_only_for_its_own_slots(shape, manifest):
    own = expected_misses(shape, (4, 4), manifest)
    assert (own.basis, own.cold_hit_rate, own.low, own.high) == ("held_out", 0.25, 0.2, 0.3)
    assert own.cold_hits_per_token == pytest.approx(0.25 * 4)
    assert "12 held-out sessions of chat" in own.note
    other = expected_misses(shape, (6, 4), manifest)
    assert other.basis == "profile"
    assert other.cold_hit_rate == pytest.approx((0.05 + 0.20) / 2)
    unjudged = expected_misses(shape, (4, 4), manifest.model_copy(update={"expected": None}))
    assert unjudged.basis == "profile"
    assert unjudged.cold_hit_rate == pytest.approx(0.20)


def plan_of(shape, slots) -> TierPlan:
    host = HostMemory(2**40, "made up", 2**40, "made up")
    device = DeviceMemory("GPU", 2**32, 2**32)
    needs = Needs((DeviceNeeds(shape.core_bytes, 0, 0, (0, 1)),))
    memory = plan_memory(
        shape, lambda *_: needs, n_ctx=64, n_ubatch=64, devices=[device], host=host, slots=slots, always_tiered=True
    )
    return TierPlan(memory, slots_start(shape, slots), 1, 0.5)


def test_the_speed_comes_from_a_measurement_or_from_nowhere(shape, manifest):
    plan = plan_of(shape, (4, 4))
    unknown = forecast(shape, plan, manifest, None, on_cards=True)
    assert unknown.speed.decode_tok_s is None
    assert unknown.offload.speed.decode_tok_s is None
    assert "spark-agent bench" in unknown.speed.note
    known = forecast(shape, plan, manifest, MEASURED, on_cards=True)
    assert known.speed.decode_tok_s == pytest.approx(1 / (0.01 + 1.0 * 0.001), abs=0.1)
    assert "2026-11-30" in known.speed.note
    assert forecast(shape, None, None, MEASURED, on_cards=True).speed.decode_tok_s == 100.0


def test_experts_that_cannot_be_locked_take_longer(shape, manifest):
    plan = plan_of(shape, (4, 4))
    loose = replace(plan, memory=replace(plan.memory, host=replace(plan.memory.host, pinned=False)))
    machine = Machine(0.01, 0.001, 1e6, pageable_bytes_per_s=1e5)
    measured = Measured(machine, None, dt.date(2026, 11, 30), expert_bytes=100.0)
    locked, slower = (forecast(shape, one, manifest, measured, on_cards=True).speed for one in (plan, loose))
    assert locked.decode_tok_s == pytest.approx(1 / (0.01 + 0.001 + 100 / 1e6), abs=0.1)
    assert slower.decode_tok_s == pytest.approx(1 / (0.01 + 0.001 + 100 / 1e5), abs=0.1)
    assert "not locked" in slower.note
    assert forecast(shape, loose, manifest, measured, on_cards=False).speed == locked
    unknown = forecast(shape, loose, manifest, MEASURED, on_cards=True).speed
    assert unknown.decode_tok_s is None
    assert "not locked" in unknown.note


def test_llama_cpp_gets_the_same_memory(shape):
    plan = plan_of(shape, (4, 4))
    found = forecast(shape, plan, None, MEASURED, on_cards=True).offload
    # Nearly 4 GiB are free here, and all experts are 1,600 bytes.
    assert (found.n_cpu_moe, found.blocks, found.blocks_on_gpu, found.resident_share) == (0, 2, 2, 1.0)
    assert found.speed.decode_tok_s == 100.0
    assert forecast(shape, plan, None, MEASURED, on_cards=False).offload is None
    assert forecast(shape, plan, None, None, on_cards=True).as_json()["llama_cpp"]["flags"].endswith("--n-cpu-moe 0")
    assert MEASURED.offload_tok_s(0.5) == pytest.approx(1 / 0.06)


ROWS = [
    {"config": "all-gpu", "residency": 1.0, "decode_tok_s": 100.0, "cold_hits_per_token": None},
    {"config": "calibrated", "residency": 0.5, "decode_tok_s": 50.0, "cold_hits_per_token": 10.0},
    {"config": "llama-offload", "residency": 0.5, "decode_tok_s": 20.0, "cold_hits_per_token": None},
    {"config": "uniform", "residency": 0.5, "decode_tok_s": None, "cold_hits_per_token": None},
]


def test_figures_of_a_benchmark():
    found = measured_of({"rows": ROWS, "day": "2026-11-30"})
    assert found.machine.token_s == pytest.approx(0.01)
    assert found.tiered_tok_s(10.0) == pytest.approx(50.0)
    assert found.offload_tok_s(0.5) == pytest.approx(20.0)
    assert measured_of({"rows": ROWS[:2], "day": "2026-11-30"}).offload_tok_s(0.5) is None


def test_figures_of_a_benchmark_with_its_link():
    link = {"device": "gpu", "bytes_per_s": 1e9, "latency_s": 1e-5, "pageable_bytes_per_s": 2e8}
    value = {"rows": ROWS, "day": "2026-11-30", "expert_bytes": 1e5, "machine": {"n_layers": 2, "link": link}}
    found = measured_of(value)
    assert found.tiered_tok_s(10.0) == pytest.approx(50.0)
    assert found.tiered_tok_s(10.0, 1.0) == pytest.approx(1 / (1 / 50 + 10 * 1e5 * (1 / 2e8 - 1 / 1e9)))
    assert found.tiered_tok_s(0.0, 1.0) == pytest.approx(100.0)
    assert measured_of({"rows": ROWS, "day": "2026-11-30"}).tiered_tok_s(10.0, 1.0) is None


def test_a_benchmark_is_kept_for_its_model_and_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = machine_name()
    assert name
    path = keep_benchmark({"fingerprint": "mf1-x", "rows": ROWS}, name)
    assert path.parent == benchmarks_dir()
    assert find_benchmark("mf1-x", name).machine.token_s == pytest.approx(0.01)
    assert find_benchmark("mf1-y", name) is None
    assert find_benchmark("mf1-x", "another GPU") is None


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"rows": [5]}', '{"rows": [{"decode_tok_s": -1}]}', '{"rows": [], "day": "x"}', '{"rows": {}}'],
)
def test_a_damaged_benchmark_is_as_none(monkeypatch, tmp_path, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_benchmark({"fingerprint": "mf1-x", "rows": ROWS}, "m").write_text(content)
    assert find_benchmark("mf1-x", "m") is None


def test_no_figures_without_a_resident_row_or_a_miss():
    with pytest.raises(ValueError, match="resident"):
        measured_of({"rows": ROWS[1:], "day": "2026-11-30"})
    with pytest.raises(ValueError, match="copied"):
        measured_of({"rows": ROWS[:1], "day": "2026-11-30"})
