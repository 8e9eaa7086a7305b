"""How slots are shared between layers, and what decides which expert leaves: cold-hit rates on held-out demo sessions.

Usage: policies.py [--out FILE]. Records the demo sessions with a local trace, calibrates on the calibration sessions,
and replays the held-out ones: slots by frequency per byte (what manifests carry) or the same share in every layer;
LRU started from the profile, or scores (decay 0.97, prior worth 2 tokens) with and without the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from report import parser_of, report

from spark_agent.demo import demo_session_hash, demo_sessions
from spark_agent.recording import record, segments_of
from spark_runtime.chat import ChatFormat
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.models import demo_model_path
from spark_runtime.placement import (
    expert_order,
    frequencies,
    greedy_slots,
    layer_sizes,
    residency_budget,
    uniform_slots,
)
from spark_runtime.session_counts import SessionCounts
from spark_runtime.simulate import lru_cold_hits, scored_cold_hits
from spark_schemas.split import split_of

TOKENS_PER_SESSION = 960
ColdHits = Callable[[np.ndarray, int, int, np.ndarray], int]

POLICIES: dict[str, ColdHits] = {
    "lru_from_profile": lambda ids, n, slots, freq: lru_cold_hits(ids, n, [slots], expert_order(freq))[0],
    "scored_with_profile": lambda ids, n, slots, freq: scored_cold_hits(ids, n, slots, freq),
    "scored_without_profile": lambda ids, n, slots, _freq: scored_cold_hits(ids, n, slots),
}


def rate(sessions: Sequence[SessionCounts], slots: list[int], freq: list[np.ndarray], cold_hits: ColdHits) -> float:
    """Mean over sessions of cold hits / selections."""
    rates = []
    for session in sessions:
        layers = list(zip(session.trace(), session.shape.layers, slots, freq, strict=True))
        cold = sum(cold_hits(ids, layer.n_experts, count, f) for ids, layer, count, f in layers)
        rates.append(cold / sum(ids.size for ids, *_ in layers))
    return float(np.mean(rates))


def main() -> None:
    """Measure and print (or write) the rows."""
    parser = parser_of(__doc__)
    options = parser.parse_args()
    rows = []
    with Engine.load(demo_model_path(), EngineOptions(n_threads=1)) as engine:
        chat = ChatFormat(engine)
        sizes = layer_sizes(engine.shape)
        for workload, transcripts in demo_sessions().items():
            sides: dict[str, list[SessionCounts]] = {"calibration": [], "held_out": []}
            for transcript in transcripts:
                segments = segments_of(engine, chat, transcript, TOKENS_PER_SESSION)
                counts = record(engine, segments, keep_trace=True)
                sides[split_of(demo_session_hash(transcript))].append(counts)
            calibration = sides["calibration"]
            freq = frequencies([s.counts["decode"] for s in calibration], [s.tokens["decode"] for s in calibration])
            for residency in (0.3, 0.6, 0.8):
                budget = residency_budget(sizes, residency)
                for sharing, slots in (
                    ("by_frequency", greedy_slots(freq, sizes, budget)),
                    ("equal", uniform_slots(sizes, budget)),
                ):
                    measured = {name: round(rate(sides["held_out"], slots, freq, p), 4) for name, p in POLICIES.items()}
                    row = {"workload": workload, "residency": residency, "slots": sharing, "per_layer": slots}
                    rows.append(row | measured)
    report({"rows": rows}, options.out)


if __name__ == "__main__":
    main()
