"""Token-level traces, kept on this machine only: policies that depend on order are measured with them.

A trace can be turned back into text (published attacks recover most of it), so nothing uploads one, and a trace file
is readable by its owner only. A folder of traces has Parquet files, numbered in the order they were written; beyond its
limit the oldest leave.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_schemas.model import ModelShape

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["DEFAULT_LIMIT_BYTES", "SessionTrace", "TraceFile", "TraceFolder", "load_traces"]

IntArray = NDArray[np.int64]

DEFAULT_LIMIT_BYTES = 2**30
FILE_BYTES = 64 * 2**20
"""Of a file's selections before they are compressed."""
MOST_LOADED_BYTES = 2**34
"""Of the selections that a file may claim to hold, uncompressed."""
_FORMAT = b"1"
_NAME = re.compile(r"^trace-(?P<number>\d{6})\.parquet$")
_TOKEN_BYTES = 8
"""What a token takes besides its selections, at most."""
_MOST_NUMBER = 999_999


@dataclass(frozen=True, slots=True)
class SessionTrace:
    """Selections of one session in its order."""

    session_hash: str
    workload: str
    ids: list[IntArray]
    """``ids[layer][token, k]`` in the router's order; -1 for a token that a layer did not route, or not surely."""
    decode: NDArray[np.bool_]
    """Per token; the others are of prompts."""
    first: int = 0
    """Place of the first token in its session: above 0 for what a long session goes on with in another file."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """Traces of one model."""

    shape: ModelShape
    sessions: list[SessionTrace]


@dataclass
class TraceFolder:
    """A folder that traces are added to; close it, and what was added is in files, each whole or not there at all."""

    path: Path
    shape: ModelShape
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    removed: int = 0
    """Files of the folder that left for newer ones."""
    written: list[Path] = field(default_factory=list)
    _pending: list[SessionTrace] = field(default_factory=list)
    _pending_bytes: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def add(self, session: SessionTrace) -> None:
        """Take a session; raise :class:`SparkError` when it, or one before it, cannot be written."""
        token_bytes = _TOKEN_BYTES + 2 * sum(layer.top_k for layer in self.shape.layers)
        # Two files must fit, so that a new one can be whole before an old one leaves.
        most = max(1, min(FILE_BYTES, self.limit_bytes // 2) // token_bytes)
        for start in range(0, len(session.decode), most):
            part = slice(start, start + most)
            ids = [layer[part] for layer in session.ids]
            piece = SessionTrace(session.session_hash, session.workload, ids, session.decode[part], start)
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
                _write(file, self.shape, self._pending)
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
        found, sessions = _read(file)
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
    return SessionTrace(parts[0].session_hash, parts[0].workload, ids, np.concatenate([part.decode for part in parts]))


def _files(folder: Path) -> list[tuple[int, Path]]:
    found = ((_NAME.match(entry.name), entry) for entry in folder.iterdir())
    return sorted((int(match["number"]), entry) for match, entry in found if match is not None)


def _schema(shape: ModelShape) -> pa.Schema:
    import pyarrow as pa

    names = pa.dictionary(pa.int32(), pa.string())
    layers = [(f"block_{layer.block}", pa.list_(pa.uint16(), layer.top_k)) for layer in shape.layers]
    fields: list[pa.Field[Any]] = [
        pa.field("session", names, nullable=False),
        pa.field("workload", names, nullable=False),
    ]
    fields += [pa.field("token", pa.uint32(), nullable=False), pa.field("decode", pa.bool_(), nullable=False)]
    fields += [pa.field(*layer) for layer in layers]
    return pa.schema(fields, {"spark.trace": _FORMAT, "spark.model": shape.model_dump_json().encode()})


def _write(file: Any, shape: ModelShape, sessions: Sequence[SessionTrace]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(shape)
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for session in sessions:
            n_tokens = len(session.decode)
            columns: list[pa.Array[Any]] = [
                pa.DictionaryArray.from_arrays(np.zeros(n_tokens, dtype=np.int32), pa.array([name]))
                for name in (session.session_hash, session.workload)
            ]
            columns.append(pa.array(np.arange(session.first, session.first + n_tokens, dtype=np.uint32)))
            columns.append(pa.array(session.decode))
            for layer, ids in zip(shape.layers, session.ids, strict=True):
                missing = (ids < 0).any(axis=1)
                values = pa.array(np.maximum(ids, 0).astype(np.uint16).ravel())
                columns.append(
                    pa.FixedSizeListArray.from_arrays(values, layer.top_k, mask=pa.array(cast("Any", missing)))
                )
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _read(path: Path) -> tuple[ModelShape, list[SessionTrace]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            shape = _shape(file)
            return shape, list(_sessions(file, shape))
    except (OSError, ValueError, ValidationError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SparkError(f"{path} is not a trace written by spark-agent: {reason}", "record it again") from error


def _shape(file: pq.ParquetFile) -> ModelShape:
    metadata = file.schema_arrow.metadata or {}
    if metadata.get(b"spark.trace") != _FORMAT:
        raise ValueError(f"spark.trace is {metadata.get(b'spark.trace')!r}, expected {_FORMAT!r}")
    shape = ModelShape.model_validate_json(metadata.get(b"spark.model", b""))
    expected = _schema(shape)
    if not file.schema_arrow.equals(expected):
        raise ValueError("its columns are not those of its model")
    token_bytes = 2 * sum(layer.top_k for layer in shape.layers)
    if file.metadata.num_rows * token_bytes > MOST_LOADED_BYTES:
        raise ValueError(f"{file.metadata.num_rows} tokens, expected at most {MOST_LOADED_BYTES // token_bytes}")
    return shape


def _sessions(file: pq.ParquetFile, shape: ModelShape) -> Iterator[SessionTrace]:
    """One a row group at a time; a row group may hold parts of several sessions."""
    import pyarrow as pa

    for group in range(file.metadata.num_row_groups):
        table = file.read_row_group(group).combine_chunks()
        if not len(table):
            continue
        names = [
            table.column(name).combine_chunks().cast(pa.string()).to_numpy(zero_copy_only=False) for name in _NAMES
        ]
        decode = table.column("decode").combine_chunks().to_numpy(zero_copy_only=False).astype(bool)
        token = table.column("token").combine_chunks().to_numpy().astype(np.int64)
        ids = [
            _selections(table.column(f"block_{layer.block}"), layer.top_k, layer.n_experts) for layer in shape.layers
        ]
        changes = np.flatnonzero((names[0][1:] != names[0][:-1]) | (names[1][1:] != names[1][:-1])) + 1
        edges = [0, *changes.tolist(), len(table)]
        for start, end in itertools.pairwise(edges):
            part = slice(start, end)
            if not _HASH.match(str(names[0][start])):
                raise ValueError(f"session {names[0][start]!r}, expected 64 hex digits")
            first = int(token[start])
            if (token[part] != np.arange(first, first + end - start)).any():
                raise ValueError("a session's tokens are not in order")
            yield SessionTrace(
                str(names[0][start]), str(names[1][start]), [layer[part] for layer in ids], decode[part], first
            )


_NAMES = ("session", "workload")
_HASH = re.compile(r"^[0-9a-f]{64}$")


def _selections(column: Any, top_k: int, n_experts: int) -> IntArray:
    array = column.combine_chunks()
    present = array.is_valid().to_numpy(zero_copy_only=False)
    ids = np.full((len(array), top_k), -1, dtype=np.int64)
    ids[present] = array.drop_null().flatten().to_numpy().reshape(-1, top_k)
    if ids.size and ids.max() >= n_experts:
        raise ValueError(f"expert {ids.max()}, expected at most {n_experts - 1}")
    return ids
