"""Generated files, public names and drawn error trees are what the code says."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import spark_agent
import spark_runtime
import spark_schemas
import spark_service

MODULES = [
    module.name
    for package in (spark_schemas, spark_runtime, spark_agent, spark_service)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]


@pytest.mark.parametrize(
    "generator",
    ["generate_schemas.py", "generate_cli_reference.py", "generate_configuration.py", "generate_openapi.py"],
)
def test_generated_files_are_up_to_date(root: Path, generator: str) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "infra/dev" / generator), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_sorted_real_and_complete(name: str) -> None:
    if name.endswith("__main__"):
        return
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", None)
    if exported is None:
        return
    assert all(hasattr(module, entry) for entry in exported)
    defined = {
        entry
        for entry, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == name
    }
    # Commands are reached through the app that they are registered with.
    hidden = {entry for entry in defined if entry.startswith("_") or entry.endswith("_command")}
    assert name.endswith(".cli") or defined - hidden <= set(exported)
    # ruff's order (RUF022): constants, classes, then functions.
    assert exported == sorted(exported, key=lambda entry: (not entry.isupper(), not entry[0].isupper(), entry))


@pytest.mark.parametrize("package", [spark_runtime, spark_agent, spark_service])
def test_the_error_tree_is_drawn_as_it_is(package: ModuleType) -> None:
    errors = importlib.import_module(f"{package.__name__}.errors")
    drawn, parents, margin = {}, [], 0
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"([│├└─ ]*)(\w+Error)\b", line)
        if found is None:
            continue
        if not drawn:
            margin = len(found[1])
        depth = (len(found[1]) - margin) // len("├── ")
        parents[depth:] = [found[2]]
        drawn[found[2]] = parents[depth - 1] if depth else "Exception"
    assert drawn == {name: getattr(errors, name).__base__.__name__ for name in errors.__all__}
