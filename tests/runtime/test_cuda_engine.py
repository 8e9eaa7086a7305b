"""The host's side of the CUDA engine, on a card that is the processor: what it points where, brings and counts.

Streams and graphs need a GPU (tests/gpu), the kernels are tested by test_kernels.py. Here everything happens at once
but what is fetched early, which comes as late as it may: a layer brought to the wrong place, a part left out, an id not
remapped or an expert not waited for changes the logits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_architectures import ModelSize
from small_models import write_small_model

from spark_runtime.native.cache import PACKAGE

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parents[1] / "infra/benchmarks"
ENSURE, MARK, GATHER, TALLY, CHOOSE_EARLY, COPY_EARLY, LEARN = range(1, 8)
SIZE = ModelSize(embedding=128, width=128, vocabulary=64)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the card."""
    built = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    source = HERE / "fake_cuda/fake_cuda.cpp"
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, *flags, f"-I{PACKAGE}", "-Wl,-soname,libcuda.so.1", "-o", str(built), str(source)]
    subprocess.run(command, check=True, timeout=600)
    return built


def runs(fake: Path, model: Path, where: str, **environment: str) -> list[dict[str, Any]]:
    """All resident, then 100, 60, 31% and the fewest slots, then 60 and 31% with some and all guesses fetched early."""
    command = [sys.executable, str(HERE / "fake_cuda/run.py"), str(fake), str(model), str(BENCHMARKS), where]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=os.environ | environment
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    result: list[dict[str, Any]] = json.loads(answer.stdout)
    return result


# Biases and scales; layers that choose 4 or 5 experts; fused gate_up; two classes of layers would need other types.
@pytest.mark.parametrize("architecture", ["gpt-oss", "nemotron_h_moe", "qwen3moe", "deepseek2", "llama4"])
def test_bits_and_counts_are_those_of_the_host(architecture: str, fake: Path, tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model.gguf", architecture, SIZE)
    on_card, on_host = runs(fake, model, "card"), runs(fake, model, "processor")
    assert {run["logits"] for run in [*on_card, *on_host]} == {on_host[0]["logits"]}
    for card, host in zip(on_card[1:], on_host[1:], strict=True):
        assert (card["engine"], host["engine"]) == ("cuda", "host")
        for what in ("turns", "counts", "tokens", "cold", "loads", "early", "guesses", "reuse", "resident"):
            assert card[what] == host[what], what
    assert len({run["turns"] for run in on_card[-4:]}) == 1, "however much was fetched early"
    whole, _, few, floor, *early = (run["launches"] for run in on_card[1:])
    assert whole[ENSURE] == whole[GATHER] == 0 < whole[MARK]
    assert min(few[ENSURE], few[GATHER], few[MARK], few[TALLY]) > 0
    assert floor[GATHER] >= few[GATHER]
    assert few[CHOOSE_EARLY] == few[LEARN] == 0 < min(min(run[CHOOSE_EARLY], run[LEARN]) for run in early)
    assert all(run[CHOOSE_EARLY] == run[COPY_EARLY] for run in early)
    assert any(sum(run["early"][0]["decode"]) > 0 for run in on_card[-4:])


def test_memory_that_cannot_be_locked_leaves_the_host_to_fetch(fake: Path, tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model.gguf", "gpt-oss", SIZE)
    result = runs(fake, model, "card", FAKE_CUDA_CANNOT_LOCK="1")
    assert {run["logits"] for run in result} == {result[0]["logits"]}
    assert {run["engine"] for run in result[1:]} == {"host"}
    assert all(not any(run["launches"]) for run in result)
