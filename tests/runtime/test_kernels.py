"""The kernels themselves, on the processor, beside the slot policy on the host: the same decisions, scores and counts.

A GPU runs them in tests/gpu. Here every slot's bytes are looked at after every call, while copies that were begun early
are late, just in time or not even begun, which no test on a card can choose.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from spark_runtime.native.cache import PACKAGE

HERE = Path(__file__).resolve().parent / "emulated_kernels"
THREADS, CHUNK_BYTES = 32, 64
"""Of a block, and of one chunk of an expert: as small as they may be, so that small experts have many."""
STEPS = 40


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that runs them."""
    folder = tmp_path_factory.mktemp("kernels")
    dynamic = "extern __shared__ uint32_t stamps[];"
    kernels = (PACKAGE / "kernels.cu").read_text()
    assert kernels.count("extern __shared__") == kernels.count(dynamic) == 1
    (folder / "kernels_emulated.h").write_text(kernels.replace(dynamic, "uint32_t * stamps = dynamic_shared;"))
    built = folder / "trial"
    flags = [
        "-std=c++17",
        "-O1",
        "-pthread",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
    ]
    sizes = [f"-DSPARK_BLOCK_THREADS={THREADS}", f"-DSPARK_CHUNK_BYTES={CHUNK_BYTES}"]
    sources = [HERE / "run.cpp", *(PACKAGE / name for name in ("slots.cpp", "predictor.cpp", "guess_loops.cpp"))]
    command = [os.environ.get("CXX", "c++"), *flags, *sizes, f"-I{PACKAGE}", f"-I{HERE}", f"-I{folder}"]
    subprocess.run([*command, "-o", str(built), *map(str, sources)], check=True, timeout=300)
    return built


def run(trial: Path, seed: int) -> dict[str, int]:
    answer = subprocess.run(
        [str(trial), str(seed), str(STEPS)], capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == 0, f"seed {seed}: {answer.stdout}{answer.stderr}"
    counted: dict[str, int] = json.loads(answer.stdout)
    return counted


def test_kernels_decide_and_copy_as_the_policy_says(trial: Path) -> None:
    totals: dict[str, int] = {}
    for seed in range(14):
        for name, count in run(trial, seed).items():
            totals[name] = totals.get(name, 0) + count
    # Enough of everything: experts fetched early that were there when a router chose, and such as were on their way.
    assert min(totals.values()) > 50, totals
