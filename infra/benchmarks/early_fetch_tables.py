"""What the runtime's guesses are worth on real traces: recall beside ridge regression, and cold hits saved in slots.

Usage: early_fetch_tables.py --routing FOLDER --model GGUF --texts FOLDER [--chunks N] [--split N] [--out FILE]

The guesses are the runtime's own (``native/predictor.cpp``): learned token by token on the way, first from the
calibration sessions, then going on through the held-out ones, which alone are counted. Beside them: the same from
nothing, over the first held-out tokens; naive Bayes and ridge regression, learned once from the calibration sessions.
The slots are one pool a model, in the order of the sessions, with and without fetching early.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published_routing import Sessions, published, recorded
from report import parser_of, report

from spark_runtime.early_fetch import NO_EARLY_FETCH, PREDICTED_ONE, EarlyFetch
from spark_runtime.placement import frequencies
from spark_runtime.predict.predictors import NaiveBayes, Predictor, Ridge
from spark_runtime.predict.selections import recall_at
from spark_runtime.simulator.study import Study, equal_slots
from spark_runtime.simulator.traces import Trace
from spark_runtime.slot_pool import SlotPool
from spark_runtime.tier_start import PRIOR_TOKENS, LayerStart, TierStart

STEP = 64
"""Tokens between two readings of the weights: in between, guesses are made with the older ones."""
NEW = 2000
WARM = 3000
"""Calibration tokens that the slots see before the held-out ones; what was learned from all of them is put in first."""
WAYS = [NO_EARLY_FETCH, *(EarlyFetch(n, at) for n, at in ((1, 0.5), (1, 0.3), (2, 0.3), (4, 0.2)))]
GUESSING = EarlyFetch(1, float("inf"))


def stacked(trace: Trace) -> NDArray[np.int64]:
    """``[token, layer, k]``"""
    return np.stack(trace.ids, axis=1).astype(np.int64)


def start_of(trace: Trace, profile: Sequence[NDArray[np.float64]], slots: Sequence[int]) -> TierStart:
    layers = [
        LayerStart(layer, trace.ids[layer].shape[1], count, np.argsort(-freq, kind="stable"),
                   freq * trace.ids[layer].shape[1] * PRIOR_TOKENS)
        for layer, (freq, count) in enumerate(zip(profile, slots, strict=True))
    ]  # fmt: skip
    return TierStart(tuple(layers))


def recalls_on_the_way(pool: SlotPool, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """``[layer - 1, token, times]``: share of a token's selections among the best one, two and three times top-k."""
    top_k = ids.shape[2]
    found = []
    for first in range(0, len(ids), STEP):
        part = ids[first : first + STEP]
        of_layers = []
        for layer in range(1, pool.n_layers):
            weights = pool.guesses(layer).astype(np.float32) / PREDICTED_ONE
            scores, row = np.broadcast_to(weights[-1], (len(part), weights.shape[1])).copy(), 0
            for source in range(layer - 1, max(-1, layer - 3), -1):
                scores += weights[row + part[:, source]].sum(axis=1)
                row += pool.guesses(source).shape[1]
            ranked = np.argsort(-scores, axis=1, kind="stable")[:, : 3 * top_k]
            hits = (ranked[:, :, None] == part[:, layer][:, None, :]).any(axis=2)
            of_layers.append(np.stack([hits[:, : times * top_k].sum(axis=1) for times in (1, 2, 3)], axis=1) / top_k)
        found.append(np.stack(of_layers))
        pool.decode(part)
    return np.concatenate(found, axis=1)


def learned_from(trace: Trace, start: TierStart) -> list[NDArray[np.int16]]:
    """Weights by layer; what is in slots makes no difference to them."""
    pool = SlotPool(start)
    pool.set_early(GUESSING)
    pool.decode(stacked(trace))
    return [pool.guesses(layer) for layer in range(pool.n_layers)]


def recall_rows(
    name: str, calibrating: Trace, judging: Trace, start: TierStart, knowledge: list[NDArray[np.int16]]
) -> Iterator[dict[str, Any]]:
    learned, new = SlotPool(start), SlotPool(start)
    for pool in (learned, new):
        pool.set_early(GUESSING)
    for layer, weights in enumerate(knowledge):
        learned.set_guesses(layer, weights)
    ids = stacked(judging)
    rows = {"on the way": recalls_on_the_way(learned, ids).mean(axis=(0, 1)).tolist()}
    from_nothing = recalls_on_the_way(new, ids[:NEW]).mean(axis=0)
    for first, last in ((0, 100), (100, 250), (250, 500), (500, 1000), (1000, NEW)):
        rows[f"from nothing, tokens {first} to {last}"] = from_nothing[first:last].mean(axis=0).tolist()
    predictors: dict[str, type[Predictor]] = {"naive Bayes": NaiveBayes, "ridge": Ridge}
    for label, kind in predictors.items():
        values = []
        for layer in range(1, len(judging.ids)):
            predictor = kind(layer)
            predictor.learn(calibrating)
            top_k = ids.shape[2]
            values.append(recall_at(predictor.scores(judging), judging.ids[layer], (top_k, 2 * top_k, 3 * top_k)))
        rows[label] = np.mean(values, axis=0).tolist()
    for label, values in rows.items():
        yield {"table": "recall", "model": name, "predictor": label, "recall": [round(value, 4) for value in values]}


def slot_rows(
    name: str, calibrating: Trace, judging: Trace, profile: Any, knowledge: list[NDArray[np.int16]]
) -> Iterator[dict[str, Any]]:
    warm, ids = stacked(calibrating)[-WARM:], stacked(judging)
    selections = ids.size
    for residency in (0.3, 0.6):
        start = start_of(judging, profile, equal_slots(judging, residency))
        for way in WAYS:
            pool = SlotPool(start)
            pool.set_early(way)
            for layer, weights in enumerate(knowledge if way.experts else ()):
                pool.set_guesses(layer, weights)
            pool.decode(warm)
            pool.reset_counts()
            pool.decode(ids)
            counts = [pool.counts(layer, "decode") for layer in range(pool.n_layers)]
            sums = {key: sum(getattr(count, key) for count in counts) / selections
                    for key in ("cold", "loads", "early", "early_used", "early_wasted")}  # fmt: skip
            yield {"table": "slots", "model": name, "residency": residency, "experts": way.experts,
                   "threshold": way.threshold if way.experts else None, "cold_hit_rate": round(sums["cold"], 4),
                   "early": round(sums["early"], 4), "used": round(sums["early_used"], 4),
                   "wasted": round(sums["early_wasted"], 4),
                   "moved_per_selection": round(sums["cold"] + sums["early"], 4)}  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--routing", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=4, help="of 960 tokens, from each text")
    parser.add_argument("--split", type=int, default=0, help="another number holds other sessions out")
    parser.add_argument("--only", nargs="+", choices=("gpt-oss", "deepseek", "own"), help="of the traces")
    options = parser.parse_args()
    started = time.monotonic()
    sources: dict[str, Callable[[], Sessions]] = {
        "gpt-oss": lambda: published(options.routing / "gptoss20b", "gpt-oss-20b", 32, options.split),
        "deepseek": lambda: published(options.routing / "esft_deepseek_v2_lite", "DeepSeek-V2-Lite", 64, options.split),
        "own": lambda: recorded(options.model, options.texts, options.chunks, options.split),
    }
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for source in (sources[name]() for name in options.only or sources):
        study = Study(source.trace, source.workloads, source.held_out)
        calibrating, judging = study.trace.select(study.calibrating), study.trace.select(study.judging)
        about[source.name] = {"calibration_tokens": calibrating.n_tokens, "held_out_tokens": judging.n_tokens}
        counts = [calibrating.counts(session) for session in range(calibrating.n_sessions)]
        profile = frequencies(counts, calibrating.lengths.tolist())
        whole = start_of(judging, profile, equal_slots(judging, 1.0))
        knowledge = learned_from(calibrating, whole)
        rows += recall_rows(source.name, calibrating, judging, whole, knowledge)
        rows += slot_rows(source.name, calibrating, judging, profile, knowledge)
        sys.stderr.write(f"{source.name}: {time.monotonic() - started:.0f} s\n")
    report(
        {"split": options.split, "sessions": about, "seconds": round(time.monotonic() - started, 1), "rows": rows},
        options.out,
    )


if __name__ == "__main__":
    main()
