"""Tiers while they run, and what they are asked that makes no sense: a clear error, and the process goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from small_models import write_small_model
from tier_runs import OPTIONS, SIZE, digest, load

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import DecodeError, ModelMismatchError, TierError
from spark_runtime.llama import bindings
from spark_runtime.manifest_check import check_manifest
from spark_runtime.model_shape import read_model_shape
from spark_runtime.native_tier import proxy_devices
from spark_runtime.sampling import Sampling
from spark_runtime.slot_pool import tier_pools
from spark_runtime.tier_start import LayerStart, TierStart, uniform_start
from spark_schemas.model import ModelShape

START_SLOTS = 13 + 13 + 12
"""Of the model below with 40% of its experts resident."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model") / "model.gguf", "qwen3moe", SIZE)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model") / "other.gguf", "glm4moe", SIZE)


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    with Engine.load(model, EngineOptions(**OPTIONS, proxy=True, count_routing=False)) as engine:
        return digest(engine)


def changed(start: TierStart, **changes: Any) -> TierStart:
    """With another last layer."""
    return replace(start, layers=(*start.layers[:-1], replace(start.layers[-1], **changes)))


BAD_STARTS: dict[str, tuple[Callable[[TierStart], TierStart], str]] = {
    "no-layers": (lambda start: replace(start, layers=()), r"a start for blocks \[\], expected \[0, 1, 2\]"),
    "missing": (lambda start: replace(start, layers=start.layers[:-1]), r"blocks \[0, 1\], expected \[0, 1, 2\]"),
    "unknown": (lambda start: changed(start, block=7), r"blocks \[0, 1, 7\], expected \[0, 1, 2\]"),
    "twice": (lambda start: replace(start, layers=start.layers[:1] * 3), r"blocks \[0, 0, 0\], expected \[0, 1, 2\]"),
    "few-slots": (lambda start: changed(start, slots=7), r"7 slots, expected at least 2 \* top_k = 8"),
    "no-slots": (lambda start: changed(start, slots=0), "slots 0"),
    "negative-slots": (lambda start: changed(start, slots=-4), "slots -4"),
    "many-slots": (lambda start: changed(start, slots=33), "33 slots, expected at most its 32 experts"),
    "other-top-k": (lambda start: changed(start, top_k=2, slots=4), "top_k 2, expected 4"),
    "no-top-k": (lambda start: changed(start, top_k=0), "top_k 0, expected 4"),
    "duplicate": (lambda start: changed(start, order=np.array([3, *range(31)])), "expert 3 twice"),
    "out-of-range": (lambda start: changed(start, order=np.array([32, *range(31)])), "expert 32, expected 0 to 31"),
    "negative": (lambda start: changed(start, order=np.array([-1, *range(31)])), "expert -1, expected 0 to 31"),
    "64-bit": (lambda start: changed(start, order=np.arange(32) + (np.arange(32) == 5) * 2**32), "expected 0 to 31"),
    "short-order": (lambda start: changed(start, order=np.arange(31)), "31 experts with 32 priors, expected 32"),
    "short-prior": (lambda start: changed(start, prior=np.zeros(8)), "32 experts with 8 priors, expected 32"),
    "nan": (lambda start: changed(start, prior=np.full(32, np.nan)), "the prior of expert 0 is not a finite number"),
    "negative-prior": (lambda start: changed(start, prior=np.full(32, -1.0)), "the prior of expert 0 is not a finite"),
    "pinned-too-many": (lambda start: changed(start, pinned=13), "13 pinned, expected at most its 12 slots"),
    "pinned-no-room": (
        lambda start: replace(start, layers=tuple(replace(layer, pinned=12) for layer in start.layers)),
        "12 pinned leave fewer than top_k = 4",
    ),
    "pinned-negative": (lambda start: changed(start, pinned=-1), "pinned -1"),
    "decay": (lambda start: replace(start, decay=1.5), "decay 1.5"),
    "decay-nan": (lambda start: replace(start, decay=float("nan")), "decay nan"),
}


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_start_that_makes_no_sense_is_refused(name: str, model: Path, expected: str) -> None:
    """Before the first token and between two; the second leaves what was there and what is computed as they were."""
    change, reason = BAD_STARTS[name]
    start = uniform_start(read_model_shape(model), 0.4)
    with pytest.raises(TierError, match=reason):
        load(model, tier=change(start))
    with load(model) as engine:
        assert engine.tier is not None
        refused = 0

        def between() -> None:
            nonlocal refused
            before = [layer.tolist() for layer in engine.tier.resident()]
            with pytest.raises(TierError, match=reason):
                engine.tier.replace(change(start))
            refused += 1
            assert [layer.tolist() for layer in engine.tier.resident()] == before

        assert digest(engine, between=between) == expected
        assert refused == 24


def test_a_start_of_another_model_is_refused(model: Path, other_model: Path) -> None:
    """Of one with a dense block at its start."""
    blocks = [layer.block for layer in read_model_shape(other_model).layers]
    assert blocks == [1, 2]
    with pytest.raises(TierError, match=r"a start for blocks \[1, 2\], expected \[0, 1, 2\]"):
        load(model, tier=uniform_start(read_model_shape(other_model), 0.4))


def test_a_manifest_of_another_model_is_refused(model: Path, other_model: Path) -> None:
    from spark_schemas.manifest import PlacementManifest

    shape, other = read_model_shape(model), read_model_shape(other_model)
    manifest = PlacementManifest.model_construct(
        fingerprint=other.fingerprint, sibling=other.sibling, workload="chat", layers=()
    )
    with pytest.raises(ModelMismatchError, match=f"{other.fingerprint}, this file is {shape.fingerprint}"):
        check_manifest(manifest, shape)


def test_starts_of_numpy_numbers_are_taken(model: Path, expected: str) -> None:
    shape = read_model_shape(model)
    layers = tuple(
        LayerStart(
            np.int64(layer.block),  # type: ignore[arg-type]
            np.int64(layer.top_k),  # type: ignore[arg-type]
            np.int32(12),  # type: ignore[arg-type]
            np.arange(32, dtype=np.uint16)[::-1],  # type: ignore[arg-type]
            np.zeros(32, dtype=np.float32),  # type: ignore[arg-type]
        )
        for layer in shape.layers
    )
    with load(model, tier=TierStart(layers)) as engine:
        assert digest(engine) == expected


# ---- while it runs


def starts(shape: ModelShape) -> Iterator[TierStart]:
    """Other hot sets, pins and priors, with as many slots in all, and with fewer and more."""
    rng = np.random.default_rng(3)
    while True:
        for split in ((12, 12, 12), (8, 16, 12), (16, 8, 12), (20, 20, 20), (8, 8, 8), (32, 32, 32), (8, 32, 20)):
            layers = tuple(
                LayerStart(layer.block, layer.top_k, slots, rng.permutation(32), rng.random(32), max(0, slots - 20))
                for layer, slots in zip(shape.layers, split, strict=True)
            )
            yield TierStart(layers, float(rng.choice([0.0, 0.97, 1.0])))


def test_other_hot_sets_between_tokens_change_no_bit(model: Path, expected: str) -> None:
    with load(model) as engine:
        assert engine.tier is not None
        tier, others, seen = engine.tier, starts(engine.shape), []

        def between() -> None:
            start = next(others)
            tier.replace(start)
            assert [layer.tolist() for layer in tier.resident()] == [
                sorted(layer.order[: layer.slots].tolist()) for layer in start.layers
            ]
            seen.append(tier.memory().slots)

        assert digest(engine, between=between) == expected
        assert len(set(seen)) > 1
        # Counts went on all the while.
        assert tier.counters().tokens["decode"] == [24] * 3


def test_layers_are_in_the_order_of_the_model_however_they_are_placed(model: Path, expected: str) -> None:
    """The policy takes the layers after one for those that a call has not come to yet."""
    start = uniform_start(read_model_shape(model), 0.4)
    with load(model) as engine:
        [device] = engine.tier.devices
        device.place(start.layers[::-1], start.decay)
        for _, places in tier_pools(device._handle, device.blocks):
            assert sorted(places, key=places.__getitem__) == sorted(places)
        assert digest(engine) == expected
        assert any(len(places) > 1 for _, places in tier_pools(device._handle, device.blocks))


def test_pinned_experts_stay_and_the_others_move(model: Path) -> None:
    shape = read_model_shape(model)
    order = np.arange(32)[::-1]
    start = TierStart(tuple(LayerStart(layer.block, 4, 12, order, np.zeros(32), 4) for layer in shape.layers))
    with load(model, tier=start) as engine:
        assert engine.tier is not None
        moved = False
        for seed in range(3):
            digest(engine, seed=seed)
            for resident in engine.tier.resident():
                assert set(range(28, 32)) <= set(resident.tolist())
                moved = moved or resident.tolist() != list(range(20, 32))
        assert moved


def test_counters_read_and_reset_in_the_middle_change_no_bit_and_lose_nothing(model: Path, expected: str) -> None:
    with load(model) as engine:
        assert digest(engine) == expected
        whole = engine.tier.counters()
    with load(model) as engine:
        tier, parts = engine.tier, []
        assert digest(engine, between=lambda: parts.append(tier.counters(reset=True))) == expected
        parts.append(tier.counters(reset=True))
        empty = tier.counters()
    for phase in ("prefill", "decode"):
        for index in range(3):
            total = sum(part.counts[phase][index] for part in parts)
            assert (total == whole.counts[phase][index]).all()
            assert not empty.counts[phase][index].any()
        for name in ("tokens", "cold", "loads"):
            total = np.sum([getattr(part, name)[phase] for part in parts], axis=0)
            assert total.tolist() == getattr(whole, name)[phase]
        assert sum(part.bytes_moved[phase] for part in parts) == whole.bytes_moved[phase]
    for index in range(3):
        assert (sum(part.reuse[index] for part in parts) == whole.reuse[index]).all()
        assert int(whole.reuse[index].sum()) == int(whole.counts["decode"][index].sum()) == 24 * 4
    assert whole.bytes_moved["decode"] > 0
    assert whole.cold_hit_rate("decode") is not None
    assert whole.cold_hits_per_token("decode") == sum(whole.cold["decode"]) / 24


def test_what_is_resident_is_what_has_slots(model: Path) -> None:
    with load(model) as engine:
        digest(engine)
        tier = engine.tier
        resident = tier.resident()
        [device] = tier.devices
        slots = [device.slots(layer.block) for layer in engine.shape.layers]
        assert [np.flatnonzero(layer >= 0).tolist() for layer in slots] == [layer.tolist() for layer in resident]
        owned = sorted(int(slot) for layer in slots for slot in layer if slot >= 0)
        assert owned == list(range(START_SLOTS))
        assert all(len(layer) >= 8 for layer in resident)


def test_memory_is_what_the_experts_take(model: Path) -> None:
    shape = read_model_shape(model)
    with load(model) as engine:
        memory = engine.tier.memory()
        per_expert = shape.layers[0].expert_bytes
        assert memory.host == pytest.approx(96 * per_expert, rel=0.01)
        assert memory.slots == pytest.approx(START_SLOTS * per_expert, rel=0.01)
        assert memory.host_pinned == 0


def test_two_devices_compute_what_they_compute_with_everything_resident(model: Path) -> None:
    found = {}
    for residency in (None, 1.0, 0.4, 0.0):
        start = None if residency is None else uniform_start(read_model_shape(model), residency)
        options: dict[str, Any] = {"proxy": True, "count_routing": False} if start is None else {"tier": start}
        with Engine.load(model, EngineOptions(**OPTIONS, **options, devices=2)) as engine:
            found[residency] = digest(engine)
            if start is not None:
                assert [device.blocks for device in engine.tier.devices] == [(0, 1), (2,)]
                assert engine.tier.counters().tokens["decode"] == [24] * 3
    assert len(set(found.values())) == 1, found


def test_a_start_that_the_second_device_refuses_leaves_both_as_they_were(model: Path, expected: str) -> None:
    """The first device takes it, the native call of the second one fails: block 2 is there, and has too few slots."""
    start = uniform_start(read_model_shape(model), 0.4)
    with load(model, devices=2) as engine:
        assert engine.tier is not None
        placed: list[list[int]] = []

        def between() -> None:
            assert engine.tier is not None
            before = [layer.tolist() for layer in engine.tier.resident()]
            turned = replace(start, layers=tuple(replace(layer, order=layer.order[::-1]) for layer in start.layers))
            with pytest.raises(TierError, match="7 slots, expected at least"):
                engine.place(changed(turned, slots=7))
            assert [layer.tolist() for layer in engine.tier.resident()] == before
            assert engine.tier.start is not None
            assert engine.tier.start.layers[0].slots == start.layers[0].slots, "the start before counts on"
            placed.append(before[0])

        assert digest(engine, between=between) == expected
        assert len(placed) == 24
        assert len({tuple(layer) for layer in placed}) > 1, "experts move on"
        other = replace(start, decay=0.5)
        engine.place(other)
        assert engine.tier.start is other


def test_a_device_that_fails_halfway_is_filled_again(model: Path, expected: str, monkeypatch: Any) -> None:
    start = uniform_start(read_model_shape(model), 0.4)
    with load(model, devices=2) as engine:
        assert engine.tier is not None
        before, second = engine.tier.start, engine.tier.devices[1]
        place, calls = type(second).place, []

        def failing(device: Any, layers: Any, decay: float) -> None:
            place(device, layers, decay)
            calls.append(device)
            if len(calls) == 2:
                raise TierError("the device is lost")

        monkeypatch.setattr(type(second), "place", failing)
        monkeypatch.setattr(type(second), "engine", property(lambda device: "none" if device is second else "host"))
        with pytest.raises(TierError, match="the device is lost"):
            engine.tier.place(replace(start, decay=0.5))
        assert calls == [engine.tier.devices[0], second, engine.tier.devices[0], second]
        assert engine.tier.start is before
        assert digest(engine) == expected


def test_devices_that_cannot_be_filled_again_say_both_reasons(model: Path, monkeypatch: Any) -> None:
    start = uniform_start(read_model_shape(model), 0.4)
    with load(model, devices=2) as engine:
        assert engine.tier is not None
        place = type(engine.tier.devices[0]).place
        left = [1]

        def failing(device: Any, layers: Any, decay: float) -> None:
            if not left:
                raise TierError("no memory at all")
            left.pop()
            place(device, layers, decay)

        monkeypatch.setattr(type(engine.tier.devices[0]), "place", failing)
        with pytest.raises(
            TierError, match=r"no memory at all; and the experts cannot be put back.*no memory"
        ) as found:
            engine.tier.place(start)
        assert found.value.hint == "load the model again"
        assert engine.tier.start is None


def test_more_devices_than_there_are(model: Path) -> None:
    count = len(proxy_devices(2))
    with pytest.raises(TierError, match=f"{count + 1} devices, but this machine has {count}"):
        load(model, devices=count + 1)


# ---- several at once


def test_two_models_at_once_on_one_device(model: Path, other_model: Path, expected: str) -> None:
    with Engine.load(other_model, EngineOptions(**OPTIONS, proxy=True, count_routing=False)) as engine:
        other_expected = digest(engine)
    with load(model) as one, load(other_model, 0.3) as other:
        for _ in range(2):
            assert digest(one) == expected
            assert digest(other) == other_expected
        # Token by token in turns.
        assert digest(one, between=lambda: other.feed([1], "decode") if other.n_past < 250 else None) == expected
    with load(model) as one:
        assert digest(one) == expected


def test_the_same_model_twice_keeps_slots_of_its_own(model: Path, expected: str) -> None:
    with load(model) as one, load(model, 1.0) as other:
        assert digest(one) == digest(other) == expected
        assert [len(layer) for layer in other.tier.resident()] == [32, 32, 32]
        assert sum(len(layer) for layer in one.tier.resident()) == START_SLOTS
        assert sum(other.tier.counters().cold["decode"]) == 0 < sum(one.tier.counters().cold["decode"])


def test_threads_with_an_engine_each(model: Path, other_model: Path, expected: str) -> None:
    with Engine.load(other_model, EngineOptions(**OPTIONS, proxy=True, count_routing=False)) as engine:
        other_expected = digest(engine)
    found: list[tuple[str, str]] = []
    faults: list[BaseException] = []

    def work(path: Path, wanted: str) -> None:
        try:
            for _ in range(3):
                with load(path) as engine:
                    found.extend((digest(engine), wanted) for _ in range(5))
        except BaseException as fault:
            faults.append(fault)

    threads = [
        threading.Thread(target=work, args=arguments)
        for arguments in ((model, expected), (other_model, other_expected), (model, expected))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(found) == 45
    assert all(bits == wanted for bits, wanted in found)


@contextmanager
def second_context(engine: Engine) -> Iterator[Callable[[list[int]], int]]:
    """Another context of an engine's model, as llama.cpp's own interface allows; computes tokens, gives the status."""
    llama = bindings()
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads = 64, 32, 32, 1
    context = llama.llama_init_from_model(engine._context._model, params)
    assert context

    def compute(tokens: list[int]) -> int:
        array = (llama.llama_token * len(tokens))(*tokens)
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        return int(llama.llama_decode(context, llama.llama_batch_get_one(array, len(tokens))))

    try:
        yield compute
    finally:
        llama.llama_free(context)


def test_a_second_context_fails_and_the_first_goes_on(model: Path, expected: str) -> None:
    with load(model) as engine:
        assert digest(engine) == expected
        with second_context(engine) as compute:
            for _ in range(3):
                assert compute([1, 2, 3]) != 0
                with pytest.raises(TierError, match="a second context computes with the same model"):
                    engine.tier.check()
            assert digest(engine) == expected
            # Its failure is not the first one's, whether somebody asked for it or not.
            assert compute([1]) != 0
            assert digest(engine) == expected
        assert digest(engine) == expected


def test_the_second_context_works_when_the_first_is_gone(model: Path) -> None:
    with load(model) as engine:
        engine.prompt([1, 2, 3])
        with second_context(engine) as compute:
            assert compute([1, 2, 3]) != 0
            engine._context._llama.llama_free(engine._context._context)
            engine._context._context = None
            assert compute([1, 2, 3]) == 0


def test_decode_errors_are_not_hidden(model: Path) -> None:
    """A token that does not exist is llama.cpp's to refuse, and the engine goes on."""
    with load(model) as engine:
        with pytest.raises(DecodeError):
            engine.feed([10**6], "decode")
        engine.feed([1], "decode")
        tokens = list(engine.generate(Sampling(temperature=1.0, seed=3), 5))
        assert tokens


def write_adapter(path: Path, tensor: str, matrix: tuple[int, ...]) -> Path:
    """A LoRA adapter of rank 2 for one tensor, with ``(experts, rows, columns)`` or without experts."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    *experts, rows, columns = matrix
    writer.add_tensor(f"{tensor}.lora_a", np.ones((*experts, 2, columns), dtype=np.float32))
    writer.add_tensor(f"{tensor}.lora_b", np.ones((*experts, rows, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_adapters_of_experts_in_tiers_are_refused(model: Path, expected: str, tmp_path: Path) -> None:
    """They would have to move with the slots. Others load, and the model goes on either way."""
    experts = write_adapter(tmp_path / "experts.gguf", "blk.1.ffn_up_exps.weight", (32, SIZE.width, SIZE.embedding))
    router = write_adapter(tmp_path / "router.gguf", "blk.1.ffn_gate_inp.weight", (32, SIZE.embedding))
    init = bindings().llama_adapter_lora_init
    with load(model) as engine:
        assert not init(engine._context._model, bytes(experts))
        assert digest(engine) == expected
        assert init(engine._context._model, bytes(router))
        assert digest(engine) == expected


def test_what_was_computed_after_a_fault_is_forgotten(
    model: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU names a bad id when the step after it has been taken, so nothing that the context holds can be trusted."""
    with load(model) as engine:
        engine.prompt([1, 2, 3])
        engine.feed([4], "decode")
        assert engine.tier is not None
        monkeypatch.setattr(type(engine.tier), "check", _fault)
        with pytest.raises(TierError, match="block 1"):
            engine.logits()
        assert engine.n_past == 0
        monkeypatch.undo()
        assert digest(engine) == expected


def _fault(_tier: object) -> None:
    raise TierError("block 1 selected expert 77, expected 0 to 31")
