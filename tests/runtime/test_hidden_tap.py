"""Hidden states are those that were computed, in every architecture, and reading them changes nothing."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest
from small_architectures import ARCHITECTURES, ModelSize
from small_models import write_small_model

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import RoutingReadError, TierError, UnsupportedModelError
from spark_runtime.ggml import GgmlTensor, ggml_base, op_number
from spark_runtime.hidden_tap import MOST_HIDDEN, HiddenTap
from spark_runtime.models import demo_model_path
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier_start import TierStart

SIZE = ModelSize(experts=8, top_k=2, width=256, vocabulary=64)
TYPICAL = (
    "qwen3moe",
    "gpt-oss",
    "deepseek2",
    "llama4",
    "gemma4",
    "qwen35moe",
    "nemotron_h_moe",
    "smallthinker",
    "dbrx",
)
REFUSED = "qwen4exp"
"""Mixes several streams before a block, which has no attention norm."""
BOTH = ("input", "router")


def options(hidden=()) -> EngineOptions:
    return EngineOptions(n_ctx=128, n_batch=32, n_threads=1, hidden=hidden)


def computed(path: Path, hidden=()) -> tuple[SessionCounts, np.ndarray]:
    with Engine.load(path, options(hidden)) as engine:
        session = SessionCounts(engine.shape, keep_trace=True)
        with engine.counting(session):
            engine.feed(list(range(40)), "prefill")
            engine.feed(list(range(20)), "decode", batch=8)
            engine.feed([3], "decode")
        return session, engine.logits()


class Witness(HiddenTap):
    """Copies every result at the moment it is computed, and finds among the copies what the tap reads later."""

    produced: dict[int, np.ndarray]
    differences: int = 0

    def _call(self, address, ask, data):
        wanted = super()._call(address, ask, data)
        if ask or self._learning:
            return wanted or not self._learning
        tensor = GgmlTensor.from_address(address)
        if (
            tensor.type == 0
            and tensor.op not in self.views
            and ggml_base().ggml_nbytes(address) == 4 * np.prod(tensor.ne)
        ):
            values = np.empty((int(np.prod(tensor.ne[1:])), tensor.ne[0]), np.float32)
            ggml_base().ggml_backend_tensor_get(address, values.ctypes.data, 0, values.nbytes)
            self.produced[address] = values
        return wanted

    def _observe_late(self, node):
        """The selections were read when the multiplication was announced."""

    def _rows(self, source):
        found = super()._rows(source)
        address = source.address
        while address not in self.produced and GgmlTensor.from_address(address).view_src:
            address = GgmlTensor.from_address(address).view_src
        expected = np.clip(self.produced[address], -MOST_HIDDEN, MOST_HIDDEN).astype(np.float16)
        self.differences += not np.array_equal(found, expected.reshape(found.shape))
        return found


@pytest.mark.parametrize("architecture", TYPICAL)
def test_what_is_read_is_what_was_computed(architecture, tmp_path, monkeypatch):
    path = write_small_model(tmp_path / "model.gguf", architecture, SIZE)
    plain, logits = computed(path)
    session, with_hidden = computed(path, BOTH)
    assert np.array_equal(logits, with_hidden)
    trace = session.take_trace()
    for index, (ids, expected) in enumerate(zip(trace.ids, plain.take_trace().ids, strict=True)):
        assert np.array_equal(ids, expected)
        assert {trace.hidden[kind][index].shape for kind in BOTH} == {(61, SIZE.embedding)}
        # SmallThinker's routers read every token, before attention, of which the last block's experts get fewer.
        missing = np.isnan(trace.hidden["router"][index][:, 0])
        assert np.array_equal(missing, (ids[:, 0] < 0) & (architecture != "smallthinker"))
        assert not np.isnan(trace.hidden["input"][index]).any()

    made: list[Witness] = []

    def witness(collector, kinds):
        tap = Witness(collector, kinds)
        tap.produced = {}
        tap.views = {op_number(name) for name in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")}
        made.append(tap)
        return tap

    monkeypatch.setattr("spark_runtime.engine.HiddenTap", Witness)
    monkeypatch.setattr("spark_runtime.engine._tap_for", lambda collector, **_: (witness(collector, BOTH), None))
    watched, _ = computed(path, BOTH)
    assert made[0].produced
    assert made[0].differences == 0
    for kind in BOTH:
        for found, expected in zip(watched.take_trace().hidden.get(kind, []), trace.hidden[kind], strict=False):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {*TYPICAL, REFUSED}))
def test_every_other_architecture_gives_them_and_stays_the_same(architecture, tmp_path):
    path = write_small_model(tmp_path / "model.gguf", architecture, SIZE)
    plain, logits = computed(path)
    session, with_hidden = computed(path, BOTH)
    assert np.array_equal(logits, with_hidden)
    trace = session.take_trace()
    for ids, expected, rows in zip(trace.ids, plain.take_trace().ids, trace.hidden["input"], strict=True):
        assert np.array_equal(ids, expected)
        assert rows.shape == (61, SIZE.embedding)
        assert len(np.unique(rows)) > 100


def test_routers_choose_by_what_they_read():
    """The router's own weights, applied to what was kept, give its selections; the first input is an embedding."""
    reader = gguf.GGUFReader(demo_model_path())
    weights = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
        if tensor.name.endswith("ffn_gate_inp.weight") or tensor.name == "token_embd.weight"
    }
    session, _ = computed(demo_model_path(), BOTH)
    trace = session.take_trace()
    np.testing.assert_allclose(trace.hidden["input"][0][:40], weights["token_embd.weight"][:40], rtol=2e-3, atol=1e-4)
    for block, ids in enumerate(trace.ids):
        routed = ids[:, 0] >= 0
        scores = (
            trace.hidden["router"][block][routed].astype(np.float32) @ weights[f"blk.{block}.ffn_gate_inp.weight"].T
        )
        chosen = np.argsort(-scores, axis=1)[:, : ids.shape[1]]
        same = (chosen[:, :, None] == ids[routed][:, None, :]).any(axis=2)
        assert same.mean() > 0.98  # half precision tips what is nearly equal


@pytest.mark.parametrize("other", [{"count_routing": False}, {"tier": TierStart(())}])
def test_not_with_tiers_nor_without_counting(other):
    with pytest.raises(TierError, match="hidden states are read"):
        Engine.load(demo_model_path(), EngineOptions(hidden=BOTH, **other))


def test_one_kind_alone():
    session, _ = computed(demo_model_path(), ("router",))
    assert list(session.take_trace().hidden) == ["router"]
    assert session.trace_bytes == 0
    assert len(session.take_trace().decode) == 0


def test_a_trace_taken_in_pieces_is_the_whole():
    whole = computed(demo_model_path(), ("input",))[0].take_trace()
    parts = []
    with Engine.load(demo_model_path(), options(("input",))) as engine:
        session = SessionCounts(engine.shape, keep_trace=True)
        with engine.counting(session):
            engine.feed(list(range(40)), "prefill", before_step=lambda: parts.append(session.take_trace()))
            engine.feed(list(range(20)), "decode", batch=8, before_step=lambda: parts.append(session.take_trace()))
            engine.feed([3], "decode")
        parts.append(session.take_trace())
    assert sum(len(part.decode) for part in parts) == len(whole.decode)
    for layer in range(len(whole.ids)):
        np.testing.assert_array_equal(np.concatenate([part.ids[layer] for part in parts]), whole.ids[layer])
        found = [part.hidden["input"][layer] for part in parts if part.hidden]
        np.testing.assert_array_equal(np.concatenate(found), whole.hidden["input"][layer])


def test_an_architecture_without_such_a_tensor_is_refused(tmp_path):
    path = write_small_model(tmp_path / "model.gguf", REFUSED, SIZE)
    with pytest.raises(UnsupportedModelError, match=f"{REFUSED} cannot be kept") as caught:
        Engine.load(path, options(("input",)))
    assert "without --hidden" in caught.value.hint
    session, _ = computed(path, ("router",))
    assert session.take_trace().hidden["router"]


class Filled(HiddenTap):
    """Finds one value everywhere."""

    value: float = 0.0

    def _rows(self, source):
        def fill(_tensor, to, _offset, size):
            values = np.full(size // 4, self.value, np.float32)
            ctypes.memmove(to, values.ctypes.data, size)

        read, self._read = self._read, fill
        try:
            return super()._rows(source)
        finally:
            self._read = read


@pytest.mark.parametrize(("value", "kept"), [(1e9, MOST_HIDDEN), (-np.inf, -MOST_HIDDEN), (2.0, 2.0)])
def test_values_beyond_half_precision_saturate(monkeypatch, value, kept):
    monkeypatch.setattr("spark_runtime.engine.HiddenTap", Filled)
    monkeypatch.setattr(Filled, "value", value)
    session, _ = computed(demo_model_path(), ("input",))
    assert set(np.unique(session.take_trace().hidden["input"][0])) == {np.float16(kept)}


def test_what_is_no_number_is_refused(monkeypatch):
    monkeypatch.setattr("spark_runtime.engine.HiddenTap", Filled)
    monkeypatch.setattr(Filled, "value", np.nan)
    with pytest.raises(RoutingReadError, match="not numbers"):
        computed(demo_model_path(), ("input",))
