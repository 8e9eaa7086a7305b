"""Starting the real service and agent as processes, the way a person would, and ending them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spark_agent.errors import SparkError

__all__ = ["Sandbox"]

_STOP_S = 20.0


class Sandbox:
    """Folders and environment of one demo: nothing of the person's own configuration is read or changed."""

    def __init__(self, home: Path, team_key: bytes) -> None:
        self.home = home
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARKMOE_")}
        # Nothing is tracked: the demo's service is this machine's own, in this folder.
        kept.pop("DO_NOT_TRACK", None)
        # The cache stays the person's: it only holds what any of their runs would build again.
        folders = {f"XDG_{kind.upper()}_HOME": str(home / kind) for kind in ("config", "state", "data")}
        self.environment: dict[str, str] = kept | folders | {"SPARKMOE_TEAM_KEY": team_key.hex()}

    def run(self, module: str, *arguments: str, watch: bool = False) -> dict[str, Any]:
        """Run a command to its end and return its JSON object.

        Its messages are shown only if it fails, or as they come with ``watch`` (for progress bars).
        """
        command = [*_entry(module), *arguments]
        done = subprocess.run(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=None if watch else subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            sys.stderr.write((done.stderr or b"").decode(errors="replace"))
            raise SparkError(f"`{module} {' '.join(arguments)}` ended with exit code {done.returncode}", "see above")
        return dict(json.loads(done.stdout)) if done.stdout.strip() else {}

    @contextmanager
    def serving(self, module: str, *arguments: str) -> Iterator[Mapping[str, Any]]:
        """Run a server while the block runs; yields its start-up object. Its log is shown if it does not start."""
        command = [*_entry(module), *arguments]
        log = self.home / f"{module}.log"
        with (
            log.open("wb") as messages,
            subprocess.Popen(
                command, env=self.environment, stdout=subprocess.PIPE, stderr=messages, stdin=subprocess.DEVNULL
            ) as process,
        ):
            try:
                line = process.stdout.readline() if process.stdout is not None else b""
                if not line:
                    sys.stderr.write(log.read_text(errors="replace"))
                    raise SparkError(f"`{module} {' '.join(arguments)}` ended before it was ready", "see above")
                yield json.loads(line)
            finally:
                process.terminate()
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _entry(module: str) -> Sequence[str]:
    """The package's command in this interpreter: the same code as its script, whatever PATH says."""
    return [sys.executable, "-c", f"from {module} import main; main()"]
