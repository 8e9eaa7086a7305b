"""Traces as predictors take them: sessions of one model by side of the split, with the hidden states they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spark_agent.errors import SparkError
from spark_agent.simulation.sources import Source
from spark_agent.trace_files import SessionTrace
from spark_agent.traces import TraceFile, load_traces
from spark_runtime.hidden_kinds import HIDDEN_KINDS
from spark_runtime.placement import layer_sizes
from spark_runtime.predict.study import Sessions
from spark_runtime.simulator.study import PhaseOf
from spark_runtime.simulator.traces import Trace
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

__all__ = ["Recorded", "read_recorded"]

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class Recorded:
    """Sessions of one model in one phase."""

    shape: ModelShape
    trace: Trace
    layers: list[int]
    """Which of the model's layers the trace has."""
    held_out: NDArray[np.bool_]
    """By session."""
    hidden_kinds: list[str]
    """Hidden states that all sessions have."""
    notes: list[str] = field(default_factory=list)
    _files: list[TraceFile] = field(default_factory=list)
    _tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """Of the files' tokens, those of the phase."""

    @property
    def blocks(self) -> list[int]:
        """Numbers of the blocks that the trace's layers are."""
        return [self.shape.layers[layer].block for layer in self.layers]

    def hidden(self, kind: str, layer: int) -> NDArray[np.float16]:
        """``[token, value]`` of the trace's tokens; raises :class:`SparkError` when a file went away."""
        return np.concatenate([file.hidden(kind, self.layers[layer]) for file in self._files])[self._tokens]

    def hidden_width(self, kind: str, layer: int) -> int:
        """Values of a token."""
        return int(self._files[0].sessions[0].places[0].widths[kind][self.layers[layer]])

    def side(self, *, held_out: bool | None, most_tokens: int = 0) -> Sessions:
        """Sessions of a side of the split (``None``: both) that have tokens; at most so many, each one's first."""
        wanted = np.ones(len(self.held_out), bool) if held_out is None else self.held_out == held_out
        chosen = np.flatnonzero(wanted & (self.trace.lengths > 0))
        each = _share(self.trace.lengths[chosen], most_tokens)
        starts = self.trace.offsets[:-1][chosen]
        ends = starts + np.minimum(self.trace.lengths[chosen], each)
        parts = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
        trace = Trace(
            tuple(ids[tokens] for ids in self.trace.ids),
            self.trace.n_experts,
            np.cumsum([0, *(ends - starts)]).astype(np.int64),
        )
        return Sessions(trace, self.hidden, tokens)


def _share(lengths: IntArray, most_tokens: int) -> int:
    """How many tokens of each session make at most ``most_tokens`` of all (0: all); short ones leave room to others."""
    if not most_tokens or lengths.sum() <= most_tokens:
        return int(lengths.max(initial=0))
    low, high = 0, int(lengths.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(lengths, middle).sum() <= most_tokens else (low, middle - 1)
    return max(1, low)


def read_recorded(paths: Sequence[Path], phase: PhaseOf, wanted: Sequence[str] | None = None) -> Recorded:
    """Read traces of one model; of a session that several have, the last counts.

    ``wanted`` are the hidden states that sessions must have; ``None`` takes all that some session has. Sessions without
    them are left out, so that every predictor is judged on the same tokens. Raises :class:`SparkError`.
    """
    files = _without_repeats([load_traces(path) for path in paths])
    for path, file in zip(paths[1:], files[1:], strict=True):
        if file.shape.fingerprint != files[0].shape.fingerprint:
            raise SparkError(
                f"{path} is of another model than {paths[0]} ({file.shape.fingerprint}, expected "
                f"{files[0].shape.fingerprint})",
                "take one model's traces at a time",
            )
    found = [kind for kind in HIDDEN_KINDS if any(kind in file.hidden_kinds() for file in files)]
    kinds = found if wanted is None else [kind for kind in HIDDEN_KINDS if kind in wanted]
    n_all = sum(len(file.sessions) for file in files)
    kept = [one for file in files if (one := file.with_hidden(kinds)).sessions]
    sessions = [session for file in kept for session in file.sessions]
    if not sessions:
        missing = ", ".join(kinds) or "none"
        raise SparkError(
            f"no session has the hidden states that are read ({missing})",
            "record them: spark-agent record … --trace FOLDER --hidden (and --router-input for the ceiling)",
        )
    shape = files[0].shape
    source = Source(
        kind="trace", fingerprint=shape.fingerprint, layers=list(layer_sizes(shape)), sessions=list(sessions)
    )
    trace, layers = source.trace(phase)
    if phase == "prefill":
        trace = trace.select(range(trace.n_sessions), decode=False)
    notes = list(source.notes)
    if len(sessions) < n_all:
        notes.append(f"{n_all - len(sessions)} of {n_all} sessions are left out: they lack hidden states that are read")
    chosen = [~session.decode if phase == "prefill" else session.decode | (phase == "both") for session in sessions]
    return Recorded(
        shape,
        trace,
        layers,
        np.array([split_of(session.session_hash) == "held_out" for session in sessions]),
        [str(kind) for kind in kinds],
        notes,
        kept,
        np.flatnonzero(np.concatenate(chosen)),
    )


def _without_repeats(files: Sequence[TraceFile]) -> list[TraceFile]:
    last: dict[tuple[str, str], int] = {}
    for number, file in enumerate(files):
        last.update({_key(session): number for session in file.sessions})
    return [
        TraceFile(file.shape, [session for session in file.sessions if last[_key(session)] == number])
        for number, file in enumerate(files)
    ]


def _key(session: SessionTrace) -> tuple[str, str]:
    return session.session_hash, session.workload
