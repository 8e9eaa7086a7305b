"""The import contracts of pyproject.toml hold, and would be seen to break."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SOURCES = ("schemas", "runtime", "agent", "service")
LINT = Path(sys.executable).parent / "lint-imports"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages of a folder, whatever is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder / source) for source in SOURCES)}
    command = [str(LINT), "--no-cache", "--config", "pyproject.toml"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_contracts_hold(root: Path) -> None:
    answer = lint(root)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_module_of_the_runtime_is_pure_or_closed_to_the_service(root: Path) -> None:
    """A new module is neither by itself: without this the list would go stale in silence."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [closed] = [c for c in contracts if c["name"].startswith("the service uses only the pure modules")]
    [pure] = [c for c in contracts if c["name"].startswith("pure modules")]
    package = root / "runtime/spark_runtime"
    names = {entry.stem for entry in package.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").is_file()}
    listed = {*closed["forbidden_modules"], *pure["source_modules"]}
    assert {f"spark_runtime.{name}" for name in names - {"__init__"}} == listed


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    for source in SOURCES:
        shutil.copytree(root / source, tmp_path / source, ignore=lambda folder, names: [
            name for name in names if not name.endswith(".py") and not Path(folder, name).is_dir()
        ])  # fmt: skip
    shutil.copy(root / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("schemas/spark_schemas/planted.py", "spark_runtime.placement"),
        ("runtime/spark_runtime/planted.py", "spark_service"),
        ("agent/spark_agent/planted.py", "spark_service"),
        ("agent/spark_agent/planted.py", "httpx"),
        ("service/spark_service/planted.py", "spark_agent"),
        ("service/spark_service/planted.py", "spark_runtime.engine"),
    ],
)
def test_planted_import_is_caught(copy: Path, module: str, imported: str) -> None:
    (copy / module).write_text(f"import {imported}\n", encoding="utf-8")
    answer = lint(copy)
    assert answer.returncode == 1
    planted = ".".join(Path(module).with_suffix("").parts[1:])
    assert f"{planted} -> {imported}" in answer.stdout, answer.stdout + answer.stderr
