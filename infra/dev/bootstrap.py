"""Make the clone's virtual environment: `make setup`. Needs nothing but Python and a compiler.

The environment is made in four steps, each with a key over what it depends on:

    environment  the venv with every locked package   (Python, the lock, the venv's place)
    llama        llama-cpp-python from the wheel cache (see llama_wheel.py), with llama.cpp's headers
    project      this project, editable               (pyproject.toml, the clone's place)
    assets       what the dashboard's pages load (see web_assets.py), which may fail (its lock, the clone's place)

A step's key is written to a stamp file in the venv after the step, and removed, with those of the later steps, before
it. So a second run with nothing to do only compares keys, and an interrupted run is seen: a venv without the key of
`environment` is made anew, because a package that pip was installing when it was killed cannot be told from a whole
one.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (this file is run by whatever Python the machine has)
    sys.exit(
        f"error: Spark needs Python 3.11 or newer, and this is {sys.version.split()[0]} ({sys.executable})\n"
        "hint: name a newer one: make PYTHON=python3.11 ...; on Debian 12: apt-get install python3 python3-venv"
    )

import hashlib
import importlib.util
import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from llama_headers import HEADERS, PLACE, place_headers
from llama_wheel import LlamaWheel
from setup_console import SetupError, StepReader, clear_folder, exclusive, run_logged, say
from web_assets import WebAssets, place_if_possible

ROOT = Path(__file__).resolve().parents[2]
STAMP = "spark-setup.json"
STAMP_NEW = "spark-setup.json.new"
LOCK = "spark-setup.lock"
LOG = "spark-setup.log"
STEPS = ("environment", "llama", "project", "assets")

#: Settings that would send pip elsewhere than into our venv, or Python to modules that are not in it.
REMOVED_VARIABLES = (
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_TARGET",
    "PIP_USER",
    "PYTHONHOME",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "__PYVENV_LAUNCHER__",
)


def digest(*parts: str) -> str:
    """Return one key for several texts; no text can pass for two."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def wanted_keys(root: Path, venv: Path, wheel_key: str, assets_key: str, python: str) -> dict[str, str]:
    """Return the key that each step must have."""
    lock = (root / "infra/lock/requirements.txt").read_text(encoding="utf-8")
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    # The places are in the keys because both are written into the venv: a copied clone must not run the original's.
    return {
        "environment": digest(python, str(venv), lock),
        "llama": digest(wheel_key, PLACE, *HEADERS),
        "project": digest(str(root), project),
        "assets": digest(str(root), assets_key),
    }


def read_stamp(venv: Path) -> dict[str, str]:
    """Return the keys of the steps that are done."""
    if not (venv / "bin/python").exists():
        return {}  # exists() follows the link to the base Python, which may have been removed since
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {str(step): str(key) for step, key in stamp.items()} if isinstance(stamp, dict) else {}


def current_steps(venv: Path, assets: WebAssets) -> dict[str, str]:
    """Return the keys of the steps that are done and still hold: assets lie in the clone, where git may clean."""
    return {step: key for step, key in read_stamp(venv).items() if step != "assets" or assets.in_place()}


def write_stamp(venv: Path, keys: Mapping[str, str]) -> None:
    """Replace the stamp in one step, so that no reader sees half of it."""
    temporary = venv / STAMP_NEW
    temporary.write_text(json.dumps(keys, indent=1) + "\n", encoding="utf-8")
    temporary.replace(venv / STAMP)


def missing_steps(done: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[str, ...]:
    """Return the steps to run, in order: the first whose key differs, and all after it."""
    first = next((place for place, step in enumerate(STEPS) if done.get(step) != wanted[step]), len(STEPS))
    return STEPS[first:]


def require_own_folder(venv: Path) -> None:
    """Raise if the venv's folder holds something that this program did not put there."""
    if not venv.exists():
        return
    if not venv.is_dir():
        raise SetupError(f"{venv} is not a folder", "remove it, or name another place in SPARKMOE_VENV")
    names = {entry.name for entry in venv.iterdir()}
    if STAMP not in names and not names <= {LOCK, STAMP_NEW}:
        raise SetupError(
            f"{venv} exists and was not made by this set-up",
            "remove it, or name another place in SPARKMOE_VENV",
        )


def require_venv_module() -> None:
    """Raise if this Python cannot make virtual environments: Debian packages that apart."""
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"this Python ({sys.executable}) cannot make virtual environments",
            f"on Debian: apt-get install python3-venv (or python{version}-venv)",
        )


def child_environment() -> dict[str, str]:
    """Return the environment for pip: the user's proxies, indexes and certificates, but our venv."""
    environment = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
    environment |= {"PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    environment.setdefault("PIP_DEFAULT_TIMEOUT", "60")
    environment.setdefault("PIP_RETRIES", "5")
    return environment


def count_requirements(lock: str) -> int:
    """Return how many packages a lock pins."""
    return len(re.findall(r"^[A-Za-z0-9][^\s=]*==", lock, re.MULTILINE))


def package_counter(total: int) -> StepReader:
    """Return a reader of pip's lines that counts the packages it has dealt with."""
    done = 0

    def read(line: str) -> tuple[int, int] | None:
        nonlocal done
        if not line.startswith(("Collecting ", "Ignoring ", "Processing ")):
            return None
        done = min(done + 1, total)
        return done, total

    return read


class Setup:
    """The steps that make the virtual environment."""

    def __init__(self, root: Path, venv: Path, wheel: LlamaWheel, assets: WebAssets) -> None:
        self._root = root
        self._venv = venv
        self._wheel = wheel
        self._assets = assets
        self._environment = child_environment()
        self._lock_descriptor = -1

    def run(self, wanted: Mapping[str, str]) -> None:
        """Run the steps that are missing."""
        require_own_folder(self._venv)
        require_venv_module()
        self._wheel.require_compilers()
        self._venv.mkdir(parents=True, exist_ok=True)
        with exclusive(self._venv / LOCK, f"setting up {self._venv}") as self._lock_descriptor:
            done = current_steps(self._venv, self._assets)  # again: another process may just have finished
            steps = missing_steps(done, wanted)
            done = {step: key for step, key in done.items() if step not in steps}
            write_stamp(self._venv, done)
            make: dict[str, Callable[[], bool | None]] = {
                "environment": self._make_environment,
                "llama": self._make_llama,
                "project": self._make_project,
                "assets": self._make_assets,
            }
            for step in steps:
                if make[step]() is False:
                    continue  # could not be done, and is not needed: the next run tries again
                done[step] = wanted[step]
                write_stamp(self._venv, done)

    @property
    def _python(self) -> str:
        return str(self._venv / "bin/python")

    def _make_environment(self) -> None:
        clear_folder(self._venv, keep=(STAMP, LOCK))
        # Resolved: this program may be running from the very venv that was just cleared.
        interpreter = str(Path(sys.executable).resolve())
        label = f"creating {self._venv.name} with Python {sys.version.split()[0]}"
        self._run(label, interpreter, "-m", "venv", str(self._venv))
        lock = self._root / "infra/lock/requirements.txt"
        total = count_requirements(lock.read_text(encoding="utf-8"))
        self._pip(
            f"installing {total} locked packages",
            *("--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(lock)),
            read_step=package_counter(total),
        )

    def _make_llama(self) -> None:
        wheel = self._wheel.build(Path(self._python), self._environment, self._lock_descriptor)
        headers = self._wheel.headers(Path(self._python), self._environment, self._lock_descriptor)
        self._pip("installing llama-cpp-python", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
        try:
            self._run("loading llama-cpp-python", self._python, "-c", "import llama_cpp")
        except SetupError as error:
            error.hint = f"remove {wheel.parent} so that it is built again, then run the same command again"
            raise
        place_headers(headers, self._venv)

    def _make_project(self) -> None:
        arguments = ("--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall", "-e", str(self._root))
        self._pip("installing the project, editable", *arguments)

    def _make_assets(self) -> bool:
        return place_if_possible(self._assets, Path(self._python), self._environment, self._lock_descriptor)

    def _pip(self, label: str, *arguments: str, read_step: StepReader | None = None) -> None:
        self._run(label, self._python, "-m", "pip", "install", *arguments, read_step=read_step)

    def _run(self, label: str, *command: str, read_step: StepReader | None = None) -> None:
        run_logged(
            command,
            label=label,
            log=self._venv / LOG,
            read_step=read_step,
            environment=self._environment,
            keep_open=(self._lock_descriptor,),
        )


def venv_folder(root: Path) -> Path:
    """Return where the venv is: `.venv` in the clone, or what SPARKMOE_VENV names (relative to the clone)."""
    return (root / (os.environ.get("SPARKMOE_VENV") or ".venv")).resolve()


def stop(_number: int, _frame: FrameType | None) -> None:
    """End on SIGTERM as on Ctrl-C, and end the programs we started without being disturbed by a second signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    """Make the environment, or find that there is nothing to do."""
    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # ignored by the shell for a background job
        signal.signal(signal.SIGINT, stop)
    try:
        wheel = LlamaWheel(ROOT)
        assets = WebAssets(ROOT)
        venv = venv_folder(ROOT)
        wanted = wanted_keys(ROOT, venv, wheel.key, assets.key, sys.implementation.cache_tag)
        if missing_steps(current_steps(venv, assets), wanted):
            Setup(ROOT, venv, wheel, assets).run(wanted)
            say(f"ready: {venv}")
    except SetupError as error:
        print(f"error: {error}", *([f"hint: {error.hint}"] if error.hint else []), sep="\n", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: the set-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
