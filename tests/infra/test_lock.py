"""The lock files satisfy pyproject.toml, are complete, and name nothing but packages and hashes."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

# PyTorch brings gigabytes for GPUs that few have; what it trains NumPy trains as well.
UNLOCKED = {"predict"}
LOCKS = ("requirements.txt", "build.txt", "npm.txt", "llama-cpp-python.txt")
# Every system that the lock is used on; the machine that runs the test is one of them.
SYSTEMS = [
    {"python_version": version, "python_full_version": f"{version}.2", "sys_platform": "linux",
     "platform_machine": machine, "platform_system": "Linux", "os_name": "posix",
     "platform_python_implementation": "CPython", "implementation_name": "cpython"}
    for version in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]  # fmt: skip


def pins(lock: Path, system: dict[str, str]) -> dict[str, Version]:
    """Return the version that a lock installs on a system, by package."""
    found: dict[str, Version] = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        if not line or line[0] in " #":
            continue
        requirement = Requirement(line.rstrip(" \\"))
        if requirement.marker and not requirement.marker.evaluate(system):
            continue
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{name} is pinned twice"
        found[name] = Version(specifier.version)
    return found


def all_pins(root: Path, system: dict[str, str]) -> dict[str, Version]:
    folder = root / "infra/lock"
    return pins(folder / "requirements.txt", system) | pins(folder / "llama-cpp-python.txt", system)


def unsatisfied(lines: list[str], locked: dict[str, Version], system: dict[str, str]) -> list[str]:
    """Return the requirements that a lock does not meet."""
    wrong = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({**system, "extra": ""}):
            continue
        version = locked.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{line} (locked: {version})")
    return wrong


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "system", SYSTEMS, ids=lambda system: f"{system['python_version']}-{system['platform_machine']}"
)
def test_lock_satisfies_the_project(root: Path, project: dict[str, Any], system: dict[str, str]) -> None:
    lines = [
        *project["project"]["dependencies"],
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]
    extras = project["project"]["optional-dependencies"]
    for extra in (lines for name, lines in extras.items() if name not in UNLOCKED):
        lines += [line for line in extra if canonicalize_name(Requirement(line).name) != project["project"]["name"]]
    assert unsatisfied(lines, all_pins(root, system), system) == []


def test_lock_is_complete(root: Path) -> None:
    """What is installed here in a locked version needs nothing that is not locked."""
    system = SYSTEMS[0]
    locked = all_pins(root, system)
    needed: list[str] = []
    for name, version in locked.items():
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # not for this system
        if Version(distribution.version) == version:
            needed += distribution.requires or []
    assert len(needed) > 20
    assert unsatisfied(needed, locked, system) == []


def test_build_tools_are_locked(root: Path) -> None:
    lines = [
        line
        for line in (root / "infra/lock/build.in").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert unsatisfied(lines, pins(root / "infra/lock/build.txt", SYSTEMS[0]), SYSTEMS[0]) == []


def test_engine_has_its_own_lock(root: Path) -> None:
    """It is installed from its source archive, the others only from wheels."""
    assert "llama-cpp-python" not in pins(root / "infra/lock/requirements.txt", SYSTEMS[0])
    assert list(pins(root / "infra/lock/llama-cpp-python.txt", SYSTEMS[0])) == ["llama-cpp-python"]


@pytest.mark.parametrize("name", LOCKS)
def test_only_packages_and_hashes(root: Path, name: str) -> None:
    text = (root / "infra/lock" / name).read_text(encoding="utf-8")
    assert not re.search(r"://|^-|\s@\s|--(?!hash=sha256:[0-9a-f]{64}\b)", text, re.MULTILINE)
    assert not re.search(r"(?:^|[\s=])/", text, re.MULTILINE), "an absolute path"
    entries = re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]
    assert entries
    assert all("--hash=sha256:" in entry for entry in entries)


def test_a_stale_lock_is_noticed() -> None:
    assert unsatisfied(["numpy>=3"], {"numpy": Version("2.4")}, SYSTEMS[0]) == ["numpy>=3 (locked: 2.4)"]
