"""An agent that speaks TLS, and this machine's commands with it."""

from __future__ import annotations

import json
import ssl

import httpx
import openai
import pytest
from agent_process import ended, running
from certificates import make_pair

from spark_agent.api_key import own_api_key

HELLO = [{"role": "user", "content": "Hello"}]


def test_clients_and_commands(agent_cli, spark_cli, tmp_path, monkeypatch):
    pair = make_pair(tmp_path, "localhost", "127.0.0.1")
    options = ("--tls-cert-file", pair.cert, "--tls-key-file", pair.key)
    with running("--host", "0.0.0.0", *options, "--residency", "0.4", "--workload", "chat") as (process, start):
        url = start["base_url"]
        assert url.startswith("https://127.0.0.1:")
        key = own_api_key().value
        trusted = ssl.create_default_context(cafile=pair.cert)
        with (
            httpx.Client(verify=trusted, trust_env=False) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=0) as client,
        ):
            asked = {"model": client.models.list().data[0].id, "messages": HELLO, "max_tokens": 400, "temperature": 0}
            whole = client.chat.completions.create(**asked)
            parts = [
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
            ]
            assert "".join(parts) == whole.choices[0].message.content
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health", trust_env=False)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)

        (shown,) = agent_cli("ps", "--json").json["agents"]
        assert (shown["base_url"], shown["answers"], shown["problem"]) == (url, True, None)
        port = url.rpartition(":")[2]
        monkeypatch.setenv("SPARKMOE_PORT", port)
        monkeypatch.setenv("SPARKMOE_SERVICE_URL", "http://127.0.0.1:9")
        checks = {check["name"]: check for check in agent_cli("doctor", "--json").json["checks"]}
        assert checks["port"]["value"] == f"an agent serves nano-q4_0 at {url}"
        told = agent_cli("launch", "claude", "-p", port, "--dry-run", "--json").json
        assert told["base_url"] == told["environment"]["ANTHROPIC_BASE_URL"] == url
        assert told["environment"]["NODE_EXTRA_CA_CERTS"] == str(pair.cert)
        codex = agent_cli("launch", "codex", "-p", port, "--dry-run", "--json").json
        assert codex["environment"]["SSL_CERT_FILE"] == str(pair.cert)
        # From another machine: by the host that the certificate names, and who is to be trusted.
        elsewhere = ("launch", "aider", "-p", port, "--host", "localhost", "--dry-run", "--json")
        monkeypatch.setattr("spark_agent.running.RunningAgents.listening_on", lambda *_: None)
        monkeypatch.setenv("SPARKMOE_API_KEY", key)
        aider = agent_cli(*elsewhere, "--tls-ca-file", pair.cert).json
        assert (aider["base_url"], aider["environment"]["SSL_CERT_FILE"]) == (
            f"https://localhost:{port}",
            str(pair.cert),
        )
        agent_cli(*elsewhere, "--tls").failed(1, "cannot be trusted", "--tls-ca-file")
        agent_cli(*elsewhere).failed(1, "no agent answers")
        said = ended(process)
        assert "nothing is encrypted" not in said
        assert key not in said + json.dumps(start)
    named = {"SPARKMOE_TLS_CERT_FILE": str(pair.cert), "SPARKMOE_TLS_KEY_FILE": str(pair.key)}
    with running("--residency", "0.4", "--workload", "chat", **named) as (process, start):
        pulled = spark_cli("pull-profile", "chat", "--local")
        assert f"applied to the agent at {start['base_url']}" in pulled.err
        assert httpx.get(f"{start['base_url']}/health", verify=trusted, trust_env=False).status_code == 200
        ended(process)


def test_what_cannot_be_used_is_said_before_anything_is_loaded(agent_cli, tmp_path):
    pair, other = make_pair(tmp_path / "a", "localhost"), make_pair(tmp_path / "b", "localhost")
    agent_cli("run", "--tls-cert-file", pair.cert).failed(2, "--tls-key-file is missing")
    mixed = ("run", "--tls-cert-file", pair.cert, "--tls-key-file", other.key)
    agent_cli(*mixed).failed(1, "is not that of the certificate")
    agent_cli("run", "--tls-cert-file", tmp_path / "x", "--tls-key-file", pair.key).failed(1, "no such file")
