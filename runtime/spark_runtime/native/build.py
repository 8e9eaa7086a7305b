"""Building the native library on first use, into a cache keyed by everything that its binary depends on."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spark_runtime.errors import InstallationError
from spark_runtime.ggml import LLAMA_CPP_PYTHON_VERSION
from spark_runtime.native.cache import cache_key, complaints, kept, packaged

__all__ = ["LIBRARY_NAME", "library_path"]

LIBRARY_NAME = "libspark-native.so"
#: Without -ffp-contract=off a compiler may fuse a product and a sum on one machine and round twice on another.
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
)
LINK_FLAGS = ("-shared", "-pthread")
LIBRARIES = ("-ldl",)
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_S = 300


def library_path() -> tuple[Path, str]:
    """The built library, compiled now if it is not in the cache, and the stamp inside it.

    Raises :class:`InstallationError` without a compiler, or with its complaints.
    """
    compiler = _compiler()
    stamp = _stamp(compiler)
    return kept(stamp, LIBRARY_NAME, functools.partial(_compile, compiler, stamp)), stamp


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
    """A key over sources, flags, compiler, machine and the version whose structures are read."""
    fixed = (_compiler_version(compiler), platform.machine(), LLAMA_CPP_PYTHON_VERSION, *FLAGS, *LINK_FLAGS, *LIBRARIES)
    return cache_key([*fixed, *(part for path in packaged(".cpp", ".h") for part in (path.name, path.read_bytes()))])


@functools.cache
def _compiler_version(compiler: str) -> str:
    try:
        answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallationError(
            f"the C++ compiler {compiler} does not run: {error}", "set CXX to one that does"
        ) from error
    return answer.stdout


def _compile(compiler: str, stamp: str, path: Path) -> None:
    """Compile the sources side by side and link them; the objects lie beside the library, in its temporary folder."""
    objects = {source: path.with_name(f"{source.stem}.o") for source in packaged(".cpp")}
    compile_one = [compiler, *FLAGS, f'-DSPARK_STAMP="{stamp}"', "-c"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [[*compile_one, "-o", str(made), str(source)] for source, made in objects.items()]
        list(pool.map(_run, commands))
    _run([compiler, *LINK_FLAGS, "-o", str(path), *map(str, objects.values()), *LIBRARIES])
    if not path.is_file():
        raise InstallationError(f"{compiler} succeeded and wrote no library", "set CXX to another compiler")


def _run(command: list[str]) -> None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise InstallationError(f"{command[0]} did not finish within {_COMPILE_S} s", "try again") from error
    if answer.returncode:
        raise InstallationError(
            f"{command[0]} cannot build the native library:\n"
            f"{complaints(answer.stderr) or f'it ended with status {answer.returncode} and said nothing'}",
            "set CXX to another",
        )
