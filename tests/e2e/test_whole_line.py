"""From transcripts to a served model with a manifest: the whole line, through the commands a person types."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest

from spark_agent.manifests import load_manifest
from spark_runtime.manifest_check import check_manifest
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_schemas.split import split_of

pytestmark = pytest.mark.e2e

SERVICE = ("spark_service.cli", "run", "--open", "-p", "0", "--json", "--data-dir")


def write_sessions(folder: Path, count: int) -> None:
    """Short programs, all different from their first line on."""
    folder.mkdir()
    for index in range(count):
        lines = [f"def step_{index}_{line}(value):\n    return value * {index + line} + {line}\n" for line in range(24)]
        (folder / f"module_{index}.py").write_text("\n".join(lines))


def test_whole_line(machine, tmp_path: Path) -> None:
    write_sessions(tmp_path / "sessions", 24)
    manifest_file = tmp_path / "manifest.json"
    data = tmp_path / "service"
    with machine.serving(*SERVICE, str(data)) as (service, _):
        machine.environment["SPARKMOE_SERVICE_URL"] = service["base_url"]
        record = ["record", "--sessions", str(tmp_path / "sessions"), "--workload", "code-heavy", "--threads", "1"]
        recorded = machine.agent(*record, "--json")
        assert recorded["sessions"] == 24
        assert recorded["skipped"] == []
        assert recorded["tokens_decode"] > recorded["tokens_prefill"] > 0

        refused = machine.run("spark_agent.cli", "upload", "flush")
        assert refused.returncode == 3, "nothing may leave before consent"
        machine.agent("upload", "consent", "--yes")
        sent = machine.agent("upload", "flush", "--json", "--minimum-tokens", "1")
        assert (sent["uploaded"], sent["pending"], sent["last_error"]) == (24, 0, None)

        again = machine.agent(*record, "--json")
        assert again["known"] == 24
        assert machine.agent("upload", "status", "--json")["pending"] == 0

        shape = read_model_shape(demo_model_path())
        pull = ["pull-profile", "code-heavy", "--vram", "9M", "--output", str(manifest_file), "--json"]
        pulled = machine.agent(*pull)
        manifest = load_manifest(manifest_file)
        check_manifest(manifest, shape)
        assert pulled["manifest"] == json.loads(manifest.model_dump_json())
        assert manifest.n_calibration + manifest.n_held_out == 24
        assert manifest.bytes.vram_total <= 9 * 2**20
        assert all(layer.slots >= 2 * layer.top_k for layer in manifest.layers)
        assert manifest.expected is not None
        assert manifest.expected.cold_hit_rate < manifest.expected.uniform_cold_hit_rate
        unchanged = machine.run("spark_agent.cli_spark", *pull)
        assert json.loads(unchanged.stdout)["manifest"] == pulled["manifest"]
        assert "unchanged" in unchanged.stderr

        shown = machine.agent("profiles", "show", "code-heavy", "--json")
        policies = {point["policy"] for point in shown["curves"]}
        assert {"uniform", "random", "own", "oracle", "lru"} <= policies

    quick = ["--prompt", "64", "--tokens", "24", "--prefill", "64", "--residency", "0.5", "--ring", "0.5"]
    bench = machine.agent("bench", "--json", "--threads", "1", *quick, "--manifest", str(manifest_file))
    assert bench["identical_output"] is True
    assert {row["config"] for row in bench["rows"]} >= {"all-gpu", "uniform", "calibrated", "llama-offload"}

    run = ["run", "-p", "0", "--json", "--workload", "chat", "--threads", "1"]
    with machine.serving("spark_agent.cli", *run, "--manifest", str(manifest_file)) as (agent, _):
        assert agent["manifest"]["workload"] == "code-heavy"
        assert agent["fingerprint"] == shape.fingerprint
        assert agent["tiers"]["tiered"] is True
        assert agent["tiers"]["slots"] == sum(layer.slots for layer in manifest.layers)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
        answers = [
            httpx.post(f"{agent['base_url']}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
            for _ in range(2)
        ]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"]["completion_tokens"] > 0
    assert machine.agent("upload", "status", "--json")["pending"] == 1, "the served session's counts were kept"


def test_a_killed_service_loses_no_acknowledged_upload(machine, tmp_path: Path) -> None:
    write_sessions(tmp_path / "sessions", 4)
    data = str(tmp_path / "service")
    with machine.serving(*SERVICE, data) as (service, process):
        machine.environment["SPARKMOE_SERVICE_URL"] = service["base_url"]
        machine.agent("record", "--sessions", str(tmp_path / "sessions"), "--workload", "w", "--threads", "1", "--json")
        machine.agent("upload", "consent", "--yes")
        assert machine.agent("upload", "flush", "--json", "--minimum-tokens", "1")["uploaded"] == 4
        process.send_signal(signal.SIGKILL)
        process.wait()
    down = machine.run("spark_agent.cli", "profiles", "ls")
    assert down.returncode == 1
    assert "error: " in down.stderr
    assert "hint: " in down.stderr
    with machine.serving(*SERVICE, data) as (service, _):
        machine.environment["SPARKMOE_SERVICE_URL"] = service["base_url"]
        profiles = machine.agent("profiles", "ls", "--json")["profiles"]
    assert {(p["workload"], p["n_calibration"] + p["n_held_out"]) for p in profiles} == {("w", 4)}


def test_demo_sessions_are_enough_on_both_sides() -> None:
    from spark_agent.demo.sessions import demo_session_hash, demo_sessions

    for workload, transcripts in demo_sessions().items():
        sides = [split_of(demo_session_hash(transcript)) for transcript in transcripts]
        assert len(sides) >= 16, workload
        assert sides.count("held_out") >= 3, workload
