"""The published tables of policies, and ours: which experts to keep, one pool or not, what a profile is worth.

Usage: policy_tables.py --routing FOLDER --model GGUF [...] --texts FOLDER [--machine BENCH.json] [--chunks N] [--tune]
[--out FILE]. FOLDER of routing holds gptoss20b and esft_deepseek_v2_lite; texts are DOMAIN/PROJECT.txt. Every number is
of held-out sessions; each row has the published one beside it, where there is one. Tokens a second are predicted by the
cost model, for the machine of a `spark-agent bench` and for the one that the published numbers are of.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from laguna_tables import LagunaTables
from published_routing import published, recorded
from report import parser_of, report, row

from spark_runtime.predict.selections import indicators, moving_averages
from spark_runtime.simulator.policies import Cache, PolicyName
from spark_runtime.simulator.study import ProfileName, Study, equal_slots, placed_slots
from spark_runtime.simulator.tuning import tune
from spark_runtime.tier_start import DECAY, PRIOR_TOKENS

KEEPING: dict[PolicyName, dict[str, float]] = {
    "uniform": {
        "gpt-oss-20b 0.3": 0.702,
        "gpt-oss-20b 0.45": 0.560,
        "gpt-oss-20b 0.6": 0.405,
        "gpt-oss-20b 0.8": 0.180,
        "DeepSeek-V2-Lite 0.3": 0.691,
        "DeepSeek-V2-Lite 0.6": 0.406,
        "tiny-q4_0 0.3": 0.691,
        "tiny-q4_0 0.6": 0.403,
    },
    "static": {
        "gpt-oss-20b 0.3": 0.428,
        "gpt-oss-20b 0.45": 0.274,
        "gpt-oss-20b 0.6": 0.131,
        "gpt-oss-20b 0.8": 0.029,
        "DeepSeek-V2-Lite 0.3": 0.531,
        "DeepSeek-V2-Lite 0.6": 0.243,
        "tiny-q4_0 0.3": 0.431,
        "tiny-q4_0 0.6": 0.182,
    },
    "oracle": {
        "gpt-oss-20b 0.3": 0.415,
        "gpt-oss-20b 0.45": 0.262,
        "gpt-oss-20b 0.6": 0.125,
        "gpt-oss-20b 0.8": 0.026,
        "DeepSeek-V2-Lite 0.3": 0.499,
        "DeepSeek-V2-Lite 0.6": 0.222,
        "tiny-q4_0 0.3": 0.394,
        "tiny-q4_0 0.6": 0.147,
    },
    "lru_pinned": {
        "gpt-oss-20b 0.3": 0.271,
        "gpt-oss-20b 0.45": 0.153,
        "gpt-oss-20b 0.6": 0.068,
        "gpt-oss-20b 0.8": 0.014,
        "DeepSeek-V2-Lite 0.3": 0.421,
        "DeepSeek-V2-Lite 0.6": 0.181,
        "tiny-q4_0 0.3": 0.349,
        "tiny-q4_0 0.6": 0.120,
    },
    "lru": {
        "gpt-oss-20b 0.3": 0.261,
        "gpt-oss-20b 0.45": 0.142,
        "gpt-oss-20b 0.6": 0.059,
        "gpt-oss-20b 0.8": 0.011,
        "DeepSeek-V2-Lite 0.3": 0.409,
        "DeepSeek-V2-Lite 0.6": 0.158,
        "tiny-q4_0 0.3": 0.340,
        "tiny-q4_0 0.6": 0.096,
    },
    "scored": {
        "gpt-oss-20b 0.3": 0.221,
        "gpt-oss-20b 0.45": 0.121,
        "gpt-oss-20b 0.6": 0.052,
        "DeepSeek-V2-Lite 0.3": 0.418,
        "DeepSeek-V2-Lite 0.6": 0.173,
        "tiny-q4_0 0.3": 0.278,
        "tiny-q4_0 0.6": 0.083,
    },
    "belady": {
        "gpt-oss-20b 0.3": 0.152,
        "gpt-oss-20b 0.45": 0.074,
        "gpt-oss-20b 0.6": 0.029,
        "DeepSeek-V2-Lite 0.3": 0.270,
        "DeepSeek-V2-Lite 0.6": 0.086,
        "tiny-q4_0 0.3": 0.174,
        "tiny-q4_0 0.6": 0.039,
    },
}
POOL = {
    "gpt-oss-20b layer 0.3": 0.217,
    "gpt-oss-20b layer 0.6": 0.050,
    "gpt-oss-20b pool 0.3": 0.207,
    "gpt-oss-20b pool 0.6": 0.040,
    "tiny-q4_0 layer 0.3": 0.280,
    "tiny-q4_0 layer 0.6": 0.084,
    "tiny-q4_0 pool 0.3": 0.277,
    "tiny-q4_0 pool 0.6": 0.077,
}
PROFILES: dict[str, tuple[float, ...]] = {
    "gpt-oss-20b none": (0.090, 0.047, 0.041, 0.055),
    "gpt-oss-20b mixed": (0.073, 0.047, 0.041, 0.051),
    "gpt-oss-20b own": (0.073, 0.046, 0.040, 0.051),
    "gpt-oss-20b foreign": (0.073, 0.047, 0.041, 0.051),
    "DeepSeek-V2-Lite none": (0.171, 0.176, 0.171, 0.167),
    "DeepSeek-V2-Lite mixed": (0.149, 0.172, 0.170, 0.156),
    "DeepSeek-V2-Lite own": (0.150, 0.171, 0.169, 0.156),
    "DeepSeek-V2-Lite foreign": (0.154, 0.173, 0.171, 0.160),
    "tiny-q4_0 none": (0.123, 0.085, 0.084, 0.087),
    "tiny-q4_0 mixed": (0.103, 0.083, 0.083, 0.085),
    "tiny-q4_0 own": (0.100, 0.083, 0.083, 0.084),
    "tiny-q4_0 foreign": (0.112, 0.086, 0.085, 0.087),
}
NEARLY_ALL: dict[str, tuple[float, float]] = {
    "gpt-oss-20b none": (0.028, 0.011),
    "gpt-oss-20b mixed": (0.013, 0.008),
    "gpt-oss-20b own": (0.012, 0.008),
    "tiny-q4_0 none": (0.047, 0.019),
    "tiny-q4_0 mixed": (0.030, 0.018),
    "tiny-q4_0 own": (0.028, 0.017),
    "DeepSeek-V2-Lite none": (0.058, 0.049),
    "DeepSeek-V2-Lite mixed": (0.038, 0.040),
    "DeepSeek-V2-Lite own": (0.035, 0.037),
}
SHARING: dict[str, tuple[Cache, str | None]] = {
    "layer": (Cache("scored"), "layer"),
    "placed": (Cache("scored"), None),
    "pool": (Cache("scored", "pool"), "pool"),
    "placed pool": (Cache("scored", "pool"), None),
    "pool, layers to come as any other": (Cache("scored", "pool", waiting_doublings=0), "pool"),
    "pool, layers to come doubled twice": (Cache("scored", "pool", waiting_doublings=2), None),
    "pool, token foreseen": (Cache("scored", "pool", waiting_doublings=0, foreseen=True), "pool"),
}
"""With which of the published rows each is to be compared."""
SCORES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 34.0)
FEWEST_SEEN = 200


def keeping(study: Study, name: str) -> Iterator[dict[str, Any]]:
    residencies = (0.3, 0.45, 0.6, 0.8) if name.startswith("gpt") else (0.3, 0.6)
    for residency in residencies:
        slots = equal_slots(study.trace, residency)
        for policy, published_rates in KEEPING.items():
            found = study.judge(Cache(policy), slots, "mixed")
            rate, number = found.cold_hit_rate, published_rates.get(f"{name} {residency}")
            interval = {"low": rate.low, "high": rate.high}
            yield row("keeping", name, rate.mean, number, policy=policy, residency=residency, **interval)


def sharing(study: Study, name: str) -> Iterator[dict[str, Any]]:
    frequency = study.frequency("mixed")
    if frequency is None:
        raise ValueError("no session calibrates")
    for residency in (0.3, 0.6):
        slots = equal_slots(study.trace, residency)
        placed = placed_slots(study.trace, residency, frequency)
        for shared, (cache, given) in SHARING.items():
            rate = study.judge(cache, placed if shared.startswith("placed") else slots, "mixed").cold_hit_rate.mean
            yield row(
                "one pool",
                name,
                rate,
                None if given is None else POOL.get(f"{name} {given} {residency}"),
                sharing=shared,
                residency=residency,
            )
        rate = study.judge(Cache("static"), placed, "mixed").cold_hit_rate.mean
        yield row("one pool", name, rate, None, sharing="placed, nothing moves", residency=residency)


def comparable(study: Study, name: str) -> Iterator[dict[str, Any]]:
    """Whether a score means the same in every layer: how often an expert is selected next, by its score."""
    trace, frequency = study.trace.select(study.calibrating), study.frequency("mixed")
    if frequency is None:
        raise ValueError("no session calibrates")
    chances = np.full((len(trace.ids), len(SCORES) - 1), np.nan)
    for layer, ids in enumerate(trace.ids):
        scores = moving_averages(trace, layer, DECAY, frequency[layer], PRIOR_TOKENS)
        selected = indicators(ids, trace.n_experts[layer])
        for part, (low, high) in enumerate(itertools.pairwise(SCORES)):
            inside = (scores >= low) & (scores < high)
            if inside.sum() >= FEWEST_SEEN:
                chances[layer, part] = selected[inside].mean()
    for part, (low, high) in enumerate(itertools.pairwise(SCORES)):
        known = chances[~np.isnan(chances[:, part]), part]
        if len(known):
            first, median, last = (round(float(value), 4) for value in np.quantile(known, [0.1, 0.5, 0.9]))
            yield {"table": "chance of a selection by score", "model": name, "score": [low, high],
                   "layers_10_50_90_percent": [first, median, last], "n_layers": len(known)}  # fmt: skip


def tuning(study: Study, name: str) -> Iterator[dict[str, Any]]:
    """Numbers searched on calibration sessions, judged on held-out ones, beside the runtime's own."""
    for residency in (0.3, 0.6):
        slots, cache = equal_slots(study.trace, residency), Cache("scored")
        found = tune(study, cache, slots, "mixed")
        tuned = replace(cache, decay=found.decay, prior_tokens=found.prior_tokens)
        usual, better = (study.judge(one, slots, "mixed").cold_hit_rate for one in (cache, tuned))
        yield row("tuned", name, better.mean, None, residency=residency, decay=found.decay,
                  prior_tokens=found.prior_tokens, untuned=usual.mean, saved_held_out=1 - better.mean / usual.mean,
                  saved_where_tuned=1 - found.cold_hit_rate / found.default_cold_hit_rate)  # fmt: skip


def positions(study: Study, name: str, residency: float) -> Iterator[dict[str, Any]]:
    slots = equal_slots(study.trace, residency)
    profiles: tuple[ProfileName, ...] = ("none", "mixed", "own", "foreign")
    for profile in profiles:
        found = study.judge(Cache("scored"), slots, profile, (64, 256))
        rates = [part.cold_hit_rate for part in found.parts] + [found.cold_hit_rate.mean]
        key = f"{name} {profile}"
        if residency == 0.6:
            given: Sequence[float | None] = PROFILES.get(key, (None,) * 4)
        else:
            first, whole = NEARLY_ALL.get(key, (None, None))
            given = (first, None, None, whole)
        for part, rate, number in zip(("0-64", "64-256", "256-", "whole"), rates, given, strict=True):
            yield row("profile by position", name, rate, number, profile=profile, part=part, residency=residency)


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--routing", type=Path, required=True)
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--machine", type=Path, help="of `spark-agent bench --json`")
    parser.add_argument("--chunks", type=int, default=8, help="of 960 tokens, from each text")
    parser.add_argument("--tune", action="store_true", help="also search decay and prior, which takes many minutes")
    options = parser.parse_args()
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    sources = [
        published(options.routing / "gptoss20b", "gpt-oss-20b", 32),
        published(options.routing / "esft_deepseek_v2_lite", "DeepSeek-V2-Lite", 64),
        *(recorded(model, options.texts, options.chunks) for model in options.model),
    ]
    laguna = LagunaTables(options.machine)
    sessions = {}
    for source in sources:
        study = Study(source.trace, source.workloads, source.held_out)
        sessions[source.name] = {"calibration": len(study.calibrating), "held_out": len(study.judging)}
        tables = [keeping(study, source.name), sharing(study, source.name), comparable(study, source.name),
                  positions(study, source.name, 0.6), positions(study, source.name, 0.85),
                  laguna.rows(study, source)]  # fmt: skip
        if options.tune:
            tables.append(tuning(study, source.name))
        for made in tables:
            rows += made
        sys.stderr.write(f"{source.name}: {time.monotonic() - started:.0f} s\n")
    report({"sessions": sessions, "seconds": round(time.monotonic() - started, 1), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
