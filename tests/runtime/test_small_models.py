"""The generator of small models: deterministic, with routing that spreads, in every weight type."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from quantised_models import TYPES, quantise
from small_architectures import ARCHITECTURES, FUSED, ModelSize
from small_models import write_small_model

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.gguf_file import read_gguf
from spark_runtime.model_shape import expert_tensors, read_model_shape
from spark_runtime.session_counts import SessionCounts

SIZE = ModelSize(embedding=128, width=96, context=256, latent=64)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_there_are_enough_architectures() -> None:
    assert len(ARCHITECTURES) >= 57


def test_a_seed_decides_every_weight(tmp_path: Path) -> None:
    paths = [write_small_model(tmp_path / f"{n}.gguf", "gpt-oss", SIZE, seed=seed) for n, seed in enumerate((1, 1, 2))]
    assert sha256(paths[0]) == sha256(paths[1]) != sha256(paths[2])


def test_no_model_of_an_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown model architecture"):
        write_small_model(tmp_path / "model.gguf", "nonsense", SIZE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_routing_spreads_over_the_experts(architecture: str, tmp_path: Path) -> None:
    path = write_small_model(tmp_path / "model.gguf", architecture, SIZE)
    with Engine.load(path, EngineOptions(n_ctx=256, n_batch=64, n_threads=1)) as engine:
        session = SessionCounts(engine.shape)
        with engine.counting(session):
            engine.feed(np.random.default_rng(3).integers(0, SIZE.vocabulary, 200).tolist(), "decode")
    for layer, counts in zip(engine.shape.layers, session.counts["decode"], strict=True):
        assert layer.n_experts == SIZE.experts
        assert layer.top_k >= SIZE.top_k
        # More than any number of slots below all of them that is tested: something is missing sooner or later.
        assert np.count_nonzero(counts) > 0.7 * SIZE.experts, f"block {layer.block}"
        assert counts.max() < 0.2 * counts.sum(), f"block {layer.block}"


def test_fused_and_split_experts(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        whole = write_small_model(tmp_path / "model.gguf", architecture, SIZE)
        assert all(layer.fused_gate_up == (architecture in FUSED) for layer in read_model_shape(whole).layers)
    for architecture in FUSED:
        split = write_small_model(tmp_path / "split.gguf", architecture, SIZE, split=True)
        assert not any(layer.fused_gate_up for layer in read_model_shape(split).layers)
        with Engine.load(split, EngineOptions(n_ctx=64, n_threads=1, count_routing=False)) as engine:
            engine.prompt([5, 6, 7])
            assert np.isfinite(engine.logits()).all()


def test_layers_that_differ(tmp_path: Path) -> None:
    two = read_model_shape(write_small_model(tmp_path / "a.gguf", "nemotron_h_moe", SIZE))
    assert [layer.top_k for layer in two.layers] == [4, 5]
    dense = read_model_shape(write_small_model(tmp_path / "b.gguf", "laguna", SIZE))
    assert [layer.block for layer in dense.layers] == [1, 2]
    mixed = quantise(write_small_model(tmp_path / "c.gguf", "qwen3moe"), tmp_path / "mixed.gguf", "mix")
    bytes_of = [layer.expert_bytes for layer in read_model_shape(mixed).layers]
    assert bytes_of[0] == bytes_of[2] < bytes_of[1]


@pytest.mark.parametrize("kind", TYPES)
def test_every_weight_type(kind: str, tmp_path: Path) -> None:
    source = write_small_model(tmp_path / "model.gguf", "gpt-oss", ModelSize(experts=8, top_k=2))
    path = quantise(source, tmp_path / "quantised.gguf", kind)
    types = {
        tensor.type_name
        for parts in expert_tensors(read_gguf(path)).values()
        for name, tensor in parts.items()
        if name.endswith(".weight")
    }
    assert types == ({"q4_K", "q6_K"} if kind == "mix" else {kind})


def test_a_row_too_short_for_the_type_is_an_error(tmp_path: Path) -> None:
    source = write_small_model(tmp_path / "model.gguf", "qwen3moe", SIZE)
    with pytest.raises(ValueError, match="wanted q4_K"):
        quantise(source, tmp_path / "quantised.gguf", "q4_K")
