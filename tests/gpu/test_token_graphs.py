"""Whole-token CUDA graphs while a conversation grows: each is captured, kept, found again and changed into a later one.

llama.cpp computes with the context rounded up to 256 tokens, so every 256 tokens the graph of a token is another one.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_models import write_small_model

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.tier_start import uniform_start

pytestmark = pytest.mark.gpu

LENGTHS = [256, 512, 768]
BATCHES = [1, 2, 3, 4]
"""Together more graphs than the eight that are kept; in this order none is found again, since the oldest goes first."""


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs a CUDA build of llama-cpp-python and a GPU")


def logits_hash(path: Path, options: EngineOptions) -> str:
    digest = hashlib.sha256()
    with Engine.load(path, options) as engine:
        tokens = [int(token) for token in np.random.default_rng(5).integers(0, engine.n_vocab, engine.n_ctx)]
        for batches in ([1], BATCHES, BATCHES, [2, 1]):
            for batch in batches:
                engine.reset()
                for length in LENGTHS:
                    # Some steps before the next 256 tokens begin, and some after.
                    engine.feed(tokens[engine.n_past : length - 3 * batch], "prefill")
                    for start in range(engine.n_past, length + 3 * batch, batch):
                        engine.feed(tokens[start : start + batch], "decode")
                        digest.update(engine.all_logits().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("residency", [1.0, 0.31])
def test_a_growing_context_keeps_its_bits(residency: float, tmp_path: Path) -> None:
    path = write_small_model(tmp_path / "model.gguf", "qwen3moe")
    size = {"n_ctx": 1024, "n_batch": 256, "n_threads": 1, "devices": 1}
    plain = logits_hash(path, EngineOptions(**size, count_routing=False, repack=False))
    assert logits_hash(path, EngineOptions(**size, tier=uniform_start(read_model_shape(path), residency))) == plain
