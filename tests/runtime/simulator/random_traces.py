"""Routing with tastes: some experts are asked for more often than others."""

from __future__ import annotations

from typing import Any

import numpy as np

from spark_runtime.simulator.study import Study
from spark_runtime.simulator.traces import Trace


def trace_of(seed: int, lengths: list[int], n_experts: int = 8, top_k: int = 2, n_layers: int = 2) -> Trace:
    random = np.random.default_rng(seed)
    taste = random.gumbel(size=(n_layers, 1, n_experts))
    noise = random.gumbel(size=(n_layers, sum(lengths), n_experts))
    ids = np.argsort(-(taste + noise), axis=2)[:, :, :top_k]
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    return Trace(tuple(layer.astype(np.int32) for layer in ids), (n_experts,) * n_layers, offsets)


def related(n_tokens: int, n_layers: int, n_experts: int, top_k: int, sessions: int, seed: int = 0) -> Trace:
    """Layers whose selections tell the next one's; how they do is the same for every number of tokens."""
    model, random = np.random.default_rng(1), np.random.default_rng(seed)
    renamed = np.stack([model.permutation(n_experts) for _ in range(n_layers)])
    topic = random.gumbel(size=(n_tokens, n_experts)) + model.gumbel(size=n_experts)
    scores = topic[:, renamed] + 0.3 * random.gumbel(size=(n_tokens, n_layers, n_experts))
    ids = np.argsort(-scores, axis=2)[:, :, :top_k].astype(np.int32)
    offsets = np.linspace(0, n_tokens, sessions + 1).astype(np.int64)
    return Trace(tuple(ids[:, layer] for layer in range(n_layers)), (n_experts,) * n_layers, offsets)


def study_of(**options: Any) -> Study:
    trace = trace_of(7, [40] * 12, n_experts=16)
    return Study(trace, ["a", "b", "c"] * 4, [False] * 9 + [True] * 3, **options)
