from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest

from spark_agent.forecast import expected_misses, forecast
from spark_agent.measured import EarlyEffect, Measured, find_benchmark, keep_benchmark, machine_name, measured_of
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


def test_experts_fetched_early_are_expected_to_save_what_was_measured(shape, manifest):
    plan = plan_of(shape, (4, 4))
    machine = Machine(0.01, 0.001, n_layers=2, guess_s=0.0045)
    early = EarlyEffect(saved_share=0.25, fetched_per_cold_hit=0.5)
    measured = Measured(machine, None, dt.date(2026, 11, 30), early=early)
    off = forecast(shape, plan, manifest, measured, on_cards=True).speed
    found = forecast(shape, plan, manifest, measured, on_cards=True, prefetched=True).speed
    assert off.decode_tok_s == pytest.approx(1 / 0.011, abs=0.1)
    # Of 1 cold hit .75 are left; each of .5 early copies is waited for 4.5 + 1 - 5 ms.
    assert found.decode_tok_s == pytest.approx(1 / (0.01 + 0.75 * 0.001 + 0.5 * 0.0005), abs=0.1)
    assert "fetching early saved 25% of the cold hits" in found.note
    assert "early" not in off.note
    # No more than one of each layer but the first.
    assert measured.tiered_tok_s(8.0, prefetched=True) == pytest.approx(1 / (0.01 + 6 * 0.001 + 0.0005))
    unknown = forecast(shape, plan, manifest, MEASURED, on_cards=True, prefetched=True).speed
    assert unknown.decode_tok_s == forecast(shape, plan, manifest, MEASURED, on_cards=True).speed.decode_tok_s
    assert "fetched nothing early" in unknown.note
    assert "early" not in forecast(shape, None, None, measured, on_cards=True, prefetched=True).speed.note


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


def test_a_benchmark_says_what_fetching_early_saved():
    """And what passes until a copy begins: of one of 1.1 ms, .3 ms were not hidden beside a layer of 1 ms."""
    machine = {"n_layers": 10, "link": {"device": "gpu", "bytes_per_s": 1e9, "latency_s": 1e-4}}
    tok_s = {True: 1 / (0.01 + 8 * 1.1e-3 + 2 * 3e-4), False: 1 / (0.01 + 10 * 1.1e-3)}
    rows = [
        {"config": "all-gpu", "residency": 1.0, "decode_tok_s": 100.0},
        {"config": "calibrated+ring", "residency": 0.5, "ring": 1.0, "decode_tok_s": tok_s[False],
         "cold_hits_per_token": 10.0},
        {"config": "calibrated+prefetch", "residency": 0.5, "ring": 1.0, "decode_tok_s": tok_s[True],
         "cold_hits_per_token": 8.0, "early_per_token": 2.0},
    ]  # fmt: skip
    value = {"rows": rows, "day": "2026-11-30", "expert_bytes": 1e6, "machine": machine}
    found = measured_of(value)
    assert found.early == EarlyEffect(pytest.approx(0.2), pytest.approx(0.2))
    assert found.tiered_tok_s(10.0) == pytest.approx(tok_s[False])
    assert found.tiered_tok_s(10.0, prefetched=True) == pytest.approx(tok_s[True], rel=1e-4)
    on_host = measured_of({**value, "machine": {**machine, "link": {**machine["link"], "device": "cpu"}}})
    assert found.machine.guess_s == pytest.approx(2e-4, rel=1e-2)
    assert on_host.machine.guess_token_s == pytest.approx(4e-4)
    assert on_host.tiered_tok_s(10.0, prefetched=True) == pytest.approx(tok_s[True], rel=1e-4)
    # Without the layers' number nothing says what hides a copy.
    assert measured_of({"rows": rows, "day": "2026-11-30"}).early is None
    assert measured_of({**value, "rows": rows[:2]}).early is None


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
