"""The exported JSON Schemas and the modules' public names are what the code says."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import spark_agent
import spark_runtime
import spark_schemas
import spark_service

ROOT = Path(__file__).parents[2]
MODULES = [
    module.name
    for package in (spark_schemas, spark_runtime, spark_agent, spark_service)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]


@pytest.mark.parametrize("generator", ["generate_schemas.py", "generate_cli_reference.py"])
def test_generated_files_are_up_to_date(generator: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "infra/dev" / generator), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_sorted_and_real(name: str) -> None:
    if name.endswith("__main__"):
        return
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", None)
    if exported is None:
        return
    assert all(hasattr(module, entry) for entry in exported)
    # ruff's order (RUF022): constants, classes, then functions.
    assert exported == sorted(exported, key=lambda entry: (not entry.isupper(), not entry[0].isupper(), entry))
