"""The shape of the repository: folders, module sizes, commands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

PACKAGES = {
    "agent": "spark_agent",
    "runtime": "spark_runtime",
    "schemas": "spark_schemas",
    "service": "spark_service",
}
MOST_LINES = 500


@pytest.mark.parametrize("folder", PACKAGES)
def test_one_python_folder(root: Path, folder: str) -> None:
    """An editable install puts these folders on sys.path, so anything beside the package could be imported."""
    importable = {path.relative_to(root / folder).parts[0] for path in (root / folder).rglob("*.py")}
    assert importable == {PACKAGES[folder]}


def test_module_size(root: Path, tracked: list[Path]) -> None:
    sizes = {
        str(path): len((root / path).read_text(encoding="utf-8").splitlines())
        for path in tracked
        if path.parts[0] in PACKAGES and path.suffix in {".py", ".cpp", ".cu", ".h", ".js", ".sql"}
    }
    assert {path: lines for path, lines in sizes.items() if lines > MOST_LINES} == {}


def test_make_help_lists_every_command(root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    answer = subprocess.run(["make", "-s"], cwd=root, capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  (\w+) +\S", answer, re.MULTILINE)
    assert listed == phony.split()
    assert {"help", "setup", "demo", "test", "check", "format", "lock", "clean"} <= set(listed)


def test_ci_script_can_be_run(root: Path) -> None:
    script = root / ".ci/run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False).stderr == ""
