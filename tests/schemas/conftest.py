"""A small model and a session that holds every invariant."""

from __future__ import annotations

import pytest

from spark_schemas.histogram import HistogramUpload, LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.live import LiveMisses, LiveProfile
from spark_schemas.model import ExpertLayer, ModelShape
from spark_schemas.split import split_of

SESSION_HASH = "0" * 64


@pytest.fixture
def model() -> ModelShape:
    layers = tuple(
        ExpertLayer(block=block, n_experts=4, top_k=2, expert_bytes=100, tensor_types={"up.weight": "f16"})
        for block in (1, 2)
    )
    return ModelShape(
        fingerprint="mf1-" + "a" * 32,
        sibling="ms1-" + "b" * 32,
        architecture="qwen3moe",
        name="test",
        n_blocks=3,
        context_length=1024,
        core_bytes=1000,
        kv_bytes_per_token=8,
        layers=layers,
    )


@pytest.fixture
def session() -> SessionHistogram:
    return SessionHistogram(
        session_hash=SESSION_HASH,
        split=split_of(SESSION_HASH),
        workload="code-heavy",
        prefill=PhaseHistogram(
            tokens=5,
            layers=(
                LayerCounts(block=1, tokens=5, counts=(5, 3, 2, 0)),
                LayerCounts(block=2, tokens=1, counts=(1, 1, 0, 0)),
            ),
        ),
        decode=PhaseHistogram(
            tokens=2,
            layers=(
                LayerCounts(block=1, tokens=2, counts=(2, 1, 1, 0)),
                LayerCounts(block=2, tokens=2, counts=(2, 2, 0, 0)),
            ),
        ),
        reuse=(
            LayerReuse(block=1, distances=(1, 0, 0, 0, 3)),
            LayerReuse(block=2, distances=(1, 1, 0, 0, 2)),
        ),
    )


@pytest.fixture
def upload(model: ModelShape, session: SessionHistogram) -> HistogramUpload:
    return HistogramUpload(agent_version="0.1.0", model=model, sessions=(session,))


@pytest.fixture
def measured() -> LiveMisses:
    """Of the session above: 8 selections, 8 experts of 100 bytes."""
    profile = LiveProfile(workload="chat", revision="c" * 64, vram_budget_bytes=5000)
    return LiveMisses(selections=8, cold_hits=8, resident_bytes=800, profile=profile)
