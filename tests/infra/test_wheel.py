"""What a built wheel holds: the four packages with their data, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("schemas/spark_schemas", "runtime/spark_runtime", "agent/spark_agent", "service/spark_service")
DATA = {".sql", ".md", ".gguf", ".typed", ".cpp", ".cu", ".h", ".json", ".html", ".js", ".css", ".svg", ".txt"}


@pytest.fixture(scope="module")
def contents(root: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_tracked_file_is_in_it(contents: set[str], tracked: list[Path]) -> None:
    expected = {
        path.relative_to(path.parts[0]).as_posix()
        for path in tracked
        if any(path.is_relative_to(package) for package in PACKAGES)
    }
    assert expected - contents == set()


def test_package_data(root: Path, contents: set[str]) -> None:
    on_disk = {
        path.relative_to((root / package).parent).as_posix()
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.suffix in DATA
    }
    assert {f"{Path(package).name}/py.typed" for package in PACKAGES} <= on_disk
    assert on_disk - contents == set()


def test_nothing_else(contents: set[str]) -> None:
    names = {Path(package).name for package in PACKAGES}
    others = {name for name in contents if name.split("/")[0] not in names}
    assert {name.split("/")[0].partition("-")[0] for name in others} == {"spark_moe"}
    assert all(".dist-info/" in name for name in others)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in others)
    assert not [name for name in contents if "__pycache__" in name or name.endswith((".pyc", ".so"))]
