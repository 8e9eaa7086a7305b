"""A coding tool, as the launcher starts it: with the real agent, and a script in the tool's place."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

TOOL = """#!{python}
import json, os, signal, sys, urllib.request
if sys.argv[-1] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    print("waiting", flush=True)
    signal.pause()
body = {{"messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 4, "model": sys.argv[4].split("/")[1]}}
request = urllib.request.Request(
    os.environ["OPENAI_API_BASE"] + "/chat/completions",
    json.dumps(body).encode(),
    {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
)
answer = json.load(urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request, timeout=240))
print(json.dumps({{"usage": answer["usage"], "arguments": sys.argv[1:], "environment": dict(os.environ)}}))
sys.exit(7)
"""
AGENT = [sys.executable, "-c", "from spark_agent.cli import main; main()"]


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> Iterator[dict]:
    folder = tmp_path_factory.mktemp("agent")
    folders = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "STATE", "DATA")}
    with subprocess.Popen(
        [*AGENT, "run", "-p", "0", "--json", "--threads", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **folders},
    ) as process:
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], 600)
            assert ready
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


@pytest.fixture
def command(agent, tmp_path, monkeypatch):
    """The launcher's command line, where the tool is a script of ours."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "aider"
    script.write_text(TOOL.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret one")
    monkeypatch.setenv("OPENAI_API_KEY", "secret two")
    return [*AGENT, "launch", "aider", "-p", agent["base_url"].rpartition(":")[2]]


def test_a_tool_reaches_the_agent_and_no_cloud(command):
    ended = subprocess.run([*command, "--", "--flag", "a b"], capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 7, (ended.stdout, ended.stderr)
    told = json.loads(ended.stdout)
    assert told["usage"]["completion_tokens"] >= 1
    assert told["arguments"][-2:] == ["--flag", "a b"]
    assert "secret" not in json.dumps(told["environment"])
    assert "not handed on: ANTHROPIC_API_KEY" in ended.stderr
    assert "secret" not in ended.stderr


def test_a_signal_reaches_the_tool(command):
    with subprocess.Popen([*command, "--", "wait"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 9


def test_a_dry_run_is_a_script(command, agent, tmp_path):
    shown = subprocess.run(
        [*command, "--dry-run", "--", "--x"], capture_output=True, text=True, check=True, timeout=240
    )
    assert "secret" not in shown.stdout
    ended = subprocess.run(["sh", "-c", shown.stdout], capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 7, ended.stderr
    assert "ANTHROPIC_API_KEY" not in json.loads(ended.stdout)["environment"]
    described = subprocess.run(
        [*command, "--dry-run", "--json"], capture_output=True, text=True, check=True, timeout=240
    )
    value = json.loads(described.stdout)
    assert (value["tool"], value["base_url"], value["installed"]) == ("aider", agent["base_url"], True)
    assert {"ANTHROPIC_API_KEY"} <= set(value["removed"])


def test_what_is_wrong_is_said(command):
    def failed(*arguments: str, code: int, word: str) -> None:
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=240)
        assert (ended.returncode, ended.stdout) == (code, "")
        assert word in ended.stderr
        assert "hint: " in ended.stderr
        assert "Traceback" not in ended.stderr

    failed("--model", "other", code=2, word="serves no 'other'")
    failed("--json", code=2, word="--dry-run")
    failed("-p", "9", code=1, word="no agent answers")
    command[command.index("aider")] = "codex"
    failed(code=1, word="npm install -g @openai/codex")
