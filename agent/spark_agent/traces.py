"""Token-level decode traces, kept on this machine only: policies that depend on order are measured with them.

A trace can be turned back into text (published attacks recover most of it), so nothing uploads one, and a trace file
is readable by its owner only.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spark_agent.errors import SparkError
from spark_agent.files import replacing

__all__ = ["SessionTrace", "TraceFile", "load_traces", "save_traces"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SessionTrace:
    """Decode selections of one session: ``ids[layer][token, k]``."""

    session_hash: str
    workload: str
    ids: list[NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class TraceFile:
    """Traces of one model."""

    fingerprint: str
    sessions: list[SessionTrace]


def save_traces(path: Path, fingerprint: str, sessions: Sequence[SessionTrace]) -> None:
    """Write traces (numpy ``.npz``) at once or not at all; raise :class:`SparkError` when that fails."""
    if not sessions:
        raise SparkError("no sessions were recorded, so there is no trace to write")
    arrays: dict[str, NDArray[np.generic]] = {
        "format": np.array(_FORMAT),
        "fingerprint": np.array(fingerprint),
        "session_hash": np.array([session.session_hash for session in sessions]),
        "workload": np.array([session.workload for session in sessions]),
        "offsets": np.cumsum([0, *(len(session.ids[0]) for session in sessions)]),
    }
    for layer in range(len(sessions[0].ids)):
        # 65,536 experts are more than any schema allows.
        arrays[f"layer_{layer}"] = np.concatenate([session.ids[layer] for session in sessions]).astype(np.uint16)
    try:
        with replacing(path) as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise SparkError(
            f"cannot write the trace {path}: {error.strerror}", "check the folder and its space"
        ) from error


def load_traces(path: Path) -> TraceFile:
    """Read traces; raise :class:`SparkError` when the file is something else or damaged."""
    if not path.is_file():
        raise SparkError(f"no such trace file: {path}", "record one: spark-agent record … --trace FILE")
    try:
        with zipfile.ZipFile(path) as archive:
            return _parse({member.removesuffix(".npy"): _array(archive, member) for member in archive.namelist()})
    except Exception as error:
        # A damaged archive fails in many ways: in zlib, in numpy's headers, in the names of its members.
        reason = str(error) or type(error).__name__
        raise SparkError(f"{path} is not a trace written by spark-agent: {reason}", "record it again") from error


def _array(archive: zipfile.ZipFile, member: str) -> NDArray[np.generic]:
    with archive.open(member) as file:
        found: NDArray[np.generic] = np.lib.format.read_array(file, allow_pickle=False)
        return found


def _parse(data: dict[str, NDArray[np.generic]]) -> TraceFile:
    if int(data["format"]) != _FORMAT:
        raise ValueError(f"format {data['format']}, expected {_FORMAT}")
    offsets = data["offsets"].astype(np.int64)
    layers = [data[f"layer_{layer}"] for layer in range(sum(name.startswith("layer_") for name in data))]
    if not layers or any(layer.ndim != 2 or layer.dtype != np.uint16 for layer in layers):
        raise ValueError("its layers are not selections per token")
    if {len(layer) for layer in layers} != {offsets[-1]} or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError("its sessions do not add up to its tokens")
    ids = [layer.astype(np.int64) for layer in layers]
    sessions = [
        SessionTrace(str(name), str(workload), [layer[start:end] for layer in ids])
        for name, workload, start, end in zip(
            data["session_hash"], data["workload"], offsets[:-1], offsets[1:], strict=True
        )
    ]
    return TraceFile(str(data["fingerprint"]), sessions)
