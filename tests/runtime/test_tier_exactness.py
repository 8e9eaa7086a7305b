"""A tiered model computes the bits of one that is wholly resident: every logit of every position, on the CPU.

``infra/benchmarks/exactness.py`` runs the same and more on any machine, and on models that are not in the repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness_runs import CASES, CONTEXT, SEQUENCES, context_for, generate
from quantised_models import TYPES, quantise
from small_architectures import ARCHITECTURES, FUSED, ModelSize
from small_models import write_small_model

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.tier_start import uniform_start

SIZE = ModelSize(embedding=128, width=96, latent=64)
FLOOR = 0.0
"""As few slots as there may be: twice as many as a token selects."""
RESIDENCIES = (1.0, 0.6, 0.31, FLOOR)
OPTIONS: Mapping[str, Any] = {"n_batch": 24, "n_threads": 1, "n_ctx": CONTEXT, "n_seq_max": SEQUENCES}


def digests(engine: Engine, seed: int = 5) -> dict[str, str]:
    """Of each case; no logit may be infinite or no number, which would be equal to anything broken likewise."""
    trails = {case: run(engine, seed) for case, run in CASES.items()}
    assert all(trail.finite for trail in trails.values())
    return {case: trail.sha256 for case, trail in trails.items()}


def resident(path: Path) -> dict[str, str]:
    """Everything on the wrapped device, through the proxy."""
    with Engine.load(path, EngineOptions(**OPTIONS, proxy=True, count_routing=False)) as engine:
        return digests(engine)


def tiered(path: Path, residency: float) -> tuple[dict[str, str], int]:
    """With a share of the experts in slots; the cold hits, too."""
    start = uniform_start(read_model_shape(path), residency)
    with Engine.load(path, EngineOptions(**OPTIONS, tier=start)) as engine:
        return digests(engine), cold_hits(engine)


def cold_hits(engine: Engine) -> int:
    assert engine.tier is not None
    return sum(int(np.sum(layers)) for layers in engine.tier.counters().cold.values())


def check(path: Path, residencies: tuple[float, ...] = RESIDENCIES) -> None:
    expected = resident(path)
    found = {residency: tiered(path, residency) for residency in residencies}
    assert {residency: bits for residency, (bits, _) in found.items()} == dict.fromkeys(residencies, expected)
    for residency, (_, cold) in found.items():
        # Less than everything in slots is a test only where something was missing.
        assert (cold == 0) if residency == 1.0 else (cold > 0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str, tmp_path: Path) -> None:
    check(write_small_model(tmp_path / "model.gguf", architecture, SIZE))


@pytest.mark.parametrize("architecture", sorted(FUSED))
def test_gate_and_up_apart(architecture: str, tmp_path: Path) -> None:
    check(write_small_model(tmp_path / "model.gguf", architecture, SIZE, split=True), (FLOOR,))


@pytest.mark.parametrize("kind", ["f32", "q4_0"])
@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss", "deepseek2", "jamba", "llama4"])
def test_the_proxy_computes_what_llama_does(architecture: str, kind: str, tmp_path: Path) -> None:
    path = write_small_model(tmp_path / "model.gguf", architecture, SIZE)
    if kind != "f32":
        path = quantise(path, tmp_path / "quantised.gguf", kind)
    with Engine.load(path, EngineOptions(**OPTIONS, count_routing=False, repack=False)) as engine:
        expected = digests(engine)
    assert resident(path) == expected


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("architecture", ["qwen3moe", "laguna", "gpt-oss", "deepseek2", "qwen35moe"])
def test_every_weight_type(architecture: str, kind: str, tmp_path: Path) -> None:
    size = ModelSize(experts=16, latent=64)
    source = write_small_model(tmp_path / "model.gguf", architecture, size, changes={"block_count": 2})
    check(quantise(source, tmp_path / "quantised.gguf", kind), (0.6, FLOOR))


@pytest.mark.parametrize("seed", [1, 2])
def test_other_weights_and_tokens(seed: int, tmp_path: Path) -> None:
    check(write_small_model(tmp_path / "model.gguf", "qwen3next", SIZE, seed=seed), (0.31,))


@pytest.fixture(params=["qwen3moe", "gpt-oss", "trained"])
def long_model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "trained":
        return demo_model_path()
    return write_small_model(tmp_path / "model.gguf", request.param, SIZE)


def test_long_texts(long_model: Path) -> None:
    """512 sampled tokens after each of 4 prompts."""
    tokens, prompts = 512, 4
    options: dict[str, Any] = {"n_ctx": context_for(tokens, prompts), "n_batch": 64, "n_threads": 1}
    shape, found = read_model_shape(long_model), {}
    for residency in (None, 0.6, FLOOR):
        how: dict[str, Any] = {"proxy": True} if residency is None else {"tier": uniform_start(shape, residency)}
        with Engine.load(long_model, EngineOptions(**options, **how)) as engine:
            found[residency] = generate(engine, 7, tokens, prompts).sha256
            assert residency is None or cold_hits(engine) > 0
    assert len(set(found.values())) == 1, found
