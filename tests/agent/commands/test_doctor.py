from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path

import pytest

from spark_agent import running_agent
from spark_agent.paths import agents_dir
from spark_agent.running import RunningAgent, RunningAgents, process_started

BROKEN = ("missing", "folder", "not_gguf", "truncated", "dense")


def checks_of(result) -> dict[str, dict[str, str]]:
    (line,) = result.out.splitlines()
    checks = json.loads(line)["checks"]
    assert all(list(check) == ["name", "status", "value", "reason", "fix"] for check in checks)
    assert {check["status"] for check in checks} <= {"ok", "warn", "fail"}
    return {check["name"]: check for check in checks}


@pytest.fixture(autouse=True)
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    # Port 9 (discard) is never served; a developer's own service must not be asked.
    monkeypatch.setenv("SPARKMOE_SERVICE_URL", "http://127.0.0.1:9")


def test_a_machine_without_a_service_is_well(agent_cli):
    result = agent_cli("doctor", "--json")
    assert result.code == 0
    checks = checks_of(result)
    tiers = [
        "tiers",
        "tier-engine",
        "prefetch",
        "nvrtc",
        "cuda-driver",
        "video-memory",
        "host-memory",
        "link",
        "llama-server",
    ]
    rest = ["model", "spool", "service", "consent", "agents", "port"]
    assert list(checks) == ["spark", "llama-cpp-python", "native", *tiers, *rest]
    assert "8 of them for a token" in checks["model"]["value"]
    assert "SPARK0" in checks["tiers"]["value"]
    assert "may be pinned" in checks["host-memory"]["value"]
    assert "GGML_BACKEND_PATH=" in checks["llama-server"]["value"]
    assert checks["llama-server"]["value"].endswith("llama-server --device SPARK0 -ngl 999 --fit off -m MODEL")
    assert checks["native"]["status"] == "ok"
    assert "mf1-" in checks["model"]["value"]
    assert checks["service"]["status"] == "warn"
    assert "spark-service run" in checks["service"]["fix"]
    assert (checks["consent"]["status"], checks["consent"]["value"]) == ("warn", "never asked")
    assert (checks["agents"]["status"], checks["agents"]["value"]) == ("ok", "none runs")
    assert agent_cli("doctor").out.count("\nok") >= 2


def test_an_agent_that_does_not_answer(agent_cli, monkeypatch):
    monkeypatch.setattr("spark_agent.asking.ask_all.__defaults__", (0.2,))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        agent = RunningAgent(
            pid=os.getpid(),
            process_started=process_started(os.getpid()),
            host="127.0.0.1",
            port=port,
            base_url=f"http://127.0.0.1:{port}",
            model="nano",
            fingerprint="mf1-0",
            started_s=1.0,
        )
        RunningAgents.of_this_machine().add(agent)
        (agents_dir() / "1.json").write_text("{}")
        check = checks_of(agent_cli("doctor", "--json"))["agents"]
    assert check["status"] == "warn"
    assert f"nano at http://127.0.0.1:{port} (process {os.getpid()}): no answer within 0.2 s" in check["reason"]
    assert "1.json is not a running agent's" in check["reason"]
    assert "spark-agent ps" in check["fix"]


def test_a_machine_without_a_compiler_is_told_what_it_costs(agent_cli, monkeypatch):
    from spark_runtime.native_tap import native_library

    native_library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = agent_cli("doctor", "--json")
    native_library.cache_clear()
    assert result.code == 0
    check = checks_of(result)["native"]
    assert check["status"] == "warn"
    assert "no C++ compiler" in check["reason"]
    assert "g++" in check["fix"]


def test_a_service_that_answers(agent_cli, service, make_reply, monkeypatch):
    monkeypatch.setenv("SPARKMOE_SERVICE_URL", service.url)
    service.answers["/api/v1/profiles"] = make_reply(body=b'{"profiles": []}')
    assert agent_cli("upload", "consent", "--yes").code == 0
    began_s = time.monotonic()
    checks = checks_of(agent_cli("doctor", "--json"))
    took_s = time.monotonic() - began_s
    assert (checks["service"]["status"], checks["consent"]["status"]) == ("ok", "ok")
    assert checks["clock"]["status"] == "ok"
    told = re.fullmatch(r"within (\d+) s of the service's", checks["clock"]["value"])
    assert told is not None
    assert 1 <= int(told[1]) <= 2 + took_s, "the header has whole seconds, and the answer takes a while"


def test_a_port_that_another_program_has(agent_cli, monkeypatch):
    # One that the kernel gives to nobody who takes any free port: it stays free meanwhile.
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    monkeypatch.setenv("SPARKMOE_PORT", str(first - 1 - os.getpid() % 10_000))
    assert checks_of(agent_cli("doctor", "--json"))["port"]["status"] == "ok"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(running_agent, "_TIMEOUT_S", 0.2)
        monkeypatch.setenv("SPARKMOE_PORT", str(taken.getsockname()[1]))
        result = agent_cli("doctor", "--json")
        check = checks_of(result)["port"]
        assert (result.code, check["status"]) == (0, "warn")
        assert "SPARKMOE_PORT" in check["fix"]


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_model_fails(agent_cli, broken_model, fault):
    result = agent_cli("doctor", broken_model(fault), "--json")
    assert result.code == 1
    assert "Traceback" not in result.err
    check = checks_of(result)["model"]
    assert check["status"] == "fail"
    assert check["reason"]
    assert check["fix"]


def test_a_damaged_spool_fails(agent_cli, tmp_path):
    from spark_agent.paths import spool_path

    spool_path().parent.mkdir(parents=True)
    spool_path().write_bytes(b"not a database" * 1000)
    result = agent_cli("doctor", "--json")
    assert result.code == 1
    assert checks_of(result)["spool"]["status"] == "fail"
    assert spool_path().read_bytes() == b"not a database" * 1000


def test_a_bad_config_file_is_an_error(agent_cli):
    from spark_agent.paths import config_path

    config_path().parent.mkdir(parents=True)
    config_path().write_text("upload = 5\n")
    agent_cli("doctor", "--json").failed(1, "config.toml")
