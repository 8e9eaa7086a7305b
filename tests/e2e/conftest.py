"""Real processes on free ports, in folders of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# The tests' helpers lie here.
sys.path.append(str(Path(__file__).resolve().parent))

STOP_S = 120.0
PATIENT = "import spark_service.catalog as catalog; catalog.QUICK_SECONDS = 3600.0; "
"""However slow the machine is, no build takes so long that what came since has to wait."""


class Machine:
    """One person's machine: its own folders, the same code."""

    def __init__(self, home: Path) -> None:
        self.home = home
        folders = {f"XDG_{kind.upper()}_HOME": str(home / kind) for kind in ("config", "state", "data")}
        self.environment: dict[str, str] = dict(os.environ) | folders | {"SPARKMOE_TEAM_KEY": "5e" * 32}

    def command(self, module: str, *arguments: str) -> list[str]:
        before = PATIENT if (module, *arguments[:1]) == ("spark_service.cli", "run") else ""
        return [sys.executable, "-c", f"{before}from {module} import main; main()", *arguments]

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(module, *arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=240,
            check=False,
        )

    def agent(self, *arguments: str) -> dict[str, Any]:
        """Run ``spark-agent`` to success and return its JSON object."""
        done = self.run("spark_agent.cli", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) if done.stdout.strip() else {}

    def agents(self) -> list[dict[str, Any]]:
        """What ``spark-agent ps`` knows; on a busy machine an agent may answer only the next time it is asked."""
        deadline = time.monotonic() + STOP_S
        while True:
            found: list[dict[str, Any]] = self.agent("ps", "--json")["agents"]
            if all(one["answers"] for one in found) or time.monotonic() > deadline:
                return found

    @contextmanager
    def serving(self, module: str, *arguments: str) -> Iterator[tuple[Mapping[str, Any], subprocess.Popen[str]]]:
        """A server and its start-up object; it must end with exit code 0 unless the test killed it."""
        with subprocess.Popen(
            self.command(module, *arguments),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            try:
                assert line, process.stderr.read()
                yield json.loads(line), process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                _, messages = process.communicate(timeout=STOP_S)
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, messages


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")
