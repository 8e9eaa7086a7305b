"""Decode of several configurations side by side: all loaded at once, the same tokens to each in turn.

Usage: tier_interleaved.py MODEL.gguf [--residency 0.6 0.31] [--rounds 7] [--tokens 100] [--devices N] [--out FILE]
[--prompt N] [--processor-time]. A machine's speed drifts by more than what is to be told apart, so each round gives
every configuration the same new tokens, and medians over rounds are compared. llama.cpp itself comes first and last.
Needs memory for all of them. With --processor-time, for one thread without a GPU, what else runs on the machine costs
no time but what it takes of the caches; speeds are then the median over rounds of the ratio to plain llama.cpp's two
of the same round, and the link is measured, for predicted_speed.py.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import parser_of, report

from spark_runtime.bench import random_tokens
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.link import measure_link
from spark_runtime.model_shape import read_model_shape
from spark_runtime.placement import frequencies, greedy_slots, layer_sizes, residency_budget
from spark_runtime.tier_start import profile_start, uniform_start
from spark_schemas.model import ModelShape

CALIBRATION, WARM = 400, 20


def profile(model: Path, shape: ModelShape, options: dict[str, Any]) -> list[np.ndarray]:
    """Frequencies from the slots' own counters, over tokens that are not measured."""
    with Engine.load(model, EngineOptions(tier=uniform_start(shape, 1.0), **options)) as engine:
        for token in random_tokens(CALIBRATION, engine.n_vocab, 101):
            engine.feed([token], "decode")
        return frequencies([engine.tier.counters().counts["decode"]], [CALIBRATION])


def decode(engine: Engine, tokens: Sequence[int], clock: Callable[[], float]) -> tuple[float, bytes]:
    """Tokens a second, and the last logits."""
    engine.synchronize()
    began = clock()
    for token in tokens:
        engine.feed([token], "decode")
        logits = engine.logits()
    return len(tokens) / (clock() - began), logits.tobytes()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = read_model_shape(arguments.model)
    clock = time.process_time if arguments.processor_time else time.perf_counter
    length = max(CALIBRATION, arguments.prompt + WARM + arguments.rounds * arguments.tokens) + 64
    options = {"n_ctx": length, "n_batch": 512, "n_threads": arguments.threads, "devices": arguments.devices}
    frequency, sizes = profile(arguments.model, shape, options), layer_sizes(shape)
    plain = EngineOptions(count_routing=False, repack=False, **options)
    configurations = {
        "plain": plain,
        "proxy_nothing_tiered": EngineOptions(proxy=True, count_routing=False, **options),
        "all_in_slots": EngineOptions(tier=uniform_start(shape, 1.0), **options),
    }
    residencies: dict[str, float] = {}
    for residency in arguments.residency:
        slots = greedy_slots(frequency, sizes, residency_budget(sizes, residency))
        residencies[f"calibrated_{residency:.0%}"] = residency
        configurations[f"calibrated_{residency:.0%}"] = EngineOptions(
            tier=profile_start(shape, frequency, slots), **options
        )
    configurations["plain_again"] = plain
    engines = {name: Engine.load(arguments.model, chosen) for name, chosen in configurations.items()}
    rows: dict[str, dict[str, Any]] = {name: {"runs": [], "hash": hashlib.sha256()} for name in engines}
    vocabulary = next(iter(engines.values())).n_vocab
    for engine in engines.values():
        engine.prompt(random_tokens(arguments.prompt, vocabulary, 202))
        decode(engine, random_tokens(WARM, vocabulary, 203), clock)
        if engine.tier is not None:
            engine.tier.reset_counts()
    for number in range(arguments.rounds):
        tokens = random_tokens(arguments.tokens, vocabulary, 300 + number)
        for name, engine in engines.items():
            speed, logits = decode(engine, tokens, clock)
            rows[name]["runs"].append(round(speed, 1))
            rows[name]["hash"].update(logits)
    base = statistics.median(rows["plain"]["runs"])
    result = []
    for name, engine in engines.items():
        median = statistics.median(rows[name]["runs"])
        if arguments.processor_time:
            pairs = zip(rows[name]["runs"], rows["plain"]["runs"], rows["plain_again"]["runs"], strict=True)
            median = round(base * statistics.median(2 * own / (first + last) for own, first, last in pairs), 1)
        cold = engine.tier.counters().cold_hits_per_token("decode") if engine.tier is not None else None
        result.append(
            {
                "config": name,
                "residency": residencies.get(name, 1.0),
                "decode_tok_s": median,
                "share_of_plain": round(median / base, 3),
                "microseconds_more": round(1e6 / median - 1e6 / base, 1),
                "cold_hits_per_token": cold,
                "runs": rows[name]["runs"],
                "last_logits_sha256": rows[name]["hash"].hexdigest(),
            }
        )
        engine.close()
    about: dict[str, Any] = {
        "model": arguments.model.stem,
        "name": shape.name,
        "devices": arguments.devices,
        "fingerprint": shape.fingerprint,
        "architecture": shape.architecture,
        "threads": arguments.threads,
    }
    if arguments.processor_time:
        selected = sum(layer.top_k for layer in shape.layers)
        about["expert_bytes"] = sum(layer.top_k * layer.expert_bytes for layer in shape.layers) / selected
        about["machine"] = {"n_layers": len(shape.layers), "link": measure_link(on_gpu=False).as_json()}
        about["time"] = "of the processor"
    return {**about, "rounds": arguments.rounds, "tokens": arguments.tokens, "rows": result}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--residency", type=float, nargs="+", default=[0.6, 0.3125])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--devices", type=int, default=1, help="GPUs that every configuration is split over")
    arguments = parser.parse_args()
    report(run(arguments), arguments.out)


if __name__ == "__main__":
    main()
