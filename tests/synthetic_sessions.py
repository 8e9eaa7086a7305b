"""Synthetic sessions that could have been counted: tokens routed by popularity, as an agent counts them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from spark_runtime.calibration.sessions import SessionPart
from spark_runtime.recency import RecencyOrder
from spark_schemas.histogram import HistogramUpload, LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.ids import Split
from spark_schemas.live import LiveMisses, LiveProfile
from spark_schemas.model import ExpertLayer, ModelShape
from spark_schemas.split import split_of


class Make:
    """Factories. Everything is a pure function of its arguments."""

    fingerprint = "mf1-" + "0" * 31 + "1"
    sibling = "ms1-" + "0" * 31 + "a"

    def shape(
        self,
        layers: Sequence[tuple[int, int, int]] = ((12, 2, 100), (16, 2, 100), (8, 1, 50)),
        **changes: object,
    ) -> ModelShape:
        """``layers`` are (n_experts, top_k, expert_bytes); block 0 is dense."""
        fields: dict[str, object] = {
            "fingerprint": self.fingerprint,
            "sibling": self.sibling,
            "architecture": "toy",
            "name": "Toy MoE",
            "n_blocks": len(layers) + 1,
            "context_length": 4096,
            "core_bytes": 1000,
            "kv_bytes_per_token": 2,
            "layers": tuple(
                ExpertLayer(
                    block=index + 1, n_experts=n_experts, top_k=top_k, expert_bytes=size, tensor_types={"up": "q4_K"}
                )
                for index, (n_experts, top_k, size) in enumerate(layers)
            ),
        }
        return ModelShape.model_validate({**fields, **changes})

    def hash(self, index: int, side: Split = "calibration") -> str:
        """The ``index``-th session hash on a side of the split."""
        number = 0
        while True:
            session_hash = hashlib.sha256(f"session {number}".encode()).hexdigest()
            if split_of(session_hash) == side:
                if index == 0:
                    return session_hash
                index -= 1
            number += 1

    def session(
        self,
        shape: ModelShape,
        session_hash: str,
        *,
        workload: str = "code",
        seed: int = 0,
        decode: int = 300,
        prefill: int = 0,
        skew: float = 2.0,
        taste: int = 0,
    ) -> SessionHistogram:
        """Route ``decode`` and ``prefill`` tokens; ``taste`` decides which experts are popular, ``skew`` how much."""
        rng = np.random.default_rng([seed, decode, prefill])
        popularity = [
            skew * np.random.default_rng([taste, layer.block]).standard_normal(layer.n_experts)
            for layer in shape.layers
        ]
        phases: dict[str, PhaseHistogram] = {}
        reuse: list[LayerReuse] = []
        for phase, tokens in (("prefill", prefill), ("decode", decode)):
            if not tokens:
                continue
            counted = []
            for layer, logits in zip(shape.layers, popularity, strict=True):
                noisy = logits + rng.gumbel(size=(tokens, layer.n_experts))
                ids = np.argsort(-noisy, axis=1)[:, : layer.top_k]
                counts = np.bincount(ids.ravel(), minlength=layer.n_experts)
                counted.append(LayerCounts(block=layer.block, tokens=tokens, counts=tuple(counts.tolist())))
                if phase == "decode":
                    distances = RecencyOrder(layer.n_experts).observe(ids)
                    histogram = np.bincount(distances.ravel(), minlength=layer.n_experts + 1)
                    reuse.append(LayerReuse(block=layer.block, distances=tuple(histogram.tolist())))
            phases[phase] = PhaseHistogram(tokens=tokens, layers=tuple(counted))
        return SessionHistogram(
            session_hash=session_hash,
            split=split_of(session_hash),
            workload=workload,
            prefill=phases.get("prefill"),
            decode=phases.get("decode"),
            reuse=tuple(reuse) if reuse else None,
        )

    def sessions(
        self, shape: ModelShape, calibration: int = 4, held_out: int = 4, *, workload: str = "code", **how: Any
    ) -> list[SessionHistogram]:
        """Sessions on both sides of the split."""
        sides: list[tuple[Split, int]] = [("calibration", calibration), ("held_out", held_out)]
        made = []
        for side, count in sides:
            for index in range(count):
                seed = index + 100 * (side == "held_out")
                made.append(self.session(shape, self.hash(index, side), workload=workload, seed=seed, **how))
        return made

    def upload(self, shape: ModelShape, sessions: Sequence[SessionHistogram]) -> HistogramUpload:
        return HistogramUpload.of("0.1.0", shape, sessions)

    def live(
        self,
        shape: ModelShape,
        session: SessionHistogram,
        rate: float = 0.1,
        *,
        residency: float = 0.6,
        profile: LiveProfile | None = None,
    ) -> SessionHistogram:
        """A session that was measured: it missed a share of its decode selections."""
        assert session.decode is not None
        selections = sum(sum(layer.counts) for layer in session.decode.layers)
        misses = LiveMisses(
            selections=selections,
            cold_hits=round(rate * selections),
            resident_bytes=round(residency * shape.expert_bytes_total),
            profile=profile,
        )
        return session.model_copy(update={"live": misses})

    def profile(self, workload: str = "code", revision: str = "7a" * 32, vram: int = 4000) -> LiveProfile:
        return LiveProfile(workload=workload, revision=revision, vram_budget_bytes=vram)

    def body(self, shape: ModelShape, sessions: Sequence[SessionHistogram]) -> bytes:
        return self.upload(shape, sessions).model_dump_json().encode()

    def parts(
        self, shape: ModelShape, sessions: Sequence[SessionHistogram], phase: str = "decode"
    ) -> list[SessionPart]:
        """Sessions as the store gives them back."""
        parts = []
        for session in sessions:
            histogram = getattr(session, phase)
            if histogram is None:
                continue
            reuse = session.reuse if phase == "decode" else None
            parts.append(
                SessionPart(
                    content_id=session.content_id(shape.fingerprint),
                    workload=session.workload,
                    session_hash=session.session_hash,
                    tokens=histogram.tokens,
                    counts=tuple(np.array(layer.counts) for layer in histogram.layers),
                    reuse=None if reuse is None else tuple(np.array(layer.distances) for layer in reuse),
                )
            )
        return parts
