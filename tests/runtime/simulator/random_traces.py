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


def study_of(**options: Any) -> Study:
    trace = trace_of(7, [40] * 12, n_experts=16)
    return Study(trace, ["a", "b", "c"] * 4, [False] * 9 + [True] * 3, **options)
