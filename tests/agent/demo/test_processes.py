"""The sandbox starts real commands, keeps the person's settings out, and ends what it started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from spark_agent.demo.processes import Sandbox
from spark_agent.errors import SparkError

SERVER = """
import json, os, signal, sys, time
def main():
    if "--broken" in sys.argv:
        sys.exit("it broke")
    print(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:]}), flush=True)
    if "--stay" in sys.argv:
        time.sleep(60)
"""


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    monkeypatch.setenv("SPARKMOE_SERVICE_URL", "http://someone.example")
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    (tmp_path / "toy_command.py").write_text(SERVER)
    made = Sandbox(tmp_path, b"0123456789abcdef")
    made.environment["PYTHONPATH"] = str(tmp_path)
    return made


def test_the_persons_settings_stay_out(sandbox: Sandbox) -> None:
    """All but the cache, which the demo's library goes into as it would for any other run."""
    ours = {name: value for name, value in sandbox.environment.items() if name.startswith(("SPARKMOE_", "XDG_"))}
    assert ours == {
        "SPARKMOE_TEAM_KEY": b"0123456789abcdef".hex(),
        "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
        **{f"XDG_{kind.upper()}_HOME": str(sandbox.home / kind) for kind in ("config", "state", "data")},
    }
    assert "DO_NOT_TRACK" not in sandbox.environment


def test_a_commands_object_is_returned(sandbox: Sandbox) -> None:
    assert sandbox.run("toy_command", "a", "b c")["arguments"] == ["a", "b c"]


def test_a_failure_shows_its_messages(sandbox: Sandbox, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SparkError, match="`toy_command --broken` ended with exit code 1"):
        sandbox.run("toy_command", "--broken")
    assert "it broke" in capfd.readouterr().err


def test_a_server_that_does_not_start_shows_its_log(sandbox: Sandbox, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(SparkError, match="ended before it was ready"),
        sandbox.serving("toy_command", "--broken"),
    ):
        pytest.fail("the block must not run")
    assert "it broke" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the process in /proc")
def test_a_server_ends_with_its_block(sandbox: Sandbox) -> None:
    with sandbox.serving("toy_command", "--stay") as up:
        process = Path(f"/proc/{up['pid']}")
        assert process.exists()
    assert not process.exists()
