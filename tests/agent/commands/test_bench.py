"""The published tables on the demo model: the same bits everywhere, true memory, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from spark_agent.benchmark import Benchmark, Row, Workload, identical_output
from spark_agent.commands.bench import _prefetch_line
from spark_agent.errors import UsageError
from spark_agent.paths import state_dir
from spark_agent.prefetching import Paying, Prefetch
from spark_runtime.errors import PlanError
from spark_runtime.gguf_file import read_gguf
from spark_runtime.model_shape import read_model_shape, shape_of
from spark_runtime.models import demo_model_path
from spark_runtime.tier_plan import cards

LONG = ("--tokens", "500", *(word for share in range(10, 100, 5) for word in ("--residency", f"0.{share}")))
"""Half a minute and more, however fast the machine is."""
QUICK = ("--threads", "1", "--prompt", "40", "--tokens", "24", "--prefill", "64", "--calibration", "30")
KEYS = [
    "config",
    "residency",
    "slots",
    "decode_tok_s",
    "prefill_tok_s",
    "share_of_all_gpu",
    "cold_hits_per_token",
    "cold_hit_rate",
    "vram_bytes",
    "logits_sha256",
]


@pytest.fixture
def quick() -> Benchmark:
    model = read_gguf(demo_model_path())
    shape = shape_of(model)
    return Benchmark(model, shape, Workload.within(shape, 40, 24, 64, 30), (0.5,), (1.0,), threads=1)


def test_the_table(agent_cli):
    value = agent_cli("bench", "--json", *QUICK).json
    rows = value["rows"]
    configurations = ["uniform", "calibrated", *["calibrated+ring"] * 3, "llama-offload"]
    assert [row["config"] for row in rows] == ["all-gpu", *configurations, *configurations]
    assert [row["residency"] for row in rows] == [1.0, *[0.6] * 6, *[0.31] * 6]
    assert value["identical_output"] is True
    assert value["device"] == ("gpu" if cards() else "cpu")
    assert (value["note"] is None) == bool(cards())
    for row in rows:
        assert set(KEYS) <= set(row)
        assert row["reason"] is None
        assert row["decode_tok_s"] > 0
        assert row["prefill_tok_s"] > 0
        assert row["logits_sha256"] == rows[0]["logits_sha256"]
        assert row["vram_bytes"] > 0
        tiered = row["config"] not in {"all-gpu", "llama-offload"}
        assert (row["slots"] is not None) == (row["cold_hit_rate"] is not None) == tiered
        if row["planned_bytes"] is not None and not cards():
            assert abs(row["difference_percent"]) < 3, row
    assert rows[0]["share_of_all_gpu"] == 1.0
    cold = {(row["config"], row["residency"]): row["cold_hit_rate"] for row in rows}
    assert cold["uniform", 0.31] > cold["uniform", 0.6] > 0
    assert [row["ring"] for row in rows if row["residency"] == 0.6] == [None, None, 0.25, 0.5, 1.0, None]


def test_a_person_reads_a_table(agent_cli):
    result = agent_cli("bench", *QUICK, "--residency", "0.5", "--ring", "1")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split()[:3] == ["config", "residency", "slots"]
    assert len(lines) == 6
    assert "calibrated+ring 100%" in result.out
    assert cards() or "speeds show no gain" in result.err


def test_an_imported_profile_gives_the_profile(agent_cli, spark_cli, tmp_path):
    """In the place of counting: what it says at the start, and which experts it keeps."""
    shape = read_model_shape(demo_model_path())
    source, path = tmp_path / "counts.json", tmp_path / "imported.json"
    source.write_text(
        json.dumps({"model": "m", "expert_counts": [[*range(layer.n_experts)] for layer in shape.layers]})
    )
    arguments = ("--workload", "chat", "--model", demo_model_path(), "--output", path)
    assert spark_cli("import", "freetoken", source, *arguments).code == 0
    result = agent_cli("bench", "--json", *QUICK, "--residency", "0.5", "--ring", "0.5", "--manifest", path)
    value = result.json
    assert value["profile"] == {"source": "imported", "workload": "chat", "format": "freetoken"}
    assert value["tokens"]["calibration"] == 0
    assert "imported from freetoken, not measured here" in result.err
    cold = {row["config"]: row["cold_hit_rate"] for row in value["rows"] if row["cold_hit_rate"] is not None}
    assert cold["uniform"] != cold["calibrated"]
    agent_cli("bench", *QUICK, "--manifest", source).failed(1, "another tool's file", "spark import freetoken")


def test_a_manifest_gives_the_profile(agent_cli, make_manifest, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(make_manifest(read_model_shape(demo_model_path())).model_dump_json())
    value = agent_cli("bench", "--json", *QUICK, "--residency", "0.5", "--ring", "0.5", "--manifest", path).json
    assert value["tokens"]["calibration"] == 0
    assert value["identical_output"] is True
    agent_cli("bench", *QUICK, "--manifest", "absent").failed(1, "'absent'", "pull-profile")
    path.write_text(path.read_text().replace("mf1-", "mf1-0", 1))
    agent_cli("bench", *QUICK, "--manifest", path).failed(1, "manifest.json")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--residency", "0"], "--residency"),
        (["--residency", "60"], "--residency"),
        (["--ring", "nan"], "--ring"),
        (["--tokens", "16"], "--tokens"),
        (["--tokens", "1024"], "--tokens"),
        (["--threads", "513"], "--threads"),
        (["--bogus"], "--bogus"),
    ],
)
def test_wrong_command_lines(agent_cli, arguments, word):
    agent_cli("bench", *arguments).failed(2, word)


@pytest.mark.parametrize("fault", ["missing", "folder", "not_gguf", "truncated", "dense", "unknown_architecture"])
def test_a_file_that_is_no_usable_model(agent_cli, broken_model, fault):
    agent_cli("bench", broken_model(fault), *QUICK).failed(1, fault)
    assert not state_dir().exists()


def test_lengths_are_cut_to_the_model(quick):
    shape = quick.shape
    assert Workload.within(shape, 512, 144, 4096, 512) == Workload(512, 144, 1024, 512, 1024)
    assert Workload.within(shape, 5000, 1000, 10, 512) == Workload(24, 1000, 10, 512, 1024)
    with pytest.raises(UsageError, match="17 to 1023"):
        Workload.within(shape, 1, 16, 1, 1)


@pytest.mark.parametrize(
    ("digests", "identical"),
    [
        ("aaaz", True),
        ("aabz", False),
        ("baaz", False),
        ("-abz", False),
        ("-aaz", None),
        ("a--z", None),
        ("a-aa", True),
        ("----", None),
    ],
)
def test_identical_means_tiers_against_every_expert_resident(digests, identical):
    """Never llama.cpp's offload, whose CPU rounds differently than a GPU; and never nothing at all."""
    rows = [Row("all-gpu", 1.0), Row("uniform", 0.5), Row("calibrated", 0.5), Row("llama-offload", 0.5)]
    for row, digest in zip(rows, digests, strict=True):
        row.logits_sha256 = None if digest == "-" else digest
    assert identical_output(rows) is identical


def test_without_any_tiered_row_it_fails(agent_cli):
    """What ran is shown, and why the rest did not."""
    result = agent_cli("bench", "--json", *QUICK, "--residency", "0.5", "--ring", "1", "--devices", "99")
    assert result.code == 1
    value = json.loads(result.out)
    assert value["identical_output"] is None
    assert {row["reason"] is None for row in value["rows"] if row["config"] in {"uniform", "calibrated"}} == {False}


def test_what_does_not_fit_says_so(quick, monkeypatch):
    def refuse(*_):
        raise PlanError("it does not fit")

    monkeypatch.setattr("spark_agent.benchmark.plan_untiered", refuse)
    rows = quick.run(lambda _: None)
    assert (rows[0].reason, rows[0].decode_tok_s) == ("it does not fit", None)
    for row in rows[1:]:
        assert row.reason is None
        assert row.decode_tok_s > 0
        assert row.share_of_all_gpu is None


def test_nothing_that_fits_is_an_error(quick, monkeypatch):
    def refuse(*_):
        raise PlanError("it does not fit")

    monkeypatch.setattr("spark_agent.benchmark.plan_untiered", refuse)
    monkeypatch.setattr("spark_agent.benchmark.plan_tiers", refuse)
    monkeypatch.setattr(Benchmark, "rows", lambda self: [Row("all-gpu", 1.0), Row("uniform", 0.5)])
    with pytest.raises(PlanError, match="does not fit"):
        quick.run(lambda _: None)


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 1.0])
def test_ctrl_c_ends_it(delay_s):
    command = [sys.executable, "-c", "from spark_agent.cli import main; main()", "bench", "--json", "--threads", "1"]
    with subprocess.Popen(
        [*command, *LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "no model named: using the bundled demo model\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err


def test_the_object_is_one_line(agent_cli):
    (line,) = agent_cli("bench", "--json", *QUICK, "--residency", "0.5", "--ring", "1").out.splitlines()
    assert json.loads(line)["rows"]


def test_fetching_early_is_measured_where_asked_for(agent_cli):
    arguments = ("--residency", "0.5", "--ring", "1", "--prefetch", "on")
    value = agent_cli("bench", "--json", *QUICK, *arguments).json
    [ring] = [row for row in value["rows"] if row["config"] == "calibrated+ring"]
    [early] = [row for row in value["rows"] if row["config"] == "calibrated+prefetch"]
    assert early["logits_sha256"] == ring["logits_sha256"]
    assert early["early_per_token"] is not None
    assert ring["early_per_token"] is None
    assert value["prefetch"].startswith("prefetch: tokens a second")
    # Fewer tokens a second would be off on a card, too; more than noise is on, even here.
    assert value["prefetch"].rpartition("; ")[2] in {
        "that alone makes --prefetch auto: on",
        "that alone makes --prefetch auto: off",
    }
    assert "beside" not in value["prefetch"], "what a copy takes within memory says nothing of a link"
    other = agent_cli("bench", "--json", *QUICK, *arguments[:4], "--prefetch", "off").json
    assert other["prefetch"] == "prefetch: not measured, --prefetch off"


def test_on_a_card_it_says_what_fits_beside_a_layer_and_what_follows(monkeypatch):
    monkeypatch.setattr("spark_agent.prefetching._ruled_out", lambda: None)
    rows = [
        Row("all-gpu", 1.0, decode_tok_s=100.0),
        Row("calibrated+ring", 0.6, 1.0, decode_tok_s=50.0, cold_hits_per_token=20.0),
        Row("calibrated+ring", 0.3, 1.0, decode_tok_s=30.0, cold_hits_per_token=40.0),
    ]
    value = {
        "device": "gpu",
        "expert_bytes": 2e6,
        "machine": {"n_layers": 50, "link": {"bytes_per_s": 2e10, "latency_s": 1e-6, "pageable_bytes_per_s": 1e10}},
    }

    def told(decode_tok_s: float) -> str:
        found = [*rows, Row("calibrated+prefetch", 0.6, 1.0, decode_tok_s=decode_tok_s, cold_hits_per_token=15.0)]
        asked = {**value, "rows": [row.as_json() for row in found]}
        return _prefetch_line(found, Prefetch.AUTO, Paying("trial", "nothing was measured here"), asked)

    fits = "1.9 MiB in 100 us beside 200 us of computation"
    by_ring = "at 60% against a ring of all slots"
    assert told(55.0) == f"prefetch: tokens a second +10.0% {by_ring}; {fits}; that alone makes --prefetch auto: on"
    assert told(45.0) == f"prefetch: tokens a second -10.0% {by_ring}; {fits}; that alone makes --prefetch auto: off"
    assert told(50.5).endswith("that alone makes --prefetch auto: trial")
