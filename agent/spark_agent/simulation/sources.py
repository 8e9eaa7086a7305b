"""What a simulation reads: local traces, histograms, or another tool's counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from spark_agent.errors import SparkError
from spark_agent.formats.profile import ImportedProfile, load_profile
from spark_agent.trace_files import SessionTrace
from spark_runtime.placement import LayerSizes, layer_sizes
from spark_runtime.simulator.histograms import SessionCounts
from spark_runtime.simulator.study import PhaseOf
from spark_runtime.simulator.traces import Trace
from spark_schemas.histogram import HistogramUpload, SessionHistogram
from spark_schemas.ids import Phase
from spark_schemas.invariants import InvariantError, check_session
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

__all__ = ["Source", "read_profile", "read_source"]

_MOST_BYTES = 2**30
_PARQUET = b"PAR1"


@dataclass(slots=True)
class Source:
    """Sessions of one model, token by token or as counts; or another tool's counts."""

    kind: str
    """``trace``, ``histograms`` or ``imported``."""
    fingerprint: str | None
    layers: list[LayerSizes]
    """With the bytes of an expert, 1 where nobody knows them."""
    workloads: list[str] = field(default_factory=list)
    """Of each session."""
    held_out: list[bool] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Of each layer, its block in the model; empty where nobody says."""
    bytes_known: bool = True
    sessions: list[SessionTrace] = field(default_factory=list)
    histograms: list[SessionHistogram] = field(default_factory=list)
    imported: ImportedProfile | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def imported_from(self) -> str | None:
        """The format that it was imported from; ``None`` for what was measured here."""
        return None if self.imported is None else self.imported.format

    @property
    def mean_expert_bytes(self) -> float | None:
        """Of the experts that a token selects."""
        if not self.bytes_known:
            return None
        return sum(layer.top_k * layer.expert_bytes for layer in self.layers) / sum(
            layer.top_k for layer in self.layers
        )

    def trace(self, phase: PhaseOf) -> tuple[Trace, list[int]]:
        """All sessions, and which of :attr:`layers` they have: those that routed every token of the phase.

        Of prompts the last layer may route only what needs an output. Raises :class:`SparkError` when none is left.
        """
        kept = [
            index
            for index in range(len(self.layers))
            if all((session.ids[index][session.decode | (phase != "decode")] >= 0).all() for session in self.sessions)
        ]
        if not kept:
            raise SparkError(f"no layer routed every {phase} token, so nothing can be replayed in order")
        if len(kept) < len(self.layers):
            self.notes.append(
                f"{len(self.layers) - len(kept)} of {len(self.layers)} layers are left out: not every token was routed"
            )
        chosen = [session.decode | (phase != "decode") for session in self.sessions]
        trace = Trace(
            tuple(
                np.concatenate(
                    [session.ids[index][some] for session, some in zip(self.sessions, chosen, strict=True)]
                ).astype(np.int32)
                for index in kept
            ),
            tuple(self.layers[index].n_experts for index in kept),
            np.cumsum([0, *(int(some.sum()) for some in chosen)]).astype(np.int64),
            np.concatenate([session.decode[some] for session, some in zip(self.sessions, chosen, strict=True)]),
            tuple(self.layers[index].expert_bytes for index in kept),
        )
        return trace, kept

    def counts(self, session: int, phase: Phase) -> SessionCounts | None:
        """A session's counts in a phase; ``None`` where it has none."""
        histogram = self.histograms[session]
        of_phase = histogram.decode if phase == "decode" else histogram.prefill
        if of_phase is None:
            return None
        counts = [np.array(layer.counts, dtype=np.int64) for layer in of_phase.layers]
        distances = None
        if phase == "decode" and histogram.reuse is not None:
            distances = [np.array(layer.distances, dtype=np.int64) for layer in histogram.reuse]
        return SessionCounts(counts, distances, of_phase.tokens)


def read_source(path: Path) -> Source:
    """Read an input of ``spark simulate``; raise :class:`SparkError` for anything else."""
    try:
        if path.is_dir():
            return _traces(path)
        with path.open("rb") as file:
            head = file.read(len(_PARQUET))
        if head == _PARQUET:
            return _traces(path)
        if path.stat().st_size > _MOST_BYTES:
            raise SparkError(f"{path} is too large ({path.stat().st_size} bytes)", "simulate a trace instead")
        content = path.read_bytes()
    except OSError as error:
        raise SparkError(f"cannot read {path}: {error.strerror}", "check the path") from error
    if b'"imported"' in content[:4096]:
        return _imported(load_profile(path))
    return _histograms(path, content)


def read_profile(path: str) -> Sequence[NDArray[np.float64]]:
    """Expert frequencies of a profile or manifest in a file, per layer; raises :class:`SparkError`."""
    from spark_agent.manifests import load_manifest
    from spark_runtime.tier_start import manifest_frequency

    file = Path(path)
    try:
        with file.open("rb") as opened:
            imported = b'"imported"' in opened.read(4096)
    except OSError as error:
        raise SparkError(
            f"cannot read {path}: {error.strerror}", "none, mixed, own and foreign need no file"
        ) from error
    if imported:
        return [layer.frequency() for layer in load_profile(file).histograms]
    return manifest_frequency(load_manifest(file))


def _traces(path: Path) -> Source:
    from spark_agent.traces import load_traces

    found = load_traces(path)
    return Source(
        kind="trace",
        fingerprint=found.shape.fingerprint,
        layers=list(layer_sizes(found.shape)),
        workloads=[session.workload for session in found.sessions],
        held_out=[split_of(session.session_hash) == "held_out" for session in found.sessions],
        blocks=[layer.block for layer in found.shape.layers],
        sessions=found.sessions,
    )


def _histograms(path: Path, content: bytes) -> Source:
    """What ``spark-agent upload show`` prints: one upload a line."""
    shape: ModelShape | None = None
    sessions: list[SessionHistogram] = []
    try:
        for line in content.splitlines():
            if not line.strip():
                continue
            upload = HistogramUpload.model_validate_json(line)
            if shape is not None and upload.model.fingerprint != shape.fingerprint:
                raise SparkError(f"{path} holds histograms of several models", "take one model's at a time")
            shape = upload.model
            for session in upload.sessions:
                check_session(session, shape)
                sessions.append(session)
    except (ValidationError, InvariantError) as error:
        reason = str(error).splitlines()[0]
        raise SparkError(
            f"{path} is neither a trace nor histograms: {reason}", "spark-agent record --trace FOLDER, or upload show"
        ) from error
    if shape is None or not sessions:
        raise SparkError(f"{path} holds no session", "spark-agent upload show > FILE")
    return Source(
        kind="histograms",
        fingerprint=shape.fingerprint,
        layers=list(layer_sizes(shape)),
        workloads=[session.workload for session in sessions],
        held_out=[session.split == "held_out" for session in sessions],
        histograms=sessions,
    )


def _imported(profile: ImportedProfile) -> Source:
    layers = [LayerSizes(layer.n_experts, layer.top_k or 1, 1) for layer in profile.histograms]
    notes = [f"imported from {profile.format}: judged by its own counts, which says nothing of other sessions"]
    if any(layer.top_k is None for layer in profile.histograms):
        notes.append("how many experts a token selects is not known: slots have no floor")
    return Source("imported", profile.fingerprint, layers, bytes_known=False, imported=profile, notes=notes)
