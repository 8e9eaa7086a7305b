"""Building the native library on first use, into a cache keyed by everything that its binary depends on."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import platformdirs

from spark_runtime.errors import InstallationError
from spark_runtime.ggml import LLAMA_CPP_PYTHON_VERSION

__all__ = ["LIBRARY_NAME", "library_path"]

LIBRARY_NAME = "libspark-native.so"
SOURCES = ("ggml_layout.h", "tap.cpp")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra")
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_S = 120
_SHOWN_LINES = 12


def library_path() -> tuple[Path, str]:
    """The built library, compiled now if it is not in the cache, and the stamp inside it.

    Raises :class:`InstallationError` without a compiler, or with its complaints. Processes that start at once build
    it once. A library that is not what was built, by a killed build or a damaged disk, is built again: loading one can
    end the process.
    """
    compiler = _compiler()
    stamp = _stamp(compiler)
    folder = platformdirs.user_cache_path("spark", appauthor=False) / "native" / stamp
    path = folder / LIBRARY_NAME
    try:
        if not _is_intact(path):
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / "lock"):
                if not _is_intact(path):
                    _compile(compiler, path, stamp)
    except OSError as error:
        raise InstallationError(
            f"cannot build the native library in {folder}: {error.strerror}", "check the folder and its space"
        ) from error
    return path, stamp


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise InstallationError(
        f"no C++ compiler: found none of {wanted or ', '.join(_COMPILERS)}", "install one, e.g. apt-get install g++"
    )


def _stamp(compiler: str) -> str:
    """SHA-256 over sources, flags, compiler, machine and the version whose structures are read."""
    digest = hashlib.sha256()
    for part in (_compiler_version(compiler), platform.machine(), LLAMA_CPP_PYTHON_VERSION, *FLAGS):
        digest.update(f"{part}\n".encode())
    for name in SOURCES:
        digest.update(_sources().joinpath(name).read_bytes())
    return digest.hexdigest()[:32]


@functools.cache
def _compiler_version(compiler: str) -> str:
    try:
        answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallationError(
            f"the C++ compiler {compiler} does not run: {error}", "set CXX to one that does"
        ) from error
    return answer.stdout


def _sources() -> Path:
    return Path(str(files("spark_runtime.native")))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, path: Path, stamp: str) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        sources = [str(_sources() / name) for name in SOURCES if name.endswith(".cpp")]
        command = [compiler, *FLAGS, f'-DSPARK_STAMP="{stamp}"', "-o", str(built), *sources]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise InstallationError(f"{compiler} did not finish within {_COMPILE_S} s", "try again") from error
        if answer.returncode:
            complaints = "\n".join(answer.stderr.strip().splitlines()[:_SHOWN_LINES])
            raise InstallationError(f"{compiler} cannot build the native library:\n{complaints}", "set CXX to another")
        if not built.is_file():
            raise InstallationError(f"{compiler} succeeded and wrote no library", "set CXX to another compiler")
        digest = _digest(built)
        built.replace(path)
        _digest_path(path).write_text(digest)


def _is_intact(path: Path) -> bool:
    try:
        return _digest_path(path).read_text() == _digest(path)
    except FileNotFoundError:
        return False


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
