"""Shape, bytes and counted selections of every kind of mixture that llama.cpp runs: real llama.cpp throughout.

The models are small and random. llama.cpp itself says which tensors an architecture wants, so no list of them can be
wrong; the metadata is one set for all, as in its own ``test-llama-archs.cpp``: an architecture reads what it knows.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import UnsupportedModelError
from spark_runtime.ggml import GgmlTensor, GgufInitParams, complaints, ggml_base
from spark_runtime.gguf_file import read_gguf
from spark_runtime.llama import LlamaContext, bindings
from spark_runtime.model_shape import read_model_shape
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tap import EVAL_CALLBACK
from spark_schemas.invariants import check_session

BLOCKS, EMBEDDING, HEADS, VOCABULARY, WIDTH, EXPERTS, TOP_K = 3, 128, 2, 128, 96, 6, 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "context_length": 128,
    "embedding_length": EMBEDDING,
    "block_count": BLOCKS,
    "leading_dense_block_count": 1,
    "feed_forward_length": WIDTH,
    "logit_scale": 1.0,
    "full_attention_interval": 2,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "attention.clamp_kqv": 1.0,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": 2,
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 64,
    "attention.scale": 0.125,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "rope.dimension_sections": [16, 16, 16, 16],
    "expert_feed_forward_length": WIDTH,
    "expert_shared_feed_forward_length": WIDTH // 2,
    "expert_chunk_feed_forward_length": WIDTH // 2,
    "expert_latent_length": WIDTH,
    "interleave_moe_layer_step": 2,
    "expert_count": EXPERTS,
    "expert_used_count": TOP_K,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_group_scale": 1.0,
    "expert_weights_scale": 1.0,
    "experts_per_group": 1,
    "ssm.inner_size": 256,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.time_step_rank": HEADS,
    "ssm.group_count": 2,
    "kda.head_dim": 128,
    "shortconv.l_cache": 3,
}
LATENT: Mapping[str, Any] = {
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "rope.dimension_count": 32,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 32,
}
"""Attention with a compressed cache (MLA)."""
SPARSE = {
    **LATENT,
    "attention.indexer.head_count": 64,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 131072,
}
"""The same, and a cached index by which tokens are chosen (DSA)."""
HYBRID: Mapping[str, Any] = {"attention.head_count": [HEADS, 0, HEADS], "attention.head_count_kv": [HEADS, 0, HEADS]}
"""A block without heads is recurrent."""
WINDOWED: Mapping[str, Any] = {"attention.sliding_window_pattern": [0, 1, 0]}

TOKENS = [(7 * index) % 120 + 3 for index in range(40)]
N_CTX, N_BATCH = 96, 24

PLAIN = (
    "afmoe",
    "arctic",
    "bailingmoe",
    "bailingmoe2",
    "cohere2moe",
    "dbrx",
    "deepseek",
    "dots1",
    "exaone-moe",
    "glm4moe",
    "gpt-oss",
    "granite",
    "granitemoe",
    "grok",
    "grovemoe",
    "hunyuan-moe",
    "hy_v3",
    "laguna",
    "llama",
    "mellum",
    "minicpm",
    "minimax-01",
    "minimax-m2",
    "mistral3",
    "olmoe",
    "phimoe",
    "qwen2moe",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vlmoe",
    "smallthinker",
)
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "deepseek2": LATENT,
    "deepseek32": SPARSE,
    "ernie4_5-moe": {"interleave_moe_layer_step": 1},
    "glm-dsa": SPARSE,
    "granite_swa": WINDOWED,
    "granitehybrid": HYBRID,
    "jamba": HYBRID,
    "kimi-linear": {**LATENT, "attention.head_count": [1, 0, 1], "attention.head_count_kv": [1, 0, 1]},
    "lfm2moe": HYBRID,
    "llama4": {"block_count": 4},
    "maple": {**WINDOWED, "swiglu_clamp_exp": 7.0},
    "nemotron_h_moe": {
        "block_count": 4,
        "attention.head_count": [HEADS, 0, HEADS, HEADS],
        "attention.head_count_kv": [HEADS, 0, 0, 0],
        "feed_forward_length": [0, 0, WIDTH, WIDTH],
        "expert_used_count": [0, 0, 2, 3],
    },
    "mimo2": WINDOWED,
    "mistral4": LATENT,
    "step35": WINDOWED,
}
CELL_BYTES = 24
"""Most bookkeeping that a saved state has for a token, beside its keys and values."""
WINDOWS = frozenset(
    ("afmoe", "cohere2moe", "exaone-moe", "gpt-oss", "granite_swa", "laguna", "maple", "mellum", "mimo2", "step35")
)
"""A saved state leaves out what has left the sliding window; the cache in memory does not."""
STATE_BYTES = 512
"""Most bookkeeping that a saved state has once, beside recurrent states."""


def write_architecture(path: Path, architecture: str, changes: Mapping[str, Any]) -> Path:
    """Write a model with deterministic random weights; ``ValueError`` if llama.cpp wants none."""
    metadata = _COMMON | dict(changes)
    draft = path.with_suffix(".draft")
    _write(draft, architecture, metadata, {})
    _write(path, architecture, metadata, _wanted_tensors(draft))
    draft.unlink()
    return path


def _wanted_tensors(draft: Path) -> dict[str, tuple[int, ...]]:
    llama = bindings()
    wanted: dict[str, tuple[int, ...]] = {}

    def take(address: int, _data: object) -> None:
        tensor = GgmlTensor.from_address(ctypes.cast(address, ctypes.c_void_p).value or 0)
        extent = [int(size) for size in tensor.ne]
        while len(extent) > 1 and extent[-1] == 1:
            extent.pop()
        wanted[tensor.name.decode()] = tuple(reversed(extent))

    fill = llama.llama_model_set_tensor_data_t(take)
    context = ggml_base().gguf_init_from_file(bytes(draft), GgufInitParams(no_alloc=True, ctx=None))
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    with complaints() as log:
        model = llama.llama_model_init_from_user(context, fill, None, params)
    ggml_base().gguf_free(context)
    if not model:
        raise ValueError(f"llama.cpp makes no such model: {log}")
    llama.llama_model_free(model)
    return wanted


def _write(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"small {architecture}")
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"tok_{token}" for token in range(VOCABULARY)])
    writer.add_token_scores([0.0] * VOCABULARY)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{architecture}.{key}", value)
    for name, shape in tensors.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        data = rng.normal(0, 0.1, shape).astype(np.float32)
        if "norm" in name:
            data = np.ones_like(data)
        elif name.endswith("ssm_a"):
            data = -np.abs(data)
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class RouterTap:
    """Reads what the routers chose by the name of their result, not where the experts are multiplied."""

    def __init__(self) -> None:
        self.callback = EVAL_CALLBACK(self._call)
        self.user_data = None
        self.chosen: defaultdict[int, list[int]] = defaultdict(list)
        self.seen: set[int] = set()
        """Blocks of this call: a second mixture in a block has other experts, chosen by the first one's router."""

    def check(self) -> None: ...

    def _call(self, address: int, ask: bool, _data: int | None) -> bool:
        tensor = GgmlTensor.from_address(address)
        match = re.fullmatch(rb"ffn_moe_topk-(\d+)", tensor.name)
        if match is None or ask:
            return match is not None
        if (block := int(match[1])) in self.seen:
            return True
        self.seen.add(block)
        row = (ctypes.c_int32 * tensor.ne[0])()
        for index in range(tensor.ne[1]):
            ggml_base().ggml_backend_tensor_get(address, ctypes.addressof(row), index * tensor.nb[1], 4 * len(row))
            self.chosen[block] += row
        return True


@pytest.fixture(params=[*PLAIN, *OTHERS])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name = request.param
    return write_architecture(tmp_path / f"{name}.gguf", name, OTHERS.get(name, {}))


def run(path: Path, *, count: bool, native: bool = False) -> tuple[SessionCounts, list[np.ndarray]]:
    """A prompt, some generated tokens, some known ones, and a prompt that shares its beginning."""
    options = EngineOptions(n_ctx=N_CTX, n_batch=N_BATCH, n_threads=1, count_routing=count, native=native)
    with Engine.load(path, options) as engine:
        session = SessionCounts(engine.shape)
        with engine.counting(session):
            engine.prompt(TOKENS)
            logits = [engine.logits(), *(engine.logits() for _ in engine.generate(Sampling(), 6))]
            engine.feed(TOKENS[:20], "decode", batch=8)
            logits.append(engine.logits())
            engine.prompt([*TOKENS[:30], 5, 6, 7])
            return session, [*logits, engine.logits()]


def test_counting_holds_every_invariant_and_changes_no_bit(model: Path) -> None:
    _, plain = run(model, count=False)
    assert not any(np.isnan(logits).any() for logits in plain)
    histograms = []
    for native in (True, False):
        session, counted = run(model, count=True, native=native)
        histograms.append(session.to_histogram("ab" * 32, "test"))
        assert [logits.tobytes() for logits in counted] == [logits.tobytes() for logits in plain]
    assert histograms[0] == histograms[1] is not None
    check_session(histograms[0], session.shape)


def test_counts_are_what_the_routers_chose(model: Path) -> None:
    with Engine.load(model, EngineOptions(n_ctx=N_CTX, n_batch=N_BATCH, n_threads=1)) as engine:
        session = SessionCounts(engine.shape)
        with engine.counting(session):
            engine.feed(TOKENS, "decode")
    tap: Any = RouterTap()
    context = LlamaContext(model, n_ctx=N_CTX, n_batch=N_BATCH, n_threads=1, n_gpu_layers=0, tap=tap)
    for start in range(0, len(TOKENS), N_BATCH):
        tap.seen.clear()
        context.decode(TOKENS[start : start + N_BATCH], start, all_outputs=True)
    context.close()
    for layer, counts in zip(session.shape.layers, session.counts["decode"], strict=True):
        expected = np.bincount(tap.chosen[layer.block], minlength=layer.n_experts)
        assert counts.tolist() == expected.tolist(), f"block {layer.block}"
    assert set(tap.chosen) == {layer.block for layer in session.shape.layers}


def test_bytes_are_the_files_and_the_context_is_no_larger_than_said(model: Path) -> None:
    shape = read_model_shape(model)
    tensors = read_gguf(model).tensors.values()
    routed = sum(tensor.n_bytes for tensor in tensors if re.search(r"ffn_(gate|up|gate_up|down)_exps\.", tensor.name))
    assert shape.expert_bytes_total == routed
    assert shape.core_bytes + routed == sum(tensor.n_bytes for tensor in tensors)
    with Engine.load(model, EngineOptions(n_ctx=N_CTX, n_batch=N_BATCH, n_threads=1)) as engine:
        sizes = []
        for part in (TOKENS[:20], TOKENS[20:]):
            engine.feed(part, "prefill")
            sizes.append(bindings().llama_state_seq_get_size(engine._context._context, 0))
    assert (sizes[1] - sizes[0]) / 20 <= shape.kv_bytes_per_token + CELL_BYTES
    if model.stem not in WINDOWS:
        # Not just an upper bound: blocks that keep a state are not counted as if they kept keys and values.
        assert (sizes[1] - sizes[0]) / 20 >= shape.kv_bytes_per_token / 1.1
    assert sizes[1] <= shape.context_bytes(40) + 40 * CELL_BYTES + STATE_BYTES


@pytest.mark.parametrize("architecture", ["llada-moe", "rnd1"])
def test_models_that_do_not_continue_a_text_are_refused(architecture: str, tmp_path: Path) -> None:
    path = write_architecture(tmp_path / "model.gguf", architecture, {})
    with pytest.raises(UnsupportedModelError, match="one token after another"):
        Engine.load(path)
