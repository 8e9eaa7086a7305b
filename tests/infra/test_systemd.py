"""The user unit of the agent."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spark_agent.cli import app
from spark_agent.env import VARIABLES
from spark_agent.server.serve import _CUT_OFF_S

UNIT = "infra/systemd/spark-agent.service"


@pytest.fixture
def unit(root: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((root / UNIT).read_text(encoding="utf-8"))
    return parser


def test_it_starts_the_agent_and_ends_it_in_order(unit) -> None:
    service = unit["Service"]
    program, command = service["ExecStart"].split()
    assert Path(program).name == "spark-agent"
    assert command in {each.name for each in app.registered_commands}
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) > _CUT_OFF_S
    assert service["RestartPreventExitStatus"].split() == ["1", "2", "3"], "what a restart would not mend"


def test_it_may_use_a_gpu_and_lock_memory(unit) -> None:
    service = unit["Service"]
    assert service["LimitMEMLOCK"] == "infinity"
    assert not {"PrivateDevices", "DevicePolicy", "MemoryDenyWriteExecute", "PrivateNetwork"} & set(service)
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"


def test_its_comments_name_variables_that_exist(root: Path) -> None:
    named = set(re.findall(r"SPARKMOE_[A-Z_]+", (root / UNIT).read_text(encoding="utf-8")))
    assert named
    assert named <= {variable.name for variable in VARIABLES}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_it(root: Path, tmp_path: Path) -> None:
    text = (root / UNIT).read_text(encoding="utf-8").replace("%h/.local/bin/spark-agent", "/bin/true")
    path = tmp_path / "spark-agent.service"
    path.write_text(text)
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    complaints = [line for line in verified.stderr.splitlines() if path.name in line]
    assert (verified.returncode, complaints) == (0, [])
