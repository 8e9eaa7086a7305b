"""How well earlier selections predict a layer's, and what fetching early saves: the published tables, and ours.

Usage: prediction_tables.py --routing FOLDER --model GGUF --texts FOLDER [--chunks N] [--split N] [--out FILE], as
policy_tables.py. Of models and splits that nobody published, what was published is null.
Predictors learn from the calibration sessions; every number is of held-out sessions, over all layers but the first,
which no layer precedes.
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

from spark_runtime.placement import frequencies
from spark_runtime.predict.predictors import NaiveBayes, Predictor, Ridge
from spark_runtime.predict.prefetch import replay_prefetch
from spark_runtime.predict.selections import last_selections, moving_averages, recall_at
from spark_runtime.simulator.study import Study, equal_slots
from spark_runtime.simulator.traces import Trace
from spark_runtime.tier_start import DECAY, PRIOR_TOKENS

Scores = Callable[[int], NDArray[np.floating]]
GPT, DEEPSEEK, TINY = "gpt-oss-20b", "DeepSeek-V2-Lite", "tiny-q4_0"
RECALL: dict[str, dict[str, tuple[float, float, float]]] = {
    "profile frequency": {GPT: (0.278, 0.489, 0.663), DEEPSEEK: (0.213, 0.359, 0.479), TINY: (0.174, 0.294, 0.399)},
    "last token": {GPT: (0.458, 0.640, 0.761), DEEPSEEK: (0.286, 0.440, 0.545), TINY: (0.244, 0.377, 0.466)},
    "moving average": {GPT: (0.464, 0.704, 0.844), DEEPSEEK: (0.305, 0.474, 0.594), TINY: (0.289, 0.448, 0.559)},
    "naive Bayes": {GPT: (0.590, 0.796, 0.888), DEEPSEEK: (0.505, 0.713, 0.822), TINY: (0.405, 0.569, 0.669)},
    "ridge": {GPT: (0.686, 0.872, 0.937), DEEPSEEK: (0.659, 0.837, 0.904), TINY: (0.513, 0.687, 0.779)},
    "ridge + moving average": {
        GPT: (0.708, 0.888, 0.944),
        DEEPSEEK: (0.648, 0.829, 0.900),
        TINY: (0.518, 0.693, 0.787),
    },
}
PREFETCH: dict[str, dict[int, tuple[float | None, float | None]]] = {
    f"{GPT} 0.3": {0: (0.217, None), 1: (0.139, 0.36), 2: (0.102, 0.51), 4: (0.073, 0.72)},
    f"{GPT} 0.6": {0: (0.051, None), 1: (0.034, 0.17), 2: (0.028, 0.23), 4: (0.025, 0.27)},
    f"{DEEPSEEK} 0.3": {0: (0.423, None), 1: (0.321, 0.48), 2: (0.248, 0.57), 4: (0.161, 0.79)},
    f"{DEEPSEEK} 0.6": {0: (0.179, None), 1: (0.116, 0.27), 2: (0.082, 0.37), 4: (0.054, 0.54)},
    f"{TINY} 0.3": {0: (0.285, None), 1: (0.244, 0.35), 2: (0.217, 0.43), 4: (0.182, 0.61)},
    f"{TINY} 0.6": {0: (0.088, None), 1: (0.071, 0.17), 2: (0.061, 0.25), 4: (0.052, 0.34)},
}
UNPUBLISHED: dict[int, tuple[float | None, float | None]] = dict.fromkeys((0, 1, 2, 4), (None, None))
LEARNED = {500: 0.87, 2000: 0.95}
"""Of the final recall on the tiny model, by tokens learned from."""
DOMAINS = {"code": (0.507, 0.509), "text": (0.520, 0.496)}
"""Recall at top-k with both domains' matrix and with the domain's own."""


def predictors(calibrating: Trace, judging: Trace) -> dict[str, Scores]:
    """By name, what gives ``[token, expert]`` scores of a layer."""
    counts = [calibrating.counts(session) for session in range(calibrating.n_sessions)]
    profile = frequencies(counts, calibrating.lengths.tolist())

    def frequency(layer: int) -> NDArray[np.floating]:
        return np.broadcast_to(profile[layer], (judging.n_tokens, len(profile[layer])))

    def last(layer: int) -> NDArray[np.floating]:
        # Of what the last token did not select the profile decides: its shares are below 1.
        return last_selections(judging, layer) + profile[layer]

    def average(layer: int) -> NDArray[np.floating]:
        return moving_averages(judging, layer, DECAY, profile[layer], PRIOR_TOKENS)

    return {
        "profile frequency": frequency,
        "last token": last,
        "moving average": average,
        "naive Bayes": lambda layer: learned(NaiveBayes(layer), calibrating).scores(judging),
        "ridge": lambda layer: learned(Ridge(layer), calibrating).scores(judging),
        "ridge + moving average": lambda layer: learned(Ridge(layer, average_decay=DECAY), calibrating).scores(judging),
    }


def learned(predictor: Predictor, trace: Trace) -> Predictor:
    predictor.learn(trace)
    return predictor


def recalls(judging: Trace, scores: Scores) -> list[float]:
    """Mean over layers at one, two and three times top-k."""
    found = []
    for layer in range(1, len(judging.ids)):
        top_k = judging.ids[layer].shape[1]
        found.append(recall_at(scores(layer), judging.ids[layer], (top_k, 2 * top_k, 3 * top_k)))
    return [float(value) for value in np.mean(found, axis=0)]


def recall_rows(name: str, calibrating: Trace, judging: Trace) -> Iterator[dict[str, Any]]:
    top_k = judging.ids[0].shape[1]
    for predictor, scores in predictors(calibrating, judging).items():
        for times, (value, given) in enumerate(
            zip(recalls(judging, scores), RECALL[predictor].get(name, (None, None, None)), strict=True), start=1
        ):
            yield {"table": "recall", "model": name, "predictor": predictor, "at": times * top_k,
                   "recall": round(value, 4), "published": given}  # fmt: skip


def prefetch_rows(name: str, calibrating: Trace, judging: Trace) -> Iterator[dict[str, Any]]:
    counts = [calibrating.counts(session) for session in range(calibrating.n_sessions)]
    profile = frequencies(counts, calibrating.lengths.tolist())
    scores: list[NDArray[np.floating] | None] = [None]
    scores += [learned(Ridge(layer), calibrating).scores(judging) for layer in range(1, len(judging.ids))]
    for residency in (0.3, 0.6):
        slots = equal_slots(judging, residency)
        for n_early, (rate, moved) in PREFETCH.get(f"{name} {residency}", UNPUBLISHED).items():
            found = replay_prefetch(judging, slots, profile, scores, n_early)
            yield {"table": "prefetch", "model": name, "residency": residency, "fetched_early": n_early,
                   "cold_hit_rate": round(found.cold_hit_rate, 4), "published": rate,
                   "moved_per_selection": round(found.moved_per_selection, 4),
                   "published_moved_per_selection": moved}  # fmt: skip


def learning_rows(name: str, sessions: Sessions, study: Study) -> Iterator[dict[str, Any]]:
    """How much of the recall a few tokens give, and what one domain's matrix is worth to the other."""
    calibrating, judging = study.trace.select(study.calibrating), study.trace.select(study.judging)
    whole = recalls(judging, lambda layer: learned(Ridge(layer), calibrating).scores(judging))[0]
    for n_tokens, given in LEARNED.items():
        few = spread(calibrating, n_tokens)
        value = recalls(judging, ridge_of(few, judging))[0]
        yield {"table": "tokens learned from", "model": name, "tokens": n_tokens, "recall": round(value, 4),
               "of_all": round(value / whole, 4), "published": given if name == TINY else None}  # fmt: skip
    domains = sorted(set(sessions.workloads))
    for judged in domains:
        part = study.trace.select([index for index in study.judging if sessions.workloads[index] == judged])
        for source in ("all", *domains):
            taken = [index for index in study.calibrating if source in {"all", sessions.workloads[index]}]
            value = recalls(part, ridge_of(study.trace.select(taken), part))[0]
            both, own = DOMAINS.get(judged, (None, None)) if name == TINY else (None, None)
            given_value = {"all": both, judged: own}.get(source)
            yield {"table": "domain learned from", "model": name, "judged": judged, "learned": source,
                   "recall": round(value, 4), "published": given_value}  # fmt: skip


def ridge_of(calibrating: Trace, judging: Trace) -> Scores:
    return lambda layer: learned(Ridge(layer), calibrating).scores(judging)


def spread(trace: Trace, n_tokens: int) -> Trace:
    """The first tokens of every session, so many in all."""
    each = max(1, n_tokens // trace.n_sessions)
    rows = [
        np.arange(start, min(start + each, end)) for start, end in zip(trace.offsets, trace.offsets[1:], strict=False)
    ]
    taken = np.concatenate(rows)
    offsets = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64)
    return Trace(tuple(ids[taken] for ids in trace.ids), trace.n_experts, offsets)


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--routing", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=8, help="of 960 tokens, from each text")
    parser.add_argument("--split", type=int, default=0, help="another number holds other sessions out")
    options = parser.parse_args()
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    sources: Sequence[Sessions] = [
        published(options.routing / "gptoss20b", GPT, 32, options.split),
        published(options.routing / "esft_deepseek_v2_lite", DEEPSEEK, 64, options.split),
        recorded(options.model, options.texts, options.chunks, options.split),
    ]
    for source in sources:
        study = Study(source.trace, source.workloads, source.held_out)
        calibrating, judging = study.trace.select(study.calibrating), study.trace.select(study.judging)
        about[source.name] = {"calibration_tokens": calibrating.n_tokens, "held_out_tokens": judging.n_tokens}
        rows += recall_rows(source.name, calibrating, judging)
        rows += prefetch_rows(source.name, calibrating, judging)
        if "code" in source.workloads:
            rows += learning_rows(source.name, source, study)
        sys.stderr.write(f"{source.name}: {time.monotonic() - started:.0f} s\n")
    report(
        {"split": options.split, "sessions": about, "seconds": round(time.monotonic() - started, 1), "rows": rows},
        options.out,
    )


if __name__ == "__main__":
    main()
