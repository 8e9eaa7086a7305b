"""An agent that others can reach: it always asks for a key, and this machine's commands know it."""

from __future__ import annotations

import json
import stat

import httpx
import pytest
from agent_process import END_S, asked, chat, ended, running

from spark_agent.errors import RefusedError
from spark_agent.paths import agents_dir, api_key_path, state_dir
from spark_agent.server.serve import bind

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_is_made_kept_and_known_to_this_machines_commands(agent_cli, spark_cli, monkeypatch):
    with running("--host", "0.0.0.0", "--residency", "0.4", "--workload", "chat") as (process, start):
        key = api_key_path().read_text().strip()
        assert start["access"] == {"key_needed": True, "key_file": str(api_key_path()), "key_is_new": True}
        assert start["base_url"].startswith("http://127.0.0.1:"), "an address that answers"
        assert stat.S_IMODE(api_key_path().stat().st_mode) == 0o600
        url = f"{start['base_url']}/v1/chat/completions"
        for headers in ({}, bearing("wrong"), bearing(key[:-1]), {"x-api-key": ""}):
            refused = httpx.post(url, json=BODY, headers=headers, timeout=END_S, trust_env=False)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx.get(f"{start['base_url']}/health", timeout=END_S, trust_env=False).status_code == 200
        assert chat(start, "Tell me of the sea.", 48, bearing(key))
        # With a key it does not matter by which name others reach it.
        elsewhere = {**bearing(key), "Host": "agent.example:80", "Origin": "https://page.example"}
        assert (
            httpx.get(f"{start['base_url']}/v1/models", headers=elsewhere, timeout=END_S, trust_env=False).status_code
            == 200
        )

        (shown,) = agent_cli("ps", "--json").json["agents"]
        assert (shown["answers"], shown["problem"]) == (True, None)
        port = start["base_url"].rpartition(":")[2]
        monkeypatch.setenv("SPARKMOE_PORT", port)
        monkeypatch.setenv("SPARKMOE_SERVICE_URL", "http://127.0.0.1:9")
        checks = {check["name"]: check for check in agent_cli("doctor", "--json").json["checks"]}
        assert checks["agents"]["value"] == f"nano-q4_0 at {start['base_url']} (process {process.pid})"
        assert checks["port"]["value"] == f"an agent serves nano-q4_0 at {start['base_url']}"
        launched = agent_cli("launch", "claude", "-p", port, "--dry-run", "--json")
        told = launched.json["environment"]
        assert told["ANTHROPIC_AUTH_TOKEN"] == f"$(cat '{api_key_path()}')"
        assert (
            f"export ANTHROPIC_AUTH_TOKEN=\"$(cat '{api_key_path()}')\""
            in agent_cli("launch", "claude", "-p", port, "--dry-run").out
        )
        assert key not in launched.out + launched.err
        # Of an agent that is in no list any more, only one at an address of this machine is told the key.
        for file in agents_dir().iterdir():
            file.unlink()
        assert agent_cli("launch", "claude", "-p", port, "--host", "0.0.0.0", "--dry-run").code == 0
        agent_cli("launch", "claude", "-p", port, "--dry-run").failed(1, "wants its token", "--api-key-file")
        named = agent_cli("launch", "claude", "-p", port, "--api-key-file", api_key_path(), "--dry-run", "--json")
        assert named.json["environment"]["ANTHROPIC_AUTH_TOKEN"] == f"$(cat {api_key_path()})"
        said = ended(process)
        assert "nothing is encrypted" in said
        assert key not in said + json.dumps(start)
    with running("--host", "0.0.0.0", "--residency", "0.4", "--workload", "chat") as (process, start):
        assert api_key_path().read_text().strip() == key, "tools that know it go on"
        assert start["access"]["key_is_new"] is False
        pulled = spark_cli("pull-profile", "chat", "--local")
        assert f"applied to the agent at {start['base_url']}" in pulled.err
        assert asked(start, "/spark/placement", bearing(key))["source"] == "local"
        ended(process)


def test_a_named_key_counts_on_loopback_too(tmp_path, agent_cli):
    file = tmp_path / "key"
    file.write_text("of-the-team\n")
    file.chmod(0o600)
    with running("--api-key-file", file, SPARKMOE_API_KEY="of-the-environment") as (process, start):
        assert start["access"] == {"key_needed": True, "key_file": str(file), "key_is_new": False}
        for key, status in (("of-the-team", 200), ("of-the-environment", 401)):
            reply = httpx.get(f"{start['base_url']}/v1/models", headers=bearing(key), timeout=END_S, trust_env=False)
            assert reply.status_code == status
        ended(process)
    assert not api_key_path().exists()


def test_nothing_changes_on_loopback():
    with running() as (process, start):
        assert start["access"] == {"key_needed": False, "key_file": None, "key_is_new": False}
        assert chat(start, "Hello", 2)
        foreign = httpx.get(
            f"{start['base_url']}/v1/models", headers={"Host": "agent.example"}, timeout=END_S, trust_env=False
        )
        assert foreign.status_code == 403
        ended(process)
    assert not api_key_path().exists()


def test_key_files_that_cannot_be_used_end_the_start(tmp_path, agent_cli):
    file = tmp_path / "key"
    agent_cli("run", "-p", 0, "--api-key-file", file).failed(1, str(file))
    file.write_text("key")
    file.chmod(0o644)
    agent_cli("run", "-p", 0, "--api-key-file", file).failed(1, "mode 0644", "chmod 600")
    assert not state_dir().exists()
    api_key_path().parent.mkdir(parents=True)
    api_key_path().write_text("two words")
    api_key_path().chmod(0o600)
    agent_cli("run", "-p", 0, "--host", "0.0.0.0").failed(1, "api.key", "without spaces")


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_addresses_that_are_another_machines(agent_cli, host):
    agent_cli("run", "--host", host, "-p", 0).failed(1, f"cannot listen on {host}")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "8.8.8.8"])
def test_a_socket_beyond_loopback_needs_a_key(host):
    with pytest.raises(RefusedError, match="refusing to listen") as refused, bind(host, 0):
        pass
    assert "ssh -L" in str(refused.value.hint)
