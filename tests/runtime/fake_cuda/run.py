"""Run a model on a card that is the processor: started by test_cuda_engine.py with the library of fake_cuda.cpp."""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from pathlib import Path

library, model = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.append(sys.argv[3])  # infra/benchmarks

from spark_runtime.native.nvrtc import kernels_path  # noqa: E402

kernels_path((9, 0), (13, 0))  # NVRTC would look for a real driver in the library that comes next
fake = ctypes.CDLL(str(library))  # before anything asks for libcuda.so.1

from exactness_runs import CASES  # noqa: E402

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch  # noqa: E402
from spark_runtime.engine import Engine, EngineOptions  # noqa: E402
from spark_runtime.ggml import ggml_base, share_registry  # noqa: E402
from spark_runtime.llama import bindings  # noqa: E402
from spark_runtime.model_shape import read_model_shape  # noqa: E402
from spark_runtime.tier_start import uniform_start  # noqa: E402


def register() -> None:
    """Make the fake card one of ggml's devices."""
    bindings()
    share_registry()
    everything = ctypes.CDLL(None)
    everything.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    cpu = everything.ggml_backend_dev_by_type(0)
    fake.fake_device.restype = ctypes.c_void_p
    fake.fake_device.argtypes = [ctypes.c_void_p]
    everything.ggml_backend_device_register.argtypes = [ctypes.c_void_p]
    everything.ggml_backend_device_register(fake.fake_device(cpu))
    assert ggml_base()


def run(residency: float | None, early: EarlyFetch = NO_EARLY_FETCH) -> dict[str, object]:
    shape = read_model_shape(model)
    how = (
        {"proxy": True, "count_routing": False}
        if residency is None
        else {"tier": uniform_start(shape, residency), "early": early}
    )
    options = EngineOptions(n_ctx=1024, n_batch=256, n_ubatch=128, n_threads=1, devices=1, repack=False, **how)
    before = [fake.fake_launches(kernel) for kernel in range(8)]
    with Engine.load(model, options) as engine:
        digest, turns, learned = hashlib.sha256(), hashlib.sha256(), {}
        for name in ("prompts", "batches", "generate"):
            digest.update(CASES[name](engine, 0).sha256.encode())
        # Long prompts: layers are fetched ahead, at 128 tokens a step, and the last layer routes a single one.
        for length in (300, 40, 520):
            engine.reset()
            engine.prompt([(7 * token + length) % engine.n_vocab for token in range(length)])
            digest.update(engine.logits().tobytes())
            for token in range(12):
                engine.feed([token], "decode")
                digest.update(engine.logits().tobytes())
        if engine.tier is not None and early.experts:
            # Placed anew, also with other slots, scores, counts and what was learned go on.
            for again in (residency, 0.8, residency):
                engine.tier.place(uniform_start(shape, again))
                for token in range(6):
                    engine.feed([token], "decode")
            # By turns without, as in a trial: what was learned is set aside meanwhile.
            for way in (NO_EARLY_FETCH, early, NO_EARLY_FETCH, early):
                learned = engine.tier.guesses() or learned
                engine.tier.set_early(way)
                if way.experts:
                    engine.tier.set_guesses(learned)
                for token in range(9):
                    engine.feed([token], "decode")
                    turns.update(engine.logits().tobytes())
        result: dict[str, object] = {"logits": digest.hexdigest(), "turns": turns.hexdigest()}
        if engine.tier is not None:
            counters = engine.tier.counters()
            result |= {
                "engine": engine.tier.devices[0].engine,
                "cold": counters.cold,
                "loads": counters.loads,
                "early": [counters.early, counters.early_used, counters.early_wasted],
                "guesses": {block: layer.weights.tolist() for block, layer in engine.tier.guesses().items()},
                "tokens": counters.tokens,
                "counts": {phase: [layer.tolist() for layer in layers] for phase, layers in counters.counts.items()},
                "reuse": [layer.tolist() for layer in counters.reuse],
                "resident": [layer.tolist() for layer in engine.tier.resident()],
            }
    result["launches"] = [fake.fake_launches(kernel) - count for kernel, count in enumerate(before)]
    return result


fake.fake_launches.restype = ctypes.c_uint64
if sys.argv[4] == "card":
    register()
runs = [run(residency) for residency in (None, 1.0, 0.6, 0.31, 0.01)]
runs += [
    run(residency, early) for residency in (0.6, 0.31) for early in (EarlyFetch(2, 0.2), EarlyFetch(3, float("-inf")))
]
json.dump(runs, sys.stdout)
