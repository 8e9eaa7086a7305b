"""``spark-agent ps`` and what a running agent tells, with real processes."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator

import agent_process
import httpx
import pytest
from agent_process import END_S
from prometheus_client.parser import text_string_to_metric_families

from spark_agent.asking import ask_all
from spark_agent.manifests import ManifestStore, PullKey
from spark_agent.paths import agents_dir, manifests_dir, workload_rules_path
from spark_agent.running import RunningAgent, RunningAgents, process_started
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path

FOREVER = [{"role": "user", "content": "How are you today?"}]
CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def running(*arguments: object, **variables: str) -> Iterator[tuple[subprocess.Popen, httpx.Client]]:
    """An agent, and a client of it."""
    with (
        agent_process.running(*arguments, **variables) as (process, start),
        httpx.Client(base_url=start["base_url"], timeout=END_S, trust_env=False) as client,
    ):
        yield process, client


def chat(client: httpx.Client, headers: dict[str, str] | None = None, **members: object) -> httpx.Response:
    body = {"messages": FOREVER, "temperature": 0, "max_tokens": 8, **members}
    return client.post(CHAT, json=body, headers=headers)


def test_none_runs(agent_cli):
    shown = agent_cli("ps")
    assert (shown.code, shown.out) == (0, "")
    assert "no agent runs" in shown.err
    assert agent_cli("ps", "--json").json == {"agents": []}
    assert not agents_dir().exists(), "asking makes nothing"


def test_an_agent_from_its_start_to_its_end(agent_cli, kept):
    workload_rules_path().parent.mkdir(parents=True)
    workload_rules_path().write_text("[[rule]]\nworkload = 'batch'\nheader = { x-job = 'n*' }\n")
    with running("--residency", 0.6) as (process, client):
        assert chat(client, max_tokens=300).status_code == 200
        assert chat(client, {"X-Spark-Workload": "review"}).status_code == 200
        assert chat(client, {"X-Job": "nightly"}).status_code == 200
        assert chat(client, {"X-Spark-Workload": "Not Good"}).status_code == 400
        (shown,) = agent_cli("ps", "--json").json["agents"]
        assert (shown["pid"], shown["answers"], shown["problem"]) == (process.pid, True, None)
        assert shown["base_url"] == str(client.base_url)
        stats = shown["stats"]
        assert stats["tiered"] is True
        assert stats["sessions"]["open"] == 3
        assert {row["workload"] for row in stats["workloads"]} == {"unlabelled", "review", "batch"}
        assert sum(stats["generations"].values()) == 3
        assert 0.0 < stats["live"]["cold_hit_rate"] < 1.0
        assert stats["decode_tok_s"] > 0
        header, row = agent_cli("ps").out.splitlines()
        assert header.split()[:3] == ["model", "url", "pid"]
        assert row.split()[:3] == ["nano-q4_0", str(client.base_url), str(process.pid)]

        found = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
        cold = {s.labels["phase"]: s.value for s in found["spark_agent_cold_hits"].samples}
        phases = client.get("/spark/stats").json()["phases"]
        assert cold == {phase: numbers["cold_hits"] for phase, numbers in phases.items()}
        assert cold["decode"] > 0
        generations = {s.labels["workload"]: s.value for s in found["spark_agent_generations"].samples}
        assert generations == {"unlabelled": 1, "review": 1, "batch": 1}
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
    assert agent_cli("ps", "--json").json == {"agents": []}
    assert list(agents_dir().iterdir()) == []
    assert sorted(row.workload for row in kept()) == ["batch", "review", "unlabelled"]
    assert len({row.session_hash for row in kept()}) == 1, "one conversation"


def test_a_manifests_promise_and_what_unlabelled_requests_look_like(agent_cli, make_manifest, tmp_path):
    manifest = make_manifest(read_model_shape(demo_model_path()))
    for name in ("code", "chat"):
        named = manifest.model_copy(update={"workload": name})
        ManifestStore(manifests_dir()).put(named, PullKey("http://x", 1, 1, 0), None)
    with running() as (_, client):
        asked = [{"role": "user", "content": "Count to a thousand: " + "one " * 40}]
        tokens = 0
        for _number in range(40):
            usage = chat(client, messages=asked, temperature=1.0, max_tokens=200).json()["usage"]
            tokens += usage["completion_tokens"]
            if tokens > 400:
                break
        found = client.get("/spark/stats").json()["suggestion"]
        assert found["workload"] == "chat", "both are the same profile: by name"
        assert found["others"] == [{"workload": "code", "cold_hit_rate": found["cold_hit_rate"]}]
        assert 0.0 <= found["best_cold_hit_rate"] <= found["cold_hit_rate"] < 1.0
        assert "look like chat" in agent_cli("ps").err
    path = tmp_path / "manifest.json"
    path.write_text(manifest.model_dump_json())
    assert manifest.expected is not None
    with running("--manifest", path, "--residency", 0.6) as (_, client):
        live = client.get("/spark/stats").json()["live"]
        assert live["promised_cold_hit_rate"] == manifest.expected.cold_hit_rate
        assert (live["placement"], live["cold_hit_rate"]) == ("chat", None)


def test_a_killed_agent_is_forgotten(agent_cli):
    with running() as (process, client):
        port = client.base_url.port
        agent_cli("run", "-p", port).failed(1, f"port {port}", "nano-q4_0", str(process.pid), "spark-agent ps")
        process.kill()
        process.wait(END_S)
        assert agent_cli("ps", "--json").json == {"agents": []}
    assert list(agents_dir().iterdir()) == []


def test_rules_that_are_wrong_end_the_start(agent_cli, monkeypatch, tmp_path):
    workload_rules_path().parent.mkdir(parents=True)
    workload_rules_path().write_text("[[rule]]\nworkload = 'a'\n")
    agent_cli("run", "-p", 0).failed(1, "workloads.toml, line 1: rule 1 (a)", "no condition")
    monkeypatch.setenv("SPARKMOE_WORKLOAD_RULES", "/nowhere/rules.toml")
    agent_cli("run", "-p", 0).failed(1, "SPARKMOE_WORKLOAD_RULES", "/nowhere/rules.toml")
    agent_cli("run", "-p", 0, "--workload-rules", "/no/rules.toml").failed(1, "--workload-rules", "/no/rules.toml")
    named = tmp_path / "team.toml"
    named.write_text("# ours\n[[rule]]\nworkload = 'b'\nmodel = 5\n")
    agent_cli("run", "--dry-run", "--workload-rules", named).failed(1, "team.toml, line 4: rule 1 (b): model: found 5")


def test_rules_named_by_an_option_come_before_all_others(agent_cli, tmp_path):
    workload_rules_path().parent.mkdir(parents=True)
    workload_rules_path().write_text("[[rule]]\nworkload = 'of-the-folder'\nmodel = '*'\n")
    named = tmp_path / "team.toml"
    named.write_text("[[rule]]\nworkload = 'of-the-option'\nheader = { x-job = '*' }\n")
    with running("--workload-rules", named, SPARKMOE_WORKLOAD_RULES=str(workload_rules_path())) as (_, client):
        assert chat(client, {"X-Job": "any"}).status_code == 200
        (row,) = client.get("/spark/stats").json()["workloads"]
        assert row["workload"] == "of-the-option"


def test_a_second_signal_does_not_wait_and_keeps_the_counts(kept, until):
    with running() as (process, client):
        assert chat(client).status_code == 200
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address, timeout=END_S) as stuck:
            # Half a request: alone it would keep the server for half a minute after the first signal.
            stuck.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n".encode())
            stuck.sendall(b"{")
            # Whoever came later was answered, so the half is there.
            client.close()
            assert httpx.get(f"{client.base_url}/health", timeout=END_S, trust_env=False).status_code == 200
            process.send_signal(signal.SIGTERM)
            # A refused connection says that the first signal was taken.
            until(lambda: is_refused(address))
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_S) == 0
    assert len(kept()) == 1
    assert list(agents_dir().iterdir()) == []


def is_refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=END_S).close()
    except OSError:
        return True
    return False


def registered(port: int, pid: int = 0, **changes: object) -> RunningAgent:
    pid = pid or os.getpid()
    agent = RunningAgent(
        pid=pid,
        process_started=process_started(pid),
        host="127.0.0.1",
        port=port,
        base_url=f"http://127.0.0.1:{port}",
        model="nano",
        fingerprint="mf1-0",
        started_s=1.0,
    ).model_copy(update=changes)
    RunningAgents.of_this_machine().add(agent)
    return agent


def test_one_that_hangs_does_not_hold_up_the_table(agent_cli, monkeypatch):
    monkeypatch.setattr("spark_agent.asking.ask_all.__defaults__", (0.3,))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        registered(silent.getsockname()[1])
        shown = agent_cli("ps")
        assert shown.code == 0
        assert "no answer within 0.3 s" in shown.err
        assert "nano" in shown.out
        (row,) = agent_cli("ps", "--json").json["agents"]
        assert (row["answers"], row["stats"]) == (False, None)


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[int, list[str | None]]]:
    """A server that says one thing; gives its port and the tokens it was sent."""
    tokens: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1], tokens
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "word"),
    [
        (401, b"", "401"),
        (200, b"", "cannot be asked"),
        (200, b"\xff", "cannot be asked"),
        (200, b"[" * 100_000, "cannot be asked"),
        (200, b"[]", "another program"),
        (200, b'{"fingerprint": "mf1-1"}', "another program"),
        (200, b" " * (4 * 1024 * 1024 + 1), "more than"),
    ],
)
def test_answers_that_are_none(agent_cli, status, body, word):
    with answering(status, body) as (port, _):
        registered(port)
        shown = agent_cli("ps")
    assert shown.code == 0
    assert word in shown.err


def test_a_token_is_sent_and_not_shown(agent_cli):
    odd = {"fingerprint": "mf1-0", "uptime_s": "x", "sessions": 5, "spool": None, "live": {"cold_hit_rate": "\x1b[2J"}}
    with answering(200, json.dumps(odd).encode()) as (port, tokens):
        registered(port, token="secret-token")
        shown = agent_cli("ps")
        as_json = agent_cli("ps", "--json")
    assert tokens == ["Bearer secret-token"] * 2
    assert (shown.code, as_json.code) == (0, 0)
    assert "secret" not in shown.out + shown.err + as_json.out
    assert "\x1b" not in shown.out


def test_a_suggestion_is_shown_with_its_number(agent_cli):
    found = {"workload": "code-heavy", "cold_hit_rate": 0.123, "best_cold_hit_rate": 0.05}
    with answering(200, json.dumps({"fingerprint": "mf1-0", "suggestion": found}).encode()) as (port, _):
        registered(port)
        shown = agent_cli("ps")
    assert "code-heavy" in shown.err
    assert "12.3%" in shown.err
    assert "--workload code-heavy" in shown.err


def test_many_are_asked_at_once():
    with answering(200, b'{"fingerprint": "mf1-0"}') as (port, _), socket.create_server(("127.0.0.1", 0)) as silent:
        agents = [registered(silent.getsockname()[1]), registered(port), registered(1)]
        first, second, third = ask_all(agents, 5.0)
    assert first.problem == "no answer within 5 s"
    assert second.stats == {"fingerprint": "mf1-0"}
    assert third.problem is not None
    assert "refused" in third.problem
