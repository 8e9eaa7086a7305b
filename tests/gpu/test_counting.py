"""Counting on a CUDA build of llama.cpp: ids live in device memory, and reading them must change no bit.

The evaluation callback cuts the graph at every multiplication with experts, so kernels that llama.cpp fuses across such
a cut run apart. Whether the bits stay the same is a fact about its kernels, which only a GPU can show.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import InstallationError
from spark_runtime.models import demo_model_path
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_schemas.invariants import check_session

pytestmark = pytest.mark.gpu

SESSION = "cd" * 32
TEXT = Path(__file__).read_text()
DECODE_TOKENS = 512


@pytest.fixture(autouse=True)
def needs_cuda() -> None:
    from spark_runtime.llama import bindings

    try:
        offloads = bool(bindings().llama_supports_gpu_offload())
    except InstallationError as error:
        pytest.skip(str(error))
    if not offloads or shutil.which("nvidia-smi") is None:
        pytest.skip("needs a CUDA build of llama-cpp-python and a GPU")


@pytest.fixture
def models() -> list[Path]:
    beside = Path(__file__).parents[3] / "shared/models"
    return [demo_model_path(), *sorted(beside.glob("*.gguf"))]


def engines(path: Path) -> Iterator[Engine]:
    """Without counting, counting in Python, counting in native code."""
    for counting, native in ((False, False), (True, False), (True, True)):
        options = EngineOptions(n_ctx=1024, n_batch=256, count_routing=counting, native=native)
        with Engine.load(path, options) as engine:
            assert engine.on_gpu
            assert engine.native_fault is None
            yield engine


def logits_hash(engine: Engine, n_prompt: int) -> str:
    tokens = engine.tokenize(TEXT)[:n_prompt]
    digest = hashlib.sha256()
    engine.reset()
    engine.prompt(tokens)
    digest.update(engine.logits().tobytes())
    # Sampled, not greedy: a small model soon repeats itself, and then there is little to compare.
    for _ in engine.generate(Sampling(temperature=1.0, seed=7), DECODE_TOKENS):
        digest.update(engine.logits().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("n_prompt", [1, 40, 400], ids=["one-token", "one-batch", "two-batches"])
def test_counting_changes_no_bit(models: list[Path], n_prompt: int) -> None:
    for path in models:
        hashes = []
        for engine in engines(path):
            with engine.counting(SessionCounts(engine.shape)):
                hashes.append(logits_hash(engine, n_prompt))
        assert len(set(hashes)) == 1, path.name


def test_counts_hold_every_invariant(models: list[Path]) -> None:
    for path in models:
        with Engine.load(path, EngineOptions(n_ctx=1024, n_batch=256)) as engine:
            session = SessionCounts(engine.shape)
            with engine.counting(session):
                logits_hash(engine, 400)
                engine.reset()
                engine.feed(engine.tokenize(TEXT)[:300], "decode", batch=64)
            histogram = session.to_histogram(SESSION, "code-heavy")
            assert histogram is not None
            check_session(histogram, engine.shape)
            assert session.tokens["decode"] >= 300
