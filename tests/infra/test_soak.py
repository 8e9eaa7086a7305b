"""What the soak says of memory is what the processes have."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

MANY = 64 * 2**20
_PROGRAM = f"""
import subprocess, sys
held = bytearray({MANY})
held[::4096] = b"x" * len(held[::4096])
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print("ready", flush=True)
sys.stdin.read()
child.communicate(b"")
"""


@pytest.fixture(scope="module")
def watch(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("process_watch", root / "infra/benchmarks/process_watch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["process_watch"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_a_process_and_its_children_are_seen(
    watch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "SAMPLE_S", 0.02)
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        watching = watch.Watch(process.pid)
        watching.start()
        while len(watching.samples) < 12 and watching.is_alive():
            time.sleep(0.01)
        watching.stop()
        process.communicate(b"")
    for sample in watching.samples:
        assert MANY < sample.anonymous_bytes < 2 * MANY
        assert (sample.children, sample.threads) == (1, 1)
        assert 0 < sample.heap_bytes < sample.anonymous_bytes
        assert sample.open_files >= 3
    assert max(sample.children_anonymous_bytes for sample in watching.samples) in range(1, MANY)
    inside = tmp_path / "inside"
    inside.write_text(
        json.dumps({"at": watching.samples[0].at, "heap_in_use_bytes": 7, "heap_free_bytes": 1, "python_blocks": 2})
    )
    quarters = watch.of_quarters(watching.samples, inside)
    assert [quarter["children"] for quarter in quarters] == [1, 1, 1, 1]
    assert [quarter.get("heap_in_use_bytes_median") for quarter in quarters] == [7, None, None, None]
    assert watch.of_quarters([], inside) == []


def test_what_is_in_use_is_told_from_inside(root: Path, tmp_path: Path) -> None:
    program = root / "infra/benchmarks/agent_inside.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path / "inside", "0.01", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()
    [first, *_] = (tmp_path / "inside").read_text().splitlines()
    sample = json.loads(first)
    assert sample["heap_in_use_bytes"] > 2**19
    assert sample["python_blocks"] > 1000
