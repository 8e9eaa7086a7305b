"""llama-cpp-python, built once from its locked source archive and kept in a cache outside the clone.

The cache is `$XDG_CACHE_HOME/spark/wheels/<key>/`, with the archive's headers beside the wheel. The key covers
everything that decides what the build makes, the processor's features included, because ggml compiles for the processor
that it is built on.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

from llama_headers import are_whole, extract_headers
from setup_console import SetupError, clear_folder, exclusive, run_logged, say

NAME = "llama-cpp-python"
BUILD_OPTIONS = ("-DLLAVA_BUILD=OFF",)
C_COMPILERS = ("cc", "gcc", "clang")
CXX_COMPILERS = ("c++", "g++", "clang++")
#: Variables of the user's that CMake or the compilers read.
BUILD_VARIABLES = ("CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAARCHS", "CUDAFLAGS")


def parse_lock(text: str) -> tuple[str, str]:
    """Return the version and the archive's hash that the lock file names."""
    found = re.search(rf"^{re.escape(NAME)}==(\S+) \\\n\s+--hash=sha256:([0-9a-f]{{64}})\s*$", text, re.MULTILINE)
    if not found:
        raise SetupError(f"the lock of {NAME} does not name one version with one hash", "restore it, or: make lock")
    return found[1], found[2]


def parse_ninja_step(line: str) -> tuple[int, int] | None:
    """Read ninja's `[done/total]` at the start of a line."""
    found = re.match(r"\s*\[(\d+)/(\d+)\] ", line)
    return (int(found[1]), int(found[2])) if found else None


def compiler_command(variable: str, names: tuple[str, ...]) -> str | None:
    """Return the compiler that CMake will take: the environment's choice, else the first that exists."""
    chosen = os.environ.get(variable, "")
    words = shlex.split(chosen)
    if words:
        return chosen if shutil.which(words[0]) else None
    return next((name for name in names if shutil.which(name)), None)


def compiler_version(command: str | None) -> str:
    """Return the first line that the compiler prints about itself."""
    if command is None:
        return "none"
    answer = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0] or f"exit status {answer.returncode}"


def processor_features(cpuinfo: str) -> str:
    """Return the instruction-set flags of /proc/cpuinfo: `flags` on x86, `Features` on Arm."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return " ".join(sorted(set(found[1].split()))) if found else ""


def without_comments(cmake: str) -> str:
    """Return a CMake file without its comment lines, so that a better comment does not cost a build."""
    return "\n".join(line for line in cmake.splitlines() if not line.lstrip().startswith("#"))


def wheel_key(ingredients: Mapping[str, str]) -> str:
    """Return a short name for everything that decides what the build makes."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:20]


def is_whole(wheel: Path) -> bool:
    """Tell whether a wheel can be read to its end and holds the library."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            has_library = any(name.startswith("llama_cpp/lib/libllama.") for name in archive.namelist())
            return has_library and archive.testzip() is None
    except (zipfile.BadZipFile, EOFError):
        return False


def cache_root() -> Path:
    """Return our folder in the user's cache. The XDG rules say to ignore a relative setting."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "spark"


class LlamaWheel:
    """The wheel that this clone needs on this machine: its key, its place in the cache, and how to build it."""

    def __init__(self, root: Path) -> None:
        self._lock = root / "infra/lock/llama-cpp-python.txt"
        self._tools_lock = root / "infra/lock/build.txt"
        self._include = root / "infra/dev/llama-cpp-python.cmake"
        self.version, archive_hash = parse_lock(self._lock.read_text(encoding="utf-8"))
        self._c_compiler = compiler_command("CC", C_COMPILERS)
        self._cxx_compiler = compiler_command("CXX", CXX_COMPILERS)
        cpuinfo = Path("/proc/cpuinfo")
        # No Python version: the wheel holds plain shared libraries and is tagged py3-none.
        self.ingredients = {
            "version": self.version,
            "archive": archive_hash,
            "options": " ".join(BUILD_OPTIONS),
            "user options": os.environ.get("CMAKE_ARGS", ""),
            "user variables": " ".join(f"{name}={os.environ[name]}" for name in BUILD_VARIABLES if name in os.environ),
            "include": without_comments(self._include.read_text(encoding="utf-8")),
            "C compiler": compiler_version(self._c_compiler),
            "C++ compiler": compiler_version(self._cxx_compiler),
            "machine": f"{platform.system()} {platform.machine()}",
            "processor": processor_features(cpuinfo.read_text(encoding="utf-8")) if cpuinfo.exists() else "",
        }
        self.key = wheel_key(self.ingredients)
        self._folder = cache_root() / "wheels" / self.key

    def cached(self) -> Path | None:
        """Return the wheel in the cache, if there is a whole one."""
        return next((path for path in sorted(self._folder.glob("*.whl")) if is_whole(path)), None)

    def require_compilers(self) -> None:
        """Raise unless the wheel is in the cache or could be built."""
        if self.cached():
            return
        for command, variable, package in (
            (self._c_compiler, "CC", "gcc"),
            (self._cxx_compiler, "CXX", "g++"),
        ):
            if command is None:
                chosen = f" ({variable}={os.environ[variable]})" if os.environ.get(variable) else ""
                message = (
                    f"no {'C++' if variable == 'CXX' else 'C'} compiler found{chosen}: {NAME} is built from source"
                )
                raise SetupError(message, f"on Debian: apt-get install {package}; or name yours in {variable}")

    def build(self, python: Path, environment: Mapping[str, str], keep_open: int) -> Path:
        """Return the cached wheel, and build it first if need be, with the given Python's pip."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with exclusive(self._folder / "lock", f"building {NAME}") as descriptor:
            if wheel := self.cached():
                say(f"using {NAME} {self.version} built earlier ({wheel.parent})")
                return wheel
            for damaged in self._folder.glob("*.whl"):
                say(f"{damaged} is damaged and will be built again")
                damaged.unlink()
            log = self._folder / "build.log"
            archive, environment = self._fetch(log, python, environment, (descriptor, keep_open))
            self._keep_headers(archive)
            built = self._build(log, archive, python, environment, (descriptor, keep_open))
            # Last, so that a wheel that is in its place is finished; its folder is on the same file system.
            wheel = self._folder / built.name
            built.replace(wheel)
            shutil.rmtree(self._part)
        return wheel

    def headers(self, python: Path, environment: Mapping[str, str], keep_open: int) -> Path:
        """Return the folder with the archive's headers; fetch the archive if only the wheel is in the cache."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with exclusive(self._folder / "lock", f"building {NAME}") as descriptor:
            if not are_whole(self._headers):
                log = self._folder / "headers.log"
                archive, _ = self._fetch(log, python, environment, (descriptor, keep_open))
                self._keep_headers(archive)
                shutil.rmtree(self._part)
        return self._headers

    @property
    def _part(self) -> Path:
        return self._folder / "part"

    @property
    def _headers(self) -> Path:
        return self._folder / "headers"

    def _keep_headers(self, archive: Path) -> None:
        extracted = self._part / "headers"
        extract_headers(archive, extracted)
        shutil.rmtree(self._headers, ignore_errors=True)
        extracted.replace(self._headers)

    def _fetch(
        self, log: Path, python: Path, environment: Mapping[str, str], keep_open: tuple[int, ...]
    ) -> tuple[Path, dict[str, str]]:
        """Fetch build tools and archive into an emptied folder; return the archive, and the environment for a build.

        pip asks an archive's build tools about it even if it is only to download it.
        """
        self._part.mkdir(exist_ok=True)
        clear_folder(self._part)
        tools, temporary, archives = (self._part / name for name in ("tools", "tmp", "archive"))
        temporary.mkdir()
        log.write_text(json.dumps(self.ingredients, indent=1) + "\n", encoding="utf-8")
        pip = [str(python), "-m", "pip"]

        # The build tools come from a lock with hashes too, which pip's own build isolation could not check; CMake and
        # ninja are among them, so that none on the machine is needed.
        environment = {**environment, "TMPDIR": str(temporary)}
        arguments = ["--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(self._tools_lock)]
        run_logged(
            [*pip, "install", "--target", str(tools), *arguments],
            label="fetching the build tools",
            log=log,
            environment=environment,
            keep_open=keep_open,
        )
        environment |= {
            "PYTHONPATH": str(tools),
            "PATH": f"{tools / 'bin'}{os.pathsep}{environment.get('PATH', os.defpath)}",
            # Without these two, scikit-build-core takes what the running Python was compiled with.
            "CC": self._c_compiler or "",
            "CXX": self._cxx_compiler or "",
            "CMAKE_ARGS": self._cmake_arguments(),
            "CMAKE_BUILD_PARALLEL_LEVEL": environment.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(usable_cores()),
        }
        source = ["--no-deps", "--no-build-isolation", "--no-binary", NAME]
        run_logged(
            [*pip, "download", *source, "--require-hashes", "-d", str(archives), "-r", str(self._lock)],
            label=f"fetching {NAME} {self.version} (77 MB)",
            log=log,
            environment=environment,
            keep_open=keep_open,
        )
        (archive,) = archives.iterdir()
        return archive, environment

    def _build(
        self, log: Path, archive: Path, python: Path, environment: Mapping[str, str], keep_open: tuple[int, ...]
    ) -> Path:
        wheels = self._part / "wheel"
        # Without pip's cache: it would give back a wheel that was built earlier with other options.
        source = ["--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "--no-binary", NAME]
        run_logged(
            [str(python), "-m", "pip", "-v", "wheel", *source, "-w", str(wheels), str(archive)],
            label=f"building {NAME} {self.version} (about 4 CPU-minutes, once)",
            log=log,
            read_step=parse_ninja_step,
            environment=environment,
            keep_open=keep_open,
        )
        (wheel,) = wheels.glob("*.whl")
        if not is_whole(wheel):
            raise SetupError(f"the build of {NAME} made a wheel without its library; full log: {log}", "try again")
        return wheel

    def _cmake_arguments(self) -> str:
        # The user's come last, so that they win.
        ours = [*BUILD_OPTIONS, f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={self._include}"]
        return f"{shlex.join(ours)} {self.ingredients['user options']}".strip()


def usable_cores() -> int:
    """Return how many cores this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
