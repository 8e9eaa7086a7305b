"""Shapes of models with every peculiarity that real GGUF files have."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from spark_runtime.errors import ModelFileError, NotMoeError, UnsupportedModelError
from spark_runtime.gguf_file import read_gguf
from spark_runtime.model_shape import expert_tensors, read_model_shape


def test_demo_model(demo_model: Path) -> None:
    shape = read_model_shape(demo_model)
    assert (shape.architecture, shape.n_blocks, shape.context_length) == ("qwen3moe", 4, 1024)
    assert [(layer.block, layer.n_experts, layer.top_k) for layer in shape.layers] == [(b, 64, 8) for b in range(4)]
    # Q4_0 stores 32 weights in 18 bytes; an expert has three matrices of 64 x 256.
    assert {layer.expert_bytes for layer in shape.layers} == {3 * 64 * 256 // 32 * 18}
    # 2 key-value heads of 64, keys and values, 16 bits, 4 blocks
    assert shape.kv_bytes_per_token == 2 * (64 + 64) * 2 * 4
    tensors = sum(tensor.n_bytes for tensor in read_gguf(demo_model).tensors.values())
    assert shape.core_bytes + shape.expert_bytes_total == tensors


def test_expert_bytes_are_the_files_own(models, spec) -> None:
    model = read_gguf(models.write(spec(quantised=True)))
    shape = read_model_shape(model.path)
    for layer in shape.layers:
        parts = expert_tensors(model)[layer.block]
        assert layer.expert_bytes * layer.n_experts == sum(tensor.n_bytes for tensor in parts.values())
        assert layer.tensor_types == {"gate.weight": "q4_0", "up.weight": "q4_0", "down.weight": "q8_0"}


def test_blocks_without_experts_are_absent(models, spec) -> None:
    shape = read_model_shape(models.write(spec(architecture="dots1", blocks=4, dense_blocks=2, shared=2)))
    assert [layer.block for layer in shape.layers] == [2, 3]
    assert [layer.n_shared for layer in shape.layers] == [2, 2]
    assert shape.n_blocks == 4


def test_experts_and_top_k_differ_between_blocks(models, spec) -> None:
    path = models.write(spec(expert_count_of_block=(8, 0, 16), metadata_top_k=[2, 0, 4]))
    assert [(s.block, s.n_experts, s.top_k) for s in read_model_shape(path).layers] == [(0, 8, 2), (2, 16, 4)]


def test_fused_gate_up(models, spec) -> None:
    separate = read_model_shape(models.write(spec(), "separate.gguf"))
    fused = read_model_shape(models.write(spec(fused=True), "fused.gguf"))
    assert all(layer.fused_gate_up for layer in fused.layers)
    assert not any(layer.fused_gate_up for layer in separate.layers)
    assert fused.expert_bytes_total == separate.expert_bytes_total


def test_blocks_that_predict_further_tokens_do_not_count(models, spec) -> None:
    plain = read_model_shape(models.write(spec(blocks=3), "plain.gguf"))
    drafting = read_model_shape(models.write(spec(blocks=4, nextn=1), "drafting.gguf"))
    assert [layer.block for layer in drafting.layers] == [0, 1, 2]
    assert (drafting.n_blocks, drafting.core_bytes) == (3, plain.core_bytes)


def test_dense_model_is_refused(models, spec) -> None:
    with pytest.raises(NotMoeError, match="no routed experts") as caught:
        read_model_shape(models.write(spec(architecture="llama", experts=0)))
    assert caught.value.hint


def test_layout_with_a_tensor_per_expert_is_named(models, spec, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = models._tensors
    monkeypatch.setattr(
        models,
        "_tensors",
        lambda spec: [*tensors(spec), *((f"blk.0.ffn_{kind}.0.weight", (32, 64)) for kind in ("gate", "up", "down"))],
    )
    with pytest.raises(UnsupportedModelError, match="a tensor of its own"):
        read_model_shape(models.write(spec(architecture="llama", experts=0)))


@pytest.mark.parametrize("top_k", [0, 17])
def test_impossible_top_k_is_refused_before_llama_cpp_would_abort(models, spec, top_k: int) -> None:
    with pytest.raises(ModelFileError, match=f"expert_used_count is {top_k}, expected 1 to 16"):
        read_model_shape(models.write(spec(metadata_top_k=top_k)))


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix", "vocab"])
def test_files_that_belong_to_a_model_are_named(models, spec, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = models._add_metadata
    monkeypatch.setattr(models, "_add_metadata", lambda writer, spec: (writer.add_type(kind), describe(writer, spec)))
    with pytest.raises(UnsupportedModelError, match=f"of the type '{kind}', expected 'model'") as caught:
        read_model_shape(models.write(spec()))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("block_count", 4_000_000_000, "4000000000 blocks"),
        ("attention.head_count_kv", [1.5, float("nan"), float("inf")], "0 of them whole numbers"),
        ("attention.head_count_kv", [4, -4, 4], "2 of them whole numbers"),
    ],
)
def test_metadata_that_cannot_be_right_is_named(
    models, spec, key: str, value: int | list[float], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = models._add_metadata

    def claim(writer: gguf.GGUFWriter, spec: object) -> None:
        describe(writer, spec)
        writer.kv_data[0].pop(f"qwen3moe.{key}", None)
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"qwen3moe.{key}", value)

    monkeypatch.setattr(models, "_add_metadata", claim)
    with pytest.raises(ModelFileError, match=found):
        read_model_shape(models.write(spec()))


def test_a_name_no_service_would_take_is_refused(models, spec) -> None:
    with pytest.raises(ModelFileError, match="architecture cannot be right"):
        read_model_shape(models.write(spec(architecture="a" * 65)))


def test_missing_projection_is_refused(models, spec, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = models._tensors
    monkeypatch.setattr(
        models, "_tensors", lambda spec: [t for t in tensors(spec) if t[0] != "blk.1.ffn_down_exps.weight"]
    )
    with pytest.raises(ModelFileError, match="block 1 has expert tensors"):
        read_model_shape(models.write(spec()))


def test_layers_that_disagree_on_experts_are_refused(models, spec, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = models._tensors
    smaller = {"blk.1.ffn_up_exps.weight": (12, 32, 64)}
    monkeypatch.setattr(models, "_tensors", lambda spec: [(n, smaller.get(n, s)) for n, s in tensors(spec)])
    with pytest.raises(ModelFileError, match=r"ffn_up_exps.weight holds 12 experts .* expected 16 alike"):
        read_model_shape(models.write(spec()))


def test_fingerprint_is_of_the_weights_and_not_of_the_name(models, spec) -> None:
    first = read_model_shape(models.write(spec(), "a.gguf", seed=1))
    renamed = read_model_shape(models.write(spec(), "b.gguf", seed=1))
    other = read_model_shape(models.write(spec(), "c.gguf", seed=2))
    assert first.fingerprint == renamed.fingerprint
    assert first.fingerprint != other.fingerprint
    assert first.sibling != other.sibling


def test_quantisations_are_siblings(models, spec) -> None:
    full = read_model_shape(models.write(spec(), "full.gguf"))
    quantised = read_model_shape(models.write(spec(quantised=True), "quantised.gguf"))
    assert full.sibling == quantised.sibling
    assert full.fingerprint != quantised.fingerprint


def test_one_changed_expert_changes_the_fingerprint(models, spec) -> None:
    path = models.write(spec())
    before = read_model_shape(path).fingerprint
    tensor = read_gguf(path).tensors["blk.2.ffn_down_exps.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset : tensor.offset + 4] = np.float32(9).tobytes()
    path.write_bytes(data)
    assert read_model_shape(path).fingerprint != before


def test_real_quantisations_are_siblings(demo_model: Path) -> None:
    full = Path(__file__).parents[3] / "shared/models/nano-f16.gguf"
    if not full.exists():
        pytest.skip("the full-precision demo model is not beside this checkout")
    quantised, original = read_model_shape(demo_model), read_model_shape(full)
    assert quantised.sibling == original.sibling
    assert quantised.fingerprint != original.fingerprint
