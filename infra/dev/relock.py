"""Write the lock files anew from pyproject.toml.

It is run by `make lock`, or `make lock ARGS=--upgrade` for newer releases.
Without `--upgrade`, uv keeps every pin that still satisfies pyproject.toml.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UV = "uv==0.13.9"
LLAMA = "llama-cpp-python"
# For every Python and system at once; without a header and addresses, which would name the machine that ran this.
SHARED_OPTIONS = (
    "--universal",
    "--generate-hashes",
    "--no-header",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "-q",
)


def llama_requirement(project: str) -> str:
    """Return the exact requirement on llama-cpp-python in pyproject.toml."""
    extras = tomllib.loads(project)["project"]["optional-dependencies"]
    (requirement,) = {line for lines in extras.values() for line in lines if line.startswith(f"{LLAMA}==")}
    return str(requirement)


def compile_lock(uv: Path, output: str, sources: list[str], *options: str, text: str | None = None) -> None:
    """Resolve requirements into one lock file; relative paths, because uv writes them into its comments."""
    command = [str(uv), "pip", "compile", *sources, *SHARED_OPTIONS, "--python-version", "3.11", *options, "-o", output]
    subprocess.run(command, cwd=ROOT, check=True, text=True, input=text, stdout=subprocess.DEVNULL)


def main() -> int:
    """Install the pinned uv in a temporary venv and resolve the lock files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest releases that pyproject.toml allows")
    upgrade = ["--upgrade"] if parser.parse_args().upgrade else []
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="spark-lock-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "-q", UV], check=True)
        uv = Path(folder, "bin/uv")
        everything = ["--extra", "all", "--extra", "ray", "--group", "dev", "--no-emit-package", LLAMA]
        compile_lock(uv, "infra/lock/requirements.txt", ["pyproject.toml"], *everything, *upgrade)
        compile_lock(uv, "infra/lock/build.txt", ["infra/lock/build.in"], *upgrade)
        compile_lock(uv, "infra/lock/npm.txt", ["infra/lock/npm.in"], *upgrade)
        # Of this one only the source archive is locked: it is built here, for the machine's own processor.
        options = ["--no-deps", "--no-binary", LLAMA, "--no-annotate"]
        compile_lock(uv, f"infra/lock/{LLAMA}.txt", ["-"], *options, text=llama_requirement(project) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
