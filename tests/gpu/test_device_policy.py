"""What a tier decides while a model runs is what the slot policy decides over the same selections.

The selections come from a run with every expert resident. On a GPU the kernels decide, and a copy of the policy on the
host replays; without one the host decides in both, and the test shows that the engine asks it in the right order.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from small_architectures import ModelSize
from small_models import write_small_model

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import InstallationError
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.session_counts import SessionCounts
from spark_runtime.slot_pool import PoolView, SlotPool, tier_pools
from spark_runtime.tier import PHASES
from spark_runtime.tier_start import TierStart, profile_start, uniform_start
from spark_schemas.ids import Phase
from spark_schemas.model import ModelShape

CONTEXT, BATCH = 512, 64
Call = tuple[Phase, list[np.ndarray]]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def decides(request: pytest.FixtureRequest) -> str:
    """Who is to decide."""
    from spark_runtime.llama import bindings

    try:
        gpu = bool(bindings().llama_supports_gpu_offload()) and shutil.which("nvidia-smi") is not None
    except InstallationError as error:
        pytest.skip(str(error))
    if gpu != (request.param == "cuda"):
        pytest.skip("needs a CUDA build of llama-cpp-python and a GPU" if not gpu else "the GPU decides here")
    return str(request.param)


@pytest.fixture(params=["qwen3moe", "gpt-oss", "llama4", "trained"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "trained":
        return demo_model_path()
    changes = {"block_count": 4} if request.param == "qwen3moe" else {}
    return write_small_model(
        tmp_path / "model.gguf", request.param, ModelSize(embedding=128, width=128, vocabulary=64), changes=changes
    )


class Recorder(SessionCounts):
    """Keeps every decode call's selections, of prompts too."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.calls: list[Call] = []

    def add(
        self,
        phase: Phase,
        n_tokens: int,
        ids: Sequence[np.ndarray],
        hidden: Mapping[str, Sequence[np.ndarray]] | None = None,
    ) -> None:
        self.calls.append((phase, [np.array(selected) for selected in ids]))


def script(seed: int) -> list[tuple[Phase, int]]:
    """Tokens of each decode call: prompts around the slots and through them, single tokens, small batches."""
    rng = np.random.default_rng(seed)
    calls: list[tuple[Phase, int]] = [("prefill", 40), ("prefill", 3), *[("decode", 1)] * 30]
    calls += [("decode", int(size)) for size in rng.permutation(np.arange(2, 9))]
    calls += [("prefill", BATCH), *[("decode", 1)] * 20, ("decode", 20)]
    calls += [(PHASES[int(rng.integers(2))], int(size)) for size in rng.choice([1, 1, 1, 2, 8, 9, 30], 40)]
    return calls


def run(engine: Engine, calls: list[tuple[Phase, int]], *, before_call: Callable[[int], None] = lambda _: None) -> None:
    rng = np.random.default_rng(len(calls))
    for index, (phase, count) in enumerate(calls):
        tokens = rng.integers(0, 64, count).tolist()
        if engine.n_past + count > CONTEXT:
            engine.reset()
        before_call(index)
        engine.feed(tokens, phase)


def selections(path: Path, calls: list[tuple[Phase, int]]) -> list[Call]:
    with Engine.load(path, EngineOptions(n_ctx=CONTEXT, n_batch=BATCH, n_threads=1, devices=1, proxy=True)) as engine:
        recorder = Recorder(engine.shape)
        with engine.counting(recorder):
            run(engine, calls)
        assert len(recorder.calls) == len(calls)
        return recorder.calls


@dataclass
class Replay:
    """Pools on the host in the place of a tier's, one for each class of layers."""

    shape: ModelShape
    pools: list[tuple[SlotPool, dict[int, int]]]

    @classmethod
    def of(cls, engine: Engine, start: TierStart) -> Replay:
        found = views(engine)
        return cls(engine.shape, [(SlotPool(part(start, places)), places) for _, places in found])

    def place(self, start: TierStart) -> None:
        for pool, places in self.pools:
            pool.place(part(start, places))

    def step(self, call: Call) -> None:
        phase, ids = call
        of_block = dict(zip((layer.block for layer in self.shape.layers), ids, strict=True))
        for pool, places in self.pools:
            pool.step([of_block[block] for block in sorted(places, key=places.__getitem__)], phase)

    def reset_counts(self) -> None:
        for pool, _ in self.pools:
            pool.reset_counts()


def part(start: TierStart, places: dict[int, int]) -> TierStart:
    of_block = {layer.block: layer for layer in start.layers}
    return replace(start, layers=tuple(of_block[block] for block in sorted(places, key=places.__getitem__)))


def views(engine: Engine) -> list[tuple[PoolView, dict[int, int]]]:
    assert engine.tier is not None
    [device] = engine.tier.devices
    device.read()
    return tier_pools(device._handle, device.blocks)


def check_equal(engine: Engine, replay: Replay) -> int:
    """Compare everything; the cold hits."""
    cold = 0
    for (found, places), (expected, same) in zip(views(engine), replay.pools, strict=True):
        assert places == same
        for place in places.values():
            one, other = found.experts(place), expected.experts(place)
            for name in ("slots", "stamps", "recency", "priors", "scores"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
            assert found.n_resident(place) == expected.n_resident(place)
            for phase in PHASES:
                counted, counts = found.counts(place, phase), expected.counts(place, phase)
                np.testing.assert_array_equal(counted.selections, counts.selections, err_msg=phase)
                np.testing.assert_array_equal(counted.reuse, counts.reuse, err_msg=phase)
                for name in ("tokens", "cold", "loads", "early", "early_used", "early_wasted"):
                    assert (phase, name, getattr(counted, name)) == (phase, name, getattr(counts, name))
                cold += counts.cold
    return cold


def profiled(shape: ModelShape, residency: float, decay: float, pinned: float, seed: int) -> TierStart:
    rng = np.random.default_rng(seed)
    frequency = [rng.dirichlet(np.full(layer.n_experts, 0.5)) for layer in shape.layers]
    slots = [layer.slots for layer in uniform_start(shape, residency).layers]
    return profile_start(shape, frequency, slots, decay=decay, pinned_share=pinned)


def load(path: Path, start: TierStart, decides: str, early: EarlyFetch = NO_EARLY_FETCH) -> Engine:
    size = {"n_ctx": CONTEXT, "n_batch": BATCH, "n_threads": 1, "devices": 1}
    engine = Engine.load(path, EngineOptions(**size, tier=start, early=early))
    assert engine.tier is not None
    assert {device.engine for device in engine.tier.devices} == {decides}
    return engine


def test_tiers_decide_as_the_policy_does(decides: str, model: Path) -> None:
    shape, calls = read_model_shape(model), script(1)
    chosen = selections(model, calls)
    starts = {
        "all": uniform_start(shape, 1.0),
        "floor": uniform_start(shape, 0.0),
        "some": uniform_start(shape, 0.6),
        "profiled": profiled(shape, 0.5, 0.97, 0.3, seed=1),
        "lru": uniform_start(shape, 0.5, decay=0.0),
        "counts": profiled(shape, 0.4, 1.0, 0.0, seed=2),
    }
    for name, start in starts.items():
        with load(model, start, decides) as engine:
            replay = Replay.of(engine, start)
            run(engine, calls)
            for call in chosen:
                replay.step(call)
            cold = check_equal(engine, replay)
            assert (cold == 0) == (name == "all"), name


@pytest.mark.parametrize("early", [EarlyFetch(1, 0.3), EarlyFetch(3, 0.05), EarlyFetch(2, float("-inf"))], ids=str)
def test_tiers_fetch_early_and_learn_as_the_policy_does(decides: str, model: Path, early: EarlyFetch) -> None:
    shape, calls = read_model_shape(model), script(3)
    calls += [("decode", 1)] * 150
    chosen = selections(model, calls)
    fetched = 0
    for start in (uniform_start(shape, 0.6), profiled(shape, 0.4, 0.97, 0.2, seed=5)):
        with load(model, start, decides, early) as engine:
            replay = Replay.of(engine, start)
            for pool, _ in replay.pools:
                pool.set_early(early)
            run(engine, calls)
            for call in chosen:
                replay.step(call)
            check_equal(engine, replay)
            assert engine.tier is not None
            guesses = engine.tier.guesses()
            for pool, places in replay.pools:
                for block, place in places.items():
                    if place:
                        np.testing.assert_array_equal(pool.guesses(place), guesses[block].weights)
            fetched += sum(sum(engine.tier.counters().early[phase]) for phase in PHASES)
    assert fetched > 0


def test_a_tier_placed_again_goes_on_as_the_policy_does(decides: str, model: Path) -> None:
    """Other hot sets, pins and priors between tokens, counters read and reset."""
    shape, calls = read_model_shape(model), script(2)
    chosen = selections(model, calls)
    first = profiled(shape, 0.5, 0.97, 0.2, seed=3)
    with load(model, first, decides) as engine:
        tier, replay = engine.tier, Replay.of(engine, first)
        assert tier is not None

        def between(index: int) -> None:
            if index % 17 == 16:
                again = profiled(shape, 0.5, 0.97, 0.1 * (index % 4), seed=index)
                tier.replace(again)
                replay.place(again)
            if index % 11 == 10:
                tier.counters(reset=index % 2 == 0)
                if index % 2 == 0:
                    replay.reset_counts()
            if index % 13 == 12:
                check_equal(engine, replay)
            replay.step(chosen[index])

        run(engine, calls, before_call=between)
        assert check_equal(engine, replay) > 0
