"""The engine on the trained demo model and on small models of other shapes: real llama.cpp throughout."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_runtime.chat import ChatFormat
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import ContextFullError, RoutingReadError, UnsupportedModelError
from spark_runtime.ggml import GgmlTensor, ggml_base
from spark_runtime.llama import LlamaContext
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tap import EVAL_CALLBACK, EvalTap
from spark_schemas.invariants import check_session
from spark_schemas.model import ModelShape

TEXT = "def mean(values):\n    return sum(values) / len(values)\n\n\nclass Reader:\n    def __init__(self, path):\n"
SESSION = "ab" * 32


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request: pytest.FixtureRequest) -> bool:
    """Both ways of counting do the same."""
    return request.param


@pytest.fixture
def engine(demo_model: Path, native: bool) -> Iterator[Engine]:
    with Engine.load(demo_model, EngineOptions(n_ctx=256, n_batch=32, n_threads=1, native=native)) as loaded:
        assert loaded.native_fault is None
        yield loaded


def logits_hash(engine: Engine, tokens: list[int], n: int) -> str:
    digest = hashlib.sha256()
    engine.prompt(tokens)
    for _ in engine.generate(Sampling(), n):
        digest.update(engine.logits().tobytes())
    return digest.hexdigest()


def test_counting_changes_no_bit(demo_model: Path, engine: Engine) -> None:
    tokens = engine.tokenize(TEXT)
    with Engine.load(demo_model, EngineOptions(n_ctx=256, n_batch=32, n_threads=1, count_routing=False)) as plain:
        expected = logits_hash(plain, tokens, 64)
    session = SessionCounts(engine.shape)
    with engine.counting(session):
        assert logits_hash(engine, tokens, 64) == expected
    assert session.tokens_total


def test_phases_are_counted_apart_and_hold_every_invariant(engine: Engine) -> None:
    session = SessionCounts(engine.shape)
    tokens = engine.tokenize(TEXT * 2)
    assert len(tokens) > 32, "the prompt must be longer than a batch"
    with engine.counting(session):
        engine.prompt(tokens)
        generated = list(engine.generate(Sampling(), 20))
    assert session.tokens["prefill"] == len(tokens)
    # A token that ends the text is drawn and not computed.
    assert session.tokens["decode"] == len(generated) - engine.is_end(generated[-1])
    histogram = session.to_histogram(SESSION, "code-heavy")
    assert histogram is not None
    check_session(histogram, engine.shape)
    assert histogram.prefill is not None
    routed = [layer.tokens for layer in histogram.prefill.layers]
    assert routed[:-1] == [len(tokens)] * 3
    assert routed[-1] < len(tokens), "llama.cpp routes only output tokens in the last block"


class RouterProbe:
    """Reads the router's own scores beside the tap, so that selections can be computed independently."""

    def __init__(self, tap: EvalTap) -> None:
        self.logits: dict[int, list[np.ndarray]] = {}
        self.strides: set[tuple[int, int]] = set()
        self._tap = tap
        self.callback = EVAL_CALLBACK(self._call)
        self.user_data = None
        self.check = tap.check

    def _call(self, address: int, ask: bool, data: int | None) -> bool:
        tensor = GgmlTensor.from_address(address)
        name = tensor.name.decode()
        if name.startswith("ffn_moe_topk-") and ask:
            self.strides.add((tensor.nb[1], tensor.ne[0] * 4))
        if not name.startswith("ffn_moe_logits-"):
            return self._tap._call(address, ask, data)
        if not ask:
            values = np.empty((tensor.ne[1], tensor.ne[0]), dtype=np.float32)
            ggml_base().ggml_backend_tensor_get(address, values.ctypes.data, 0, values.nbytes)
            self.logits.setdefault(int(name.split("-")[1]), []).append(values)
        return True


@pytest.mark.parametrize(
    "case",
    [
        {"experts": 64, "top_k": 8},
        {"experts": 16, "top_k": 1},
        {"architecture": "llama", "experts": 8, "top_k": 2, "quantised": True},
        {"architecture": "dots1", "blocks": 4, "dense_blocks": 1, "shared": 1, "experts": 32, "top_k": 6},
    ],
    ids=["qwen3moe", "top-1", "mixtral-like", "dots1-dense-first-shared"],
)
def test_selections_are_the_routers(models, spec, case: dict[str, object]) -> None:
    path = models.write(spec(**case))
    selections, probe, shape = selections_of(path, [list(range(5, 45)), [7], [9, 11, 13]])
    assert probe.strides, "no router was seen"
    assert any(stride != flat for stride, flat in probe.strides), "contiguous ids would not test the strides"
    for layer in shape.layers:
        scores = np.concatenate(probe.logits[layer.block])
        expected = np.argsort(-scores, axis=1, kind="stable")[:, : layer.top_k]
        found = np.concatenate(selections[layer.block])
        assert found.shape == expected.shape
        assert (np.sort(found, axis=1) == np.sort(expected, axis=1)).all()


def selections_of(path: Path, batches: list[list[int]]) -> tuple[dict[int, list[np.ndarray]], RouterProbe, ModelShape]:
    from spark_runtime.collector import Collector
    from spark_runtime.model_shape import read_model_shape

    shape = read_model_shape(path)
    seen: dict[int, list[np.ndarray]] = {layer.block: [] for layer in shape.layers}

    class Recorder(Collector):
        def observe(self, block: int, ids: np.ndarray) -> None:
            super().observe(block, ids)
            seen[block].append(ids)

    probe = RouterProbe(EvalTap(Recorder(shape)))
    context = LlamaContext(path, n_ctx=128, n_batch=64, n_threads=1, n_gpu_layers=0, tap=probe)  # type: ignore[arg-type]
    try:
        position = 0
        for batch in batches:
            context.decode(batch, position, all_outputs=True)
            position += len(batch)
    finally:
        context.close()
    return seen, probe, shape


@pytest.mark.parametrize(
    "case",
    [
        {"experts": 64, "top_k": 8},
        {"experts": 8, "top_k": 2, "blocks": 1},
        {"architecture": "llama", "experts": 8, "top_k": 2},
        {"architecture": "dots1", "blocks": 4, "dense_blocks": 1, "shared": 1, "experts": 32, "top_k": 6},
    ],
    ids=["qwen3moe", "one-block", "mixtral-like", "dots1"],
)
def test_the_graph_is_never_cut_among_experts(models, spec, case: dict[str, object], native: bool) -> None:
    """Fused kernels stay whole: every layer is read once a call, at a node before its first multiplication."""
    path = models.write(spec(**case))
    with Engine.load(path, EngineOptions(n_ctx=128, n_batch=16, n_threads=1, native=native)) as engine:
        spy = CutSpy(engine._context._tap)
        context = LlamaContext(path, n_ctx=128, n_batch=16, n_threads=1, n_gpu_layers=0, tap=spy)
        for calls, tokens in enumerate(([3, 5, 7], [11], [2] * 16), start=1):
            context.decode(tokens, 0, all_outputs=False)
            context.forget_all()
            assert len(spy.cuts) == calls * len(engine.shape.layers)
        context.close()
    assert not any(op == b"MUL_MAT_ID" for op, _ in spy.cuts)
    assert len(set(spy.cuts)) == len(engine.shape.layers)


class CutSpy:
    """Passes every call on to a tap, and notes where it asks for a cut."""

    def __init__(self, tap) -> None:
        self.cuts: list[tuple[bytes, bytes]] = []
        self.check = tap.check
        self.callback = EVAL_CALLBACK(self._call)
        self.user_data = None
        self._real = EVAL_CALLBACK(ctypes.cast(tap.callback, ctypes.c_void_p).value)
        self._data = tap.user_data

    def _call(self, address: int, ask: bool, _data: int | None) -> bool:
        answer = self._real(address, ask, self._data)
        if ask and answer:
            tensor = GgmlTensor.from_address(address)
            self.cuts.append((ggml_base().ggml_op_name(tensor.op), tensor.name))
        return answer


def test_tensor_layout_matches_the_librarys_accessors(demo_model: Path) -> None:
    checked: list[str] = []

    class Checker:
        def __init__(self) -> None:
            self.callback = EVAL_CALLBACK(self._call)
            self.user_data = None

        def check(self) -> None:
            pass

        def _call(self, address: int, ask: bool, _data: int | None) -> bool:
            tensor = GgmlTensor.from_address(address)
            library = ggml_base()
            assert tensor.name == library.ggml_get_name(address)
            if list(tensor.ne[2:]) == [1, 1] and tensor.type == 0:
                assert library.ggml_nbytes(address) == (tensor.ne[1] - 1) * tensor.nb[1] + tensor.ne[0] * 4
            library.ggml_op_name.restype = ctypes.c_char_p
            if tensor.name.startswith(b"ffn_moe_up"):
                assert library.ggml_op_name(tensor.op) == b"MUL_MAT_ID"
                checked.append(GgmlTensor.from_address(tensor.src[0]).name.decode())
            return False

    context = LlamaContext(demo_model, n_ctx=64, n_batch=8, n_threads=1, n_gpu_layers=0, tap=Checker())  # type: ignore[arg-type]
    context.decode([1, 2, 3], 0, all_outputs=False)
    context.close()
    assert checked == [f"blk.{block}.ffn_up_exps.weight" for block in range(4)]


def test_callback_outlives_garbage_collection(demo_model: Path) -> None:
    with Engine.load(demo_model, EngineOptions(n_ctx=64, n_threads=1)) as engine:
        for _ in range(3):
            gc.collect()
            engine.prompt(engine.tokenize("import os"))
            list(engine.generate(Sampling(), 3))


def test_impossible_selections_stop_the_call_and_leave_no_counts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SessionCounts(engine.shape)
    real = engine._collector.observe

    def broken(block: int, ids: np.ndarray) -> None:
        real(block, ids + 1000)

    with engine.counting(session):
        monkeypatch.setattr(engine._collector, "observe", broken)
        with pytest.raises(RoutingReadError, match="expected 0 to 63"):
            engine.prompt(engine.tokenize(TEXT))
        assert session.tokens_total == 0
        assert engine.n_past == 0
        monkeypatch.setattr(engine._collector, "observe", real)
        engine.prompt(engine.tokenize(TEXT))
    assert session.tokens["prefill"] > 0


def test_a_continued_prompt_computes_only_what_is_new(engine: Engine) -> None:
    first = engine.tokenize(TEXT)
    engine.prompt(first)
    session = SessionCounts(engine.shape)
    with engine.counting(session):
        reused = engine.prompt([*first, *engine.tokenize("x = 1\n", add_special=False)])
    assert reused == len(first)
    assert session.tokens["prefill"] == engine.n_past - len(first)


def test_reuse_changes_no_choice(demo_model: Path, engine: Engine) -> None:
    tokens = engine.tokenize(TEXT)
    engine.prompt([*tokens[:20], 5, 6, 7])
    engine.prompt(tokens)
    reused = list(engine.generate(Sampling(), 16))
    engine.reset()
    engine.prompt(tokens)
    assert list(engine.generate(Sampling(), 16)) == reused


def test_feed_routes_every_decode_token_in_every_block(engine: Engine) -> None:
    session = SessionCounts(engine.shape, keep_trace=True)
    tokens = engine.tokenize(TEXT)
    with engine.counting(session):
        engine.feed(tokens, "decode", batch=10)
    assert [ids.shape for ids in session.trace()] == [(len(tokens), 8)] * 4
    histogram = session.to_histogram(SESSION, "x")
    assert histogram is not None
    assert histogram.prefill is None
    check_session(histogram, engine.shape)


def test_context_limits_are_errors_before_computing(engine: Engine, demo_model: Path) -> None:
    with pytest.raises(ContextFullError, match="257 tokens, but the context holds 256"):
        engine.prompt([1] * 257)
    with pytest.raises(ContextFullError, match="empty prompt"):
        engine.prompt([])
    with pytest.raises(ContextFullError, match="trained for 1024"):
        Engine.load(demo_model, EngineOptions(n_ctx=2048))
    engine.prompt([1] * 250)
    assert len(list(engine.generate(Sampling(temperature=5.0, seed=1), 100))) <= 7
    assert engine.n_past <= 256


def test_seed_decides_sampling(engine: Engine) -> None:
    def draw(seed: int) -> list[int]:
        engine.prompt(engine.tokenize(TEXT))
        return list(engine.generate(Sampling(temperature=1.5, top_p=0.9, seed=seed), 20))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_closing_the_iterator_stops(engine: Engine) -> None:
    engine.prompt(engine.tokenize(TEXT))
    before = engine.n_past
    tokens = engine.generate(Sampling(), 100)
    next(tokens)
    tokens.close()
    assert engine.n_past == before


def test_unknown_architecture_gets_llama_cpps_reason(models, spec) -> None:
    path = models.write(spec(architecture="nosuchmoe"))
    with pytest.raises(UnsupportedModelError, match=r"unknown model architecture: 'nosuchmoe'") as caught:
        Engine.load(path)
    assert caught.value.hint


def test_what_makes_llama_cpp_abort_ends_with_a_reason(models, spec) -> None:
    path = models.write(spec(architecture="dots1", shared=1, gating=False))
    load = f"from pathlib import Path; from spark_runtime.engine import Engine; Engine.load(Path({str(path)!r}))"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: llama.cpp cannot go on" in done.stderr
    assert "hint: " in done.stderr


def test_tokens_spell_the_text(engine: Engine) -> None:
    text = "naïve café — 数学 🙂"
    assert b"".join(engine.piece(t) for t in engine.tokenize(text, add_special=False)).decode() == text
    assert engine.tokenize("<|im_end|>", parse_special=True) != engine.tokenize("<|im_end|>", parse_special=False)


def test_chat_template_of_the_model_is_used(engine: Engine) -> None:
    prompt = ChatFormat(engine).prompt([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def digest_of(path: Path, **options: Any) -> str:
    with Engine.load(path, EngineOptions(n_ctx=128, n_batch=32, n_threads=1, count_routing=False, **options)) as engine:
        return logits_hash(engine, engine.tokenize(TEXT), 12)


def test_weights_can_stay_as_they_lie_in_the_file(demo_model: Path) -> None:
    """Repacked ones round otherwise; where the file's bytes are does not matter."""
    plain = digest_of(demo_model, repack=False)
    assert digest_of(demo_model, repack=False, mapped=False) == plain
    assert digest_of(demo_model, proxy=True) == plain


def test_experts_of_the_first_blocks_can_stay_with_the_cpu(demo_model: Path) -> None:
    from spark_runtime.buffer_sizes import log_lines

    plain = digest_of(demo_model, repack=False)
    with log_lines() as lines:
        assert digest_of(demo_model, repack=False, cpu_expert_blocks=2) == plain
    placed = {line.split()[1] for line in lines if "buffer type overrid" in line}
    expected = {f"blk.{block}.ffn_{kind}_exps.weight" for block in (0, 1) for kind in ("gate", "up", "down")}
    assert placed == expected


def test_fewer_outputs_take_less_memory_and_change_no_bit(demo_model: Path) -> None:
    from spark_runtime.buffer_sizes import log_lines, read_buffer_sizes

    found = []
    for most in (0, 1):
        options = EngineOptions(n_ctx=1024, n_batch=512, n_threads=1, n_outputs_max=most)
        with log_lines() as lines:
            engine = Engine.load(demo_model, options)
        with engine:
            tokens = engine.tokenize(TEXT)
            engine.feed(tokens, "decode")
            known = engine.logits().tobytes()
            assert len(engine.all_logits()) == (1 if most else len(tokens))
            found.append((sum(read_buffer_sizes(lines).compute.values()), logits_hash(engine, tokens, 6), known))
    assert found[1][0] < found[0][0]
    assert found[1][1] == found[0][1]
    # Decode goes one token at a time then, which other kernels compute than a batch.
    logits = [np.frombuffer(known, np.float32) for _, _, known in found]
    assert np.allclose(*logits, atol=0.05)


def test_all_logits_are_those_of_the_last_call(engine: Engine) -> None:
    tokens = engine.tokenize(TEXT)
    engine.feed(tokens[:20], "decode")
    engine.synchronize()
    every = engine.all_logits()
    assert every.shape == (20, engine.n_vocab)
    assert every[-1].tobytes() == engine.logits().tobytes()
    engine.feed(tokens[20:24], "prefill")
    assert engine.all_logits().shape == (1, engine.n_vocab)
    assert engine.n_batch == 32


def test_sequences_side_by_side(demo_model: Path) -> None:
    """Each computes what it would alone, and the engine goes on as before."""
    options = EngineOptions(n_ctx=256, n_batch=32, n_threads=1, n_seq_max=2, count_routing=False)
    with Engine.load(demo_model, options) as engine:
        tokens = engine.tokenize(TEXT)
        before = logits_hash(engine, tokens, 4)
        engine.reset()
        engine.feed_sequences([(tokens[at], at, which) for which in (0, 1) for at in range(8)])
        both = engine.all_logits()
        assert both.shape == (16, engine.n_vocab)
        assert np.allclose(both[:8], both[8:], atol=1e-3)
        engine.reset()
        assert logits_hash(engine, tokens, 4) == before
