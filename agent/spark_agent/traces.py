"""Token-level traces, kept on this machine only: policies that depend on order are measured with them.

A trace can be turned back into text (published attacks recover most of it), so nothing uploads one, and a trace file
is readable by its owner only. A folder of traces has Parquet files, numbered in the order they were written; beyond its
limit the oldest leave. Hidden states beside the selections (float16) say even more; they are read a layer at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_agent.trace_files import SessionTrace, read_hidden, read_trace, write_trace
from spark_schemas.model import ModelShape

__all__ = ["DEFAULT_LIMIT_BYTES", "TraceFile", "TraceFolder", "load_traces"]

HalfArray = NDArray[np.float16]

DEFAULT_LIMIT_BYTES = 2**30
FILE_BYTES = 64 * 2**20
"""Of a file's selections and hidden states before they are compressed."""
_NAME = re.compile(r"^trace-(?P<number>\d{6})\.parquet$")
_TOKEN_BYTES = 8
"""What a token takes besides its selections, at most."""
_MOST_NUMBER = 999_999


@dataclass(frozen=True, slots=True)
class TraceFile:
    """Traces of one model."""

    shape: ModelShape
    sessions: list[SessionTrace]

    def hidden_kinds(self) -> list[str]:
        """Kinds of hidden states that some session has in all its parts."""
        found = [set.intersection(*(set(place.widths) for place in one.places)) for one in self.sessions if one.places]
        return sorted(set().union(*found))

    def with_hidden(self, kinds: Sequence[str]) -> TraceFile:
        """The sessions that have these hidden states."""
        kept = [one for one in self.sessions if all(kind in place.widths for place in one.places for kind in kinds)]
        return TraceFile(self.shape, kept)

    def hidden(self, kind: str, layer: int) -> HalfArray:
        """``[token, value]`` of one layer over all sessions in their order; not a number where a token was not routed.

        Raises :class:`SparkError` when a session has none, or a file cannot be read any more.
        """
        width = self.sessions[0].places[0].widths[kind][layer] if self.sessions else 0
        parts = [np.empty((0, width), np.float16)]
        opened: tuple[Path, HalfArray] | None = None
        for place in (place for session in self.sessions for place in session.places):
            if opened is None or opened[0] != place.path:
                opened = place.path, read_hidden(place, self.shape, kind, layer)
            parts.append(opened[1][place.start : place.end])
        return np.concatenate(parts)


@dataclass
class TraceFolder:
    """A folder that traces are added to; close it, and what was added is in files, each whole or not there at all."""

    path: Path
    shape: ModelShape
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    hidden_widths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of the hidden states that sessions come with, by kind and layer."""
    removed: int = 0
    """Files of the folder that left for newer ones."""
    written: list[Path] = field(default_factory=list)
    _pending: list[SessionTrace] = field(default_factory=list)
    _pending_bytes: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def token_bytes(self) -> int:
        """What a token takes before compression, which does little to hidden states."""
        selections = 2 * sum(layer.top_k for layer in self.shape.layers)
        return _TOKEN_BYTES + selections + 2 * sum(sum(widths) for widths in self.hidden_widths.values())

    def add(self, session: SessionTrace) -> None:
        """Take a session, or what it goes on with; :class:`SparkError` when it, or one before, cannot be written."""
        token_bytes = self.token_bytes
        # Two files must fit, so that a new one can be whole before an old one leaves.
        most = max(1, min(FILE_BYTES, self.limit_bytes // 2) // token_bytes)
        for start in range(0, len(session.decode), most):
            part = slice(start, start + most)
            ids = [layer[part] for layer in session.ids]
            hidden = {kind: [layer[part] for layer in layers] for kind, layers in session.hidden.items()}
            first = session.first + start
            piece = SessionTrace(session.session_hash, session.workload, ids, session.decode[part], first, hidden)
            size = len(piece.decode) * token_bytes
            if self._pending and self._pending_bytes + size > most * token_bytes:
                self.close()
            self._pending.append(piece)
            self._pending_bytes += size

    def close(self) -> None:
        """Write what was added; raise :class:`SparkError` when that fails, with nothing half-written."""
        if not self._pending:
            return
        numbers = [number for number, _ in _files(self.path)] if self.path.is_dir() else []
        number = max(numbers, default=0) + 1
        if number > _MOST_NUMBER:
            raise SparkError(f"{self.path} has no number left for another trace", "name another folder")
        path = self.path / f"trace-{number:06d}.parquet"
        try:
            with replacing(path) as file:
                write_trace(file, self.shape, self.hidden_widths, self._pending)
            self.written.append(path)
            self._rotate()
        except OSError as error:
            raise SparkError(
                f"cannot write the trace {path}: {error.strerror}", "check the folder and its space"
            ) from error
        self._pending, self._pending_bytes = [], 0

    def _rotate(self) -> None:
        files = [(path, path.stat().st_size) for _, path in _files(self.path)]
        total = sum(size for _, size in files)
        for path, size in files:
            if total <= self.limit_bytes:
                return
            path.unlink()
            total -= size
            self.removed += 1
            if path in self.written:
                self.written.remove(path)


def load_traces(path: Path) -> TraceFile:
    """Read a trace file or a folder of them, sessions put together again from their parts.

    Of a session that was recorded more than once the last recording counts; what is left of one whose start has made
    room for others is left out.

    Raises :class:`SparkError` when a file is something else or damaged, or of another model than the first.
    """
    if path.is_dir():
        paths = [found for _, found in _files(path)]
    elif path.is_file():
        paths = [path]
    else:
        paths = []
    if not paths:
        raise SparkError(f"no such trace: {path}", "record one: spark-agent record … --trace FOLDER")
    shape: ModelShape | None = None
    parts: dict[tuple[str, str], list[SessionTrace]] = {}
    for file in paths:
        found, sessions = read_trace(file)
        if shape is not None and found.fingerprint != shape.fingerprint:
            raise SparkError(
                f"{file} is of another model than {paths[0].name} ({found.fingerprint}, expected {shape.fingerprint})",
                "keep each model's traces in a folder of their own",
            )
        shape = found
        for session in sessions:
            known = parts.setdefault((session.session_hash, session.workload), [])
            if session.first == 0:
                known.clear()
            if session.first == sum(len(part.decode) for part in known):
                known.append(session)
    if shape is None:
        raise SparkError(f"no such trace: {path}", "record one: spark-agent record … --trace FOLDER")
    return TraceFile(shape, [_joined(found) for found in parts.values() if found])


def _joined(parts: Sequence[SessionTrace]) -> SessionTrace:
    if len(parts) == 1:
        return parts[0]
    ids = [np.concatenate(layers) for layers in zip(*(part.ids for part in parts), strict=True)]
    decode = np.concatenate([part.decode for part in parts])
    places = tuple(place for part in parts for place in part.places)
    return SessionTrace(parts[0].session_hash, parts[0].workload, ids, decode, places=places)


def _files(folder: Path) -> list[tuple[int, Path]]:
    found = ((_NAME.match(entry.name), entry) for entry in folder.iterdir())
    return sorted((int(match["number"]), entry) for match, entry in found if match is not None)
