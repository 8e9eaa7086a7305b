"""Small models in tiers, and the fingerprint of what they compute: what several tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from small_architectures import ModelSize

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.tier_start import uniform_start

__all__ = ["OPTIONS", "SIZE", "digest", "load"]

SIZE = ModelSize(embedding=128, width=96, latent=64, vocabulary=64)
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_batch": 32, "n_threads": 1}


def load(path: Path, residency: float = 0.4, **options: Any) -> Engine:
    start = uniform_start(read_model_shape(path), residency)
    return Engine.load(path, EngineOptions(**OPTIONS | {"tier": start} | options))


def digest(engine: Engine, tokens: int = 24, seed: int = 0, between: Callable[[], None] = lambda: None) -> str:
    """Of all logits after a prompt and after each of some random tokens."""
    rng, found = np.random.default_rng(seed), hashlib.sha256()
    engine.reset()
    engine.prompt(rng.integers(0, SIZE.vocabulary, 40).tolist())
    for token in rng.integers(0, SIZE.vocabulary, tokens).tolist():
        found.update(engine.logits().tobytes())
        between()
        engine.feed([token], "decode")
    return found.hexdigest()
