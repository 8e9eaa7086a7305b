"""``spark simulate``, ``import`` and ``export`` as a person types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_agent.trace_files import SessionTrace
from spark_agent.traces import TraceFolder
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.placement import LayerSizes
from spark_runtime.session_counts import SessionCounts
from spark_runtime.simulator.study import equal_slots
from spark_runtime.slot_pool import SlotPool
from spark_runtime.tier_start import slots_start
from spark_schemas.histogram import HistogramUpload
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

KEYS = {"policy", "slots", "cold_hit_rate", "predicted_tok_s"}
BENCH = {
    "expert_bytes": 20_000.0,
    "rows": [
        {"config": "all-gpu", "decode_tok_s": 100.0, "cold_hits_per_token": None},
        {"config": "uniform", "decode_tok_s": 50.0, "cold_hits_per_token": 10.0},
        {"config": "llama-offload", "decode_tok_s": None, "cold_hits_per_token": None},
    ],
}


@pytest.fixture(scope="session")
def shape() -> ModelShape:
    return read_model_shape(demo_model_path())


def session(shape: ModelShape, number: int, workload: str, prefill: int = 20, decode: int = 30) -> SessionTrace:
    random = np.random.default_rng(number)
    ids = []
    for layer in shape.layers:
        taste = np.random.default_rng(len(workload)).gumbel(size=layer.n_experts)
        noise = random.gumbel(size=(prefill + decode, layer.n_experts))
        ids.append(np.argsort(-(taste + noise), axis=1)[:, : layer.top_k])
    ids[-1][:prefill] = -1
    return SessionTrace(f"{number:064x}", workload, ids, np.arange(prefill + decode) >= prefill)


@pytest.fixture
def sessions(shape: ModelShape) -> list[SessionTrace]:
    """Twenty of two workloads, on both sides of the split."""
    found = [session(shape, number, "code" if number % 2 else "chatting") for number in range(20)]
    sides = {(item.workload, split_of(item.session_hash)) for item in found}
    assert len(sides) == 4
    return found


@pytest.fixture
def traces(tmp_path: Path, shape: ModelShape, sessions: list[SessionTrace]) -> Path:
    folder = tmp_path / "traces"
    with TraceFolder(folder, shape) as opened:
        for item in sessions:
            opened.add(item)
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(BENCH))
    return path


def test_every_policy_of_a_trace(spark_cli, traces, machine):
    report = spark_cli("simulate", traces, "--residency", 0.6, "--machine", machine, "--json").json
    assert (report["source"], report["imported_from"]) == ("trace", None)
    assert report["n_sessions"] + report["n_calibration"] == 20
    rows = report["rows"]
    assert all(row.keys() >= KEYS for row in rows)
    assert {row["policy"] for row in rows} == {
        "uniform", "static", "oracle", "lru", "lru_unprotected", "lru_pinned", "lfu", "scored", "belady"
    }  # fmt: skip
    assert {row["profile"] for row in rows} == {"none", "own", "held-out"}
    for row in rows:
        expected = 1 / (0.01 + row["loads_per_token"] * 0.001)
        assert row["predicted_tok_s"] == pytest.approx(expected, abs=0.01)
        assert [part["first"] for part in row["parts"]] == [0, 64, 256]
        assert row["low"] <= row["cold_hit_rate"] <= row["high"]


def test_the_scored_policy_is_what_the_slots_do(spark_cli, traces, shape, sessions):
    """A whole session, prompt first, through the native slots: the same cold hits."""
    arguments = ("--policy", "scored", "--sharing", "pool", "--profile", "none", "--residency", 0.6, "--ubatch", 7)
    rows = spark_cli("simulate", traces, *arguments, "--phase", "both", "--json").json["rows"]
    # The last layer did not route every token of the prompts: it is left out, here as there.
    layers = shape.layers[:-1]
    part = shape.model_copy(update={"layers": layers})
    sizes = [LayerSizes(layer.n_experts, layer.top_k, layer.expert_bytes) for layer in layers]
    rates = []
    for item in sessions:
        if split_of(item.session_hash) != "held_out":
            continue
        trace = type("Trace", (), {})()
        trace.expert_bytes = [size.expert_bytes for size in sizes]
        trace.ids, trace.n_experts = item.ids[:-1], [size.n_experts for size in sizes]
        pool = SlotPool(slots_start(part, equal_slots(trace, 0.6)))
        for start in range(0, 20, 7):
            pool.step([ids[start : min(start + 7, 20)] for ids in trace.ids], "prefill")
        for token in range(20, 50):
            pool.step([ids[token : token + 1] for ids in trace.ids], "decode")
        counted = [pool.counts(layer, phase) for layer in range(len(layers)) for phase in ("prefill", "decode")]
        rates.append(sum(count.cold for count in counted) / sum(count.selections.sum() for count in counted))
    assert len({layer.expert_bytes for layer in layers}) == 1
    assert rows[0]["cold_hit_rate"] == pytest.approx(np.mean(rates))


def test_another_models_figures_are_said(spark_cli, traces, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(BENCH | {"fingerprint": "mf1-" + "0" * 32, "expert_bytes": 2e6}))
    arguments = ("simulate", traces, "--policy", "uniform", "--machine", path)
    notes = spark_cli(*arguments, "--json").json["notes"]
    assert any("another model" in note for note in notes)
    assert any("experts of 2000000 bytes" in note for note in notes)
    given = spark_cli(*arguments, "--token-ms", 3, "--json").json["notes"]
    assert not any("another model" in note for note in given)


def test_phases_workloads_and_batches(spark_cli, traces):
    prefill = spark_cli("simulate", traces, "--phase", "prefill", "--residency", 0.6, "--json").json
    assert any("not every token was routed" in note for note in prefill["notes"])
    assert any("one token at a time" in note for note in prefill["notes"])
    assert {row["phase"] for row in prefill["rows"]} == {"prefill"}
    batched = spark_cli("simulate", traces, "--batch", 4, "--policy", "scored", "--residency", 0.6, "--json").json
    assert all(row["loads_per_token"] < row["cold_hits_per_token"] for row in batched["rows"])
    one = spark_cli("simulate", traces, "--workload", "code", "--policy", "static", "--profile", "own", "--json").json
    assert one["n_sessions"] < prefill["n_sessions"]


def test_people_read_a_table(spark_cli, traces, machine):
    result = spark_cli("simulate", traces, "--policy", "scored", "--machine", machine, "--tune", "--residency", 0.6)
    assert result.code == 0
    assert result.out.splitlines()[0].split()[:2] == ["policy", "slots"]
    assert "scored_tuned" in result.out
    assert "tuned at 60%" in result.err


def test_histograms_give_what_counts_can_say(spark_cli, tmp_path, shape, sessions):
    uploaded = []
    for item in sessions:
        counted = SessionCounts(shape)
        prompt, answer = ~item.decode, item.decode
        counted.add("prefill", 20, [*(ids[prompt] for ids in item.ids[:-1]), item.ids[-1][:0]])
        counted.add("decode", 30, [ids[answer] for ids in item.ids])
        uploaded.append(counted.to_histogram(item.session_hash, item.workload))
    upload = HistogramUpload(agent_version="1", model=shape, sessions=tuple(uploaded))
    path = tmp_path / "shown.json"
    path.write_text(upload.model_dump_json() + "\n")
    report = spark_cli(
        "simulate", path, "--profile", "own", "--profile", "mixed", "--profile", "foreign", "--json"
    ).json
    assert report["source"] == "histograms"
    assert {(row["policy"], row["profile"]) for row in report["rows"]} == {
        ("uniform", "none"), ("static", "own"), ("static", "mixed"), ("static", "foreign"), ("oracle", "held-out"),
        ("lru", "none"),
    }  # fmt: skip
    spark_cli("simulate", path, "--policy", "belady").failed(1, "need the order", hint=True)


def test_histograms_and_traces_agree(spark_cli, tmp_path, traces, shape, sessions):
    """Static placement by counts and by replay: the same rate."""
    by_trace = spark_cli(
        "simulate", traces, "--policy", "static", "--policy", "uniform", "--profile", "own", "--json"
    ).json
    uploaded = []
    for item in sessions:
        counted = SessionCounts(shape)
        counted.add("decode", 30, [ids[item.decode] for ids in item.ids])
        uploaded.append(counted.to_histogram(item.session_hash, item.workload))
    path = tmp_path / "shown.json"
    path.write_text(HistogramUpload(agent_version="1", model=shape, sessions=tuple(uploaded)).model_dump_json())
    by_counts = spark_cli(
        "simulate", path, "--policy", "static", "--policy", "uniform", "--profile", "own", "--json"
    ).json
    for one, other in zip(by_trace["rows"], by_counts["rows"], strict=True):
        assert (one["policy"], one["slots"]) == (other["policy"], other["slots"])
        assert one["cold_hit_rate"] == pytest.approx(other["cold_hit_rate"])


def imported(spark_cli: Any, tmp_path: Path, shape: ModelShape) -> Path:
    rows = [list(range(1, layer.n_experts + 1)) for layer in shape.layers]
    source = tmp_path / "profile.json"
    source.write_text(json.dumps({"model": "demo", "expert_counts": rows}))
    path = tmp_path / "imported.json"
    report = spark_cli(
        "import", "freetoken", source, "--workload", "chat", "--model", demo_model_path(), "--output", path, "--json"
    ).json
    assert report["imported"] is True
    assert report["fingerprint"] == shape.fingerprint
    assert {"histograms", "warnings"} <= report.keys()
    return path


def test_what_is_imported_is_marked(spark_cli, tmp_path, shape, traces):
    path = imported(spark_cli, tmp_path, shape)
    report = spark_cli("simulate", path, "--json").json
    assert report["imported_from"] == "freetoken"
    assert {row["policy"] for row in report["rows"]} == {"uniform", "oracle"}
    assert all(row["imported"] and row["low"] is None and not row["n_sessions"] for row in report["rows"])
    assert any("nothing of other sessions" in note for note in report["notes"])
    given = spark_cli("simulate", traces, "--policy", "static", "--profile", path, "--json").json
    assert {row["profile"] for row in given["rows"]} == {"given"}


def test_exports(spark_cli, tmp_path, shape):
    path = imported(spark_cli, tmp_path, shape)
    back = tmp_path / "back.json"
    report = spark_cli("export", "freetoken", "--profile", path, "--output", back, "--json").json
    assert report["bytes"] == back.stat().st_size
    assert (
        json.loads(back.read_text())["expert_counts"]
        == json.loads((tmp_path / "profile.json").read_text())["expert_counts"]
    )
    printed = spark_cli("export", "fitz", "--profile", path, "--residency", 0.5)
    assert printed.out.startswith("# EXPERT_CACHE_PIN_LIST v1\n")
    flags = spark_cli("export", "llama-cpp", "--model", demo_model_path(), "--residency", 0.5)
    assert "--n-cpu-moe" in flags.out
    assert "exps=CPU" in flags.out


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--policy", "magic"], 2, "--policy"),
        (["--sharing", "all"], 2, "--sharing"),
        (["--residency", "0"], 2, "--residency"),
        (["--positions", "64,64"], 2, "--positions"),
        (["--positions", "x"], 2, "--positions"),
        (["--phase", "both?"], 2, "--phase"),
        (["--profile", "a.json", "--profile", "b.json"], 2, "at most one file"),
        (["--profile", "absent.json"], 1, "absent.json"),
        (["--workload", "law"], 1, "no session of law"),
        (["--link", "25GB"], 2, "nothing says what a token takes"),
        (["--token-ms", "5"], 2, "nothing says what a miss takes"),
        (["--machine", "absent.json"], 1, "absent.json"),
        (["--plot", "curve.pdf"], 2, "--plot"),
        (["--pageable", "1.5"], 2, "--pageable"),
        (["--pageable", "0.5"], 2, "--pageable needs a machine's figures"),
        (["--pageable", "0.5", "--token-ms", "2", "--miss-us", "5"], 2, "not locked"),
        (["--pageable", "0.5", "--token-ms", "2", "--link", "1GB"], 2, "not locked"),
        (["--pageable", "0.5", "--token-ms", "2", "--miss-us", "5", "--pageable-link", "1GB"], 2, "not locked"),
    ],
)
def test_what_cannot_be_asked(spark_cli, traces, arguments, code, word):
    spark_cli("simulate", traces, *arguments).failed(code, word, hint=False)


@pytest.mark.parametrize("content", ["", "text", "{}", '{"imported": true}', "[1]", "PAR1"])
def test_other_inputs_are_refused(spark_cli, tmp_path, content):
    path = tmp_path / "input"
    path.write_text(content)
    spark_cli("simulate", path).failed(1, "input")
    spark_cli("simulate", tmp_path / "absent").failed(1, "absent")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"token_s": -1, "miss_s": 1}', '{"token_s": "1", "miss_s": 1}', '{"rows": []}', '{"rows": 1}',
     '{"rows": [1]}',
     '{"rows": [{"config": "all-gpu", "decode_tok_s": 5}]}'],
)  # fmt: skip
def test_machines_that_are_none(spark_cli, traces, tmp_path, content):
    path = tmp_path / "machine.json"
    path.write_text(content)
    result = spark_cli("simulate", traces, "--machine", path)
    assert result.code in {1, 2}
    assert "error: " in result.err


def test_a_machine_by_its_figures(spark_cli, traces, shape):
    arguments = ("--policy", "scored", "--profile", "none", "--sharing", "pool", "--residency", 0.6)
    rows = spark_cli("simulate", traces, *arguments, "--token-ms", 2, "--miss-us", 10, "--link", "1GB", "--json").json[
        "rows"
    ]
    expert_bytes = shape.layers[0].expert_bytes
    expected = 1 / (0.002 + rows[0]["loads_per_token"] * (10e-6 + expert_bytes / 1e9))
    assert rows[0]["predicted_tok_s"] == pytest.approx(expected, rel=0.01)


def test_memory_that_is_not_locked(spark_cli, traces, tmp_path, shape):
    """As it was measured, or as it is given; of prompts too."""
    path = tmp_path / "machine.json"
    link = {"device": "gpu", "bytes_per_s": 1e9, "latency_s": 1e-5, "pageable_bytes_per_s": 2e8}
    path.write_text(json.dumps(BENCH | {"machine": {"n_layers": 4, "link": link}, "expert_bytes": 27648.0}))
    arguments = ("simulate", traces, "--policy", "scored", "--profile", "none", "--sharing", "pool", "--residency", 0.6)
    expert_bytes = shape.layers[0].expert_bytes

    def took(*more: Any) -> tuple[float, float]:
        [row] = spark_cli(*arguments, *more, "--json").json["rows"]
        return 1 / row["predicted_tok_s"], row["loads_per_token"]

    locked, loads = took("--machine", path)
    half, _ = took("--machine", path, "--pageable", 0.5)
    assert half - locked == pytest.approx(0.5 * loads * expert_bytes * (1 / 2e8 - 1 / 1e9), rel=0.01)
    given, _ = took("--token-ms", 2, "--link", "1GB", "--pageable-link", "100MB", "--pageable", 1)
    assert given == pytest.approx(0.002 + loads * expert_bytes / 1e8, rel=0.01)
    prompts = spark_cli(
        "simulate", traces, "--policy", "uniform", "--phase", "prefill", "--machine", path, "--pageable", 1, "--json"
    ).json["rows"]
    # The benchmark of this test has no prompt in it.
    assert {row["predicted_tok_s"] for row in prompts} == {None}


def test_copies_that_were_measured_from_memory_that_is_not_locked(spark_cli, traces, tmp_path, shape):
    """What such a run took longer is not taken for the time of a miss."""
    link = {"device": "gpu", "bytes_per_s": 1e9, "latency_s": 1e-5, "pageable_bytes_per_s": 2e8}
    expert_bytes = float(shape.layers[0].expert_bytes)
    miss_s = 3e-4 + expert_bytes / 2e8
    rows = [BENCH["rows"][0]]
    for missed in (10.0, 20.0):
        measured = {"decode_tok_s": 1 / (0.01 + missed * miss_s), "cold_hits_per_token": missed}
        rows.append({"config": "uniform", **measured, "pageable_share": 1.0})
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"expert_bytes": expert_bytes, "rows": rows, "machine": {"n_layers": 4, "link": link}}))
    arguments = ("--policy", "scored", "--profile", "none", "--sharing", "pool", "--residency", 0.6, "--machine", path)
    [row] = spark_cli("simulate", traces, *arguments, "--json").json["rows"]
    expected = 1 / (0.01 + row["loads_per_token"] * (3e-4 + expert_bytes / 1e9))
    assert row["predicted_tok_s"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot(spark_cli, traces, machine, tmp_path, suffix):
    path = tmp_path / f"curve.{suffix}"
    spark_cli(
        "simulate", traces, "--policy", "scored", "--policy", "static", "--machine", machine, "--plot", path, "--json"
    )
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["import", "gguf", "x.csv", "--workload", "chat"], 2, "expected one of"),
        (["import", "lucebox-csv", "x.csv", "--workload", "No Good"], 2, "--workload"),
        (["import", "lucebox-csv", "x.csv", "--workload", "chat"], 1, "no such file"),
        (["export", "fitz"], 2, "--profile"),
        (["export", "fitz", "--profile", "chat"], 2, "--model"),
        (["export", "fitz", "--profile", "absent.json"], 2, "absent.json"),
        (["export", "fitz", "--profile", "a.json", "--json"], 2, "--output"),
        (["export", "fitz", "--profile", "a.json", "--vram", "1G", "--residency", "0.5"], 2, "pass one"),
    ],
)
def test_imports_and_exports_that_cannot_be(spark_cli, arguments, code, word):
    spark_cli(*arguments).failed(code, word, hint=False)
