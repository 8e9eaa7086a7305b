"""What the tests of the repository itself share."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    """Every file that git tracks and that exists, relative to the root."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git work tree")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in names.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture
def on_setup_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the set-up's modules importable, as they are when bootstrap.py is run as a program."""
    monkeypatch.syspath_prepend(str(ROOT / "infra/dev"))


@pytest.fixture
def llama_wheel(on_setup_path: None) -> ModuleType:
    return importlib.import_module("llama_wheel")


@pytest.fixture
def console(on_setup_path: None) -> ModuleType:
    return importlib.import_module("setup_console")
