"""Small GGUF files of several architectures, written with the ``gguf`` package: deterministic, random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest

from spark_runtime.models import demo_model_path
from spark_schemas.model import ExpertLayer, ModelShape

# The generators of models and what they are run through are the benchmarks' own modules; the tests' helpers lie here.
sys.path.append(str(Path(__file__).resolve().parents[2] / "infra/benchmarks"))
sys.path.append(str(Path(__file__).resolve().parent))

EMBEDDING, HEADS, HEAD_SIZE, VOCABULARY, WIDTH = 64, 2, 32, 128, 32


@dataclass(frozen=True)
class ModelSpec:
    """What a test varies."""

    architecture: str = "qwen3moe"
    blocks: int = 3
    dense_blocks: int = 0
    experts: int = 16
    top_k: int = 4
    shared: int = 0
    fused: bool = False
    nextn: int = 0
    quantised: bool = False
    gating: bool = True
    metadata_top_k: int | list[int] | None = None
    """Overrides what the metadata claims."""
    expert_count_of_block: tuple[int, ...] | None = None


class GgufFactory:
    """Writes models below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, spec: ModelSpec, name: str = "model.gguf", seed: int = 0) -> Path:
        path = self.folder / name
        writer = gguf.GGUFWriter(path, spec.architecture)
        self._add_metadata(writer, spec)
        rng = np.random.default_rng(seed)
        for tensor, shape in self._tensors(spec):
            self._add_tensor(writer, tensor, rng.normal(0, 0.2, shape).astype(np.float32), spec)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _add_metadata(self, writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
        writer.add_name("test model")
        writer.add_context_length(128)
        writer.add_embedding_length(EMBEDDING)
        writer.add_block_count(spec.blocks)
        writer.add_feed_forward_length(WIDTH)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(HEADS)
        writer.add_key_length(HEAD_SIZE)
        writer.add_value_length(HEAD_SIZE)
        writer.add_rope_dimension_count(HEAD_SIZE)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(VOCABULARY)
        writer.add_tokenizer_model("none")
        if spec.experts:
            writer.add_expert_count(spec.experts)
            top_k = spec.top_k if spec.metadata_top_k is None else spec.metadata_top_k
            if isinstance(top_k, list):
                writer.add_array(f"{spec.architecture}.expert_used_count", top_k)
            else:
                writer.add_expert_used_count(top_k)
            writer.add_expert_feed_forward_length(WIDTH)
        if spec.dense_blocks:
            writer.add_leading_dense_block_count(spec.dense_blocks)
        if spec.shared:
            writer.add_expert_shared_count(spec.shared)
        if spec.gating:
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
        if spec.nextn:
            writer.add_uint32(f"{spec.architecture}.nextn_predict_layers", spec.nextn)

    def _tensors(self, spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
        """Names with numpy shapes, slowest dimension first."""
        tensors: list[tuple[str, tuple[int, ...]]] = [
            ("token_embd.weight", (VOCABULARY, EMBEDDING)),
            ("output_norm.weight", (EMBEDDING,)),
            ("output.weight", (VOCABULARY, EMBEDDING)),
        ]
        attention = HEADS * HEAD_SIZE
        for block in range(spec.blocks):
            experts = spec.expert_count_of_block[block] if spec.expert_count_of_block else spec.experts
            parts = {
                "attn_norm.weight": (EMBEDDING,),
                "attn_q.weight": (attention, EMBEDDING),
                "attn_k.weight": (attention, EMBEDDING),
                "attn_v.weight": (attention, EMBEDDING),
                "attn_output.weight": (EMBEDDING, attention),
                "ffn_norm.weight": (EMBEDDING,),
            }
            if spec.architecture in {"qwen3moe", "dots1"}:
                parts |= {"attn_q_norm.weight": (HEAD_SIZE,), "attn_k_norm.weight": (HEAD_SIZE,)}
            if block < spec.dense_blocks or not experts:
                parts |= {f"ffn_{kind}.weight": shape for kind, shape in _ffn(WIDTH).items()}
            else:
                parts["ffn_gate_inp.weight"] = (experts, EMBEDDING)
                parts |= {
                    f"ffn_{kind}_exps.weight": (experts, *shape) for kind, shape in _ffn(WIDTH, spec.fused).items()
                }
                if spec.shared:
                    parts |= {f"ffn_{kind}_shexp.weight": shape for kind, shape in _ffn(WIDTH * spec.shared).items()}
            tensors += [(f"blk.{block}.{part}", shape) for part, shape in parts.items()]
        return tensors

    def _add_tensor(self, writer: gguf.GGUFWriter, name: str, data: np.ndarray, spec: ModelSpec) -> None:
        if name.endswith("norm.weight"):
            data = np.ones_like(data)
        if spec.quantised and "_exps" in name:
            # The down projection in another type, as K-quant mixes do: its bytes differ from the others'.
            kind = gguf.GGMLQuantizationType.Q8_0 if "down" in name else gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)


def _ffn(width: int, fused: bool = False) -> dict[str, tuple[int, int]]:
    down = {"down": (EMBEDDING, width)}
    if fused:
        return {"gate_up": (2 * width, EMBEDDING)} | down
    return {"gate": (width, EMBEDDING), "up": (width, EMBEDDING)} | down


@pytest.fixture
def models(tmp_path: Path) -> GgufFactory:
    return GgufFactory(tmp_path)


@pytest.fixture
def spec() -> type[ModelSpec]:
    return ModelSpec


@pytest.fixture
def toy_shape() -> ModelShape:
    """Block 0 is dense; 4 experts, top-2, in block 1 and 5, top-1, in block 2."""
    return ModelShape(
        fingerprint="mf1-" + "0" * 32,
        sibling="ms1-" + "0" * 32,
        architecture="toy",
        n_blocks=3,
        context_length=64,
        core_bytes=1,
        kv_bytes_per_token=1,
        layers=tuple(
            ExpertLayer(block=block, n_experts=n_experts, top_k=top_k, expert_bytes=1, tensor_types={"up": "f16"})
            for block, n_experts, top_k in ((1, 4, 2), (2, 5, 1))
        ),
    )


@pytest.fixture
def demo_model() -> Path:
    return demo_model_path()


@pytest.fixture
def patched(demo_model: Path, tmp_path: Path) -> Callable[[Callable[[bytearray], None]], Path]:
    """A copy of the demo model with its bytes changed."""

    def patch(change: Callable[[bytearray], None]) -> Path:
        data = bytearray(demo_model.read_bytes())
        change(data)
        path = tmp_path / "patched.gguf"
        path.write_bytes(data)
        return path

    return patch
