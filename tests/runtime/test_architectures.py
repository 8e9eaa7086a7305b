"""Shape, bytes and counted selections of every kind of mixture that llama.cpp runs: real llama.cpp throughout.

The models are small and random; ``infra/benchmarks/small_models.py`` writes them.
"""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_architectures import ARCHITECTURES, ModelSize
from small_models import write_small_model

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import UnsupportedModelError
from spark_runtime.ggml import GgmlTensor, ggml_base
from spark_runtime.gguf_file import read_gguf
from spark_runtime.llama import LlamaContext, bindings
from spark_runtime.model_shape import read_model_shape
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tap import EVAL_CALLBACK
from spark_schemas.invariants import check_session

SIZE = ModelSize(embedding=128, width=96, experts=6, top_k=2, context=128, latent=64)
TOKENS = [(7 * index) % 120 + 3 for index in range(40)]
N_CTX, N_BATCH = 96, 24

CELL_BYTES = 24
"""Most bookkeeping that a saved state has for a token, beside its keys and values."""
POSITION_BYTES = 24
"""What it has besides where a position is more than a number, for tokens of an image."""
WINDOWS = frozenset(
    [
        "afmoe",
        "cohere2moe",
        "dots3note",
        "exaone-moe",
        "gemma4",
        "gpt-oss",
        "granite_swa",
        "laguna",
        "maple",
        "mellum",
        "mimo2",
        "step35",
    ]
)
"""A saved state leaves out what has left the sliding window; the cache in memory does not."""
SHARED = frozenset(("deepseek4", "hy_v4"))
"""Several tokens share a cached key, or several blocks an index of keys; the bound counts one for each."""
STATE_BYTES = 512
"""Most bookkeeping that a saved state has once, beside recurrent states."""


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


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_small_model(tmp_path / f"{request.param}.gguf", request.param, SIZE)


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
    cell = CELL_BYTES + (POSITION_BYTES if model.stem == "qwen4exp" else 0)
    assert (sizes[1] - sizes[0]) / 20 <= shape.kv_bytes_per_token + cell
    if model.stem not in WINDOWS | SHARED:
        # Not just an upper bound: blocks that keep a state are not counted as if they kept keys and values.
        assert (sizes[1] - sizes[0]) / 20 >= shape.kv_bytes_per_token / 1.1
    assert sizes[1] <= shape.context_bytes(40) + 40 * cell + STATE_BYTES


@pytest.mark.parametrize("architecture", ["llada-moe", "rnd1"])
def test_models_that_do_not_continue_a_text_are_refused(architecture: str, tmp_path: Path) -> None:
    path = write_small_model(tmp_path / "model.gguf", architecture, SIZE)
    with pytest.raises(UnsupportedModelError, match="one token after another"):
        Engine.load(path)
