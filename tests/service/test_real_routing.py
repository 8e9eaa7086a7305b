"""Real routing counts (gpt-oss-20b), where they are present: orders that must hold whatever the traffic."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_runtime.calibration.sessions import SessionPart
from spark_schemas.split import split_of
from spark_service.builders import Inputs, build_profile
from spark_service.manifests import Budget, build_manifest

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "routing" / "gptoss20b"


@pytest.mark.skipif(not DATA.is_dir(), reason="third-party routing data is not in a fresh clone")
def test_own_beats_uniform_and_the_oracle_beats_own(make: Any) -> None:
    counts = np.load(DATA / "session_counts.npz")["counts"].astype(np.int64)
    metadata = json.loads((DATA / "sessions.json").read_text())
    n_layers, n_experts = counts.shape[1:]
    shape = make.shape([(n_experts, 4, 13_000_000)] * n_layers)
    parts = []
    for index, session_counts in enumerate(counts):
        session_hash = hashlib.sha256(f"gptoss {index}".encode()).hexdigest()
        # Sessions that fell into a loop are no traffic.
        if metadata[index]["repetition"]:
            continue
        layers = tuple(session_counts)
        parts.append(SessionPart(str(index), "cs", session_hash, int(layers[0].sum()) // 4, layers, None))
    built = build_profile(shape, "cs", "decode", "0" * 64, Inputs.of_parts(shape, "cs", {"cs": parts}))
    assert built is not None
    judges = [session_hash for batch in built.judges[0].held_out() for session_hash in batch.hashes]
    assert {split_of(session_hash) for session_hash in judges} == {"held_out"}
    rates = {(point.policy, point.residency): point.cold_hit_rate for point in built.profile.curves}
    for residency in (0.3, 0.6, 0.8):
        assert rates["oracle", residency] <= rates["own", residency] + 1e-12
        assert rates["own", residency] < rates["uniform", residency]
    assert rates["uniform", 0.6] == pytest.approx(0.4, abs=0.05)
    manifest = build_manifest(built.profile, shape, Budget(1200 + shape.expert_bytes_total // 2, 100), built.judges)
    assert manifest.expected is not None
    assert manifest.expected.cold_hit_rate < manifest.expected.uniform_cold_hit_rate
