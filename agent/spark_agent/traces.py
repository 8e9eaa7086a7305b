"""Token-level traces, kept on this machine only: policies that depend on order are measured with them.

A trace can be turned back into text (published attacks recover most of it), so nothing uploads one, and a trace file
is readable by its owner only. A folder of traces has Parquet files, numbered in the order they were written; beyond its
limit the oldest leave. Hidden states beside the selections (float16) say even more; they are read a layer at a time.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_runtime.hidden_kinds import HIDDEN_KINDS
from spark_schemas.model import ModelShape

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["DEFAULT_LIMIT_BYTES", "Place", "SessionTrace", "TraceFile", "TraceFolder", "load_traces"]

IntArray = NDArray[np.int64]
HalfArray = NDArray[np.float16]

DEFAULT_LIMIT_BYTES = 2**30
FILE_BYTES = 64 * 2**20
"""Of a file's selections and hidden states before they are compressed."""
MOST_LOADED_BYTES = 2**34
"""Of the selections that a file may claim to hold, uncompressed, and of each layer's hidden states."""
_FORMAT, _FORMAT_HIDDEN = b"1", b"2"
_MOST_WIDTH = 2**17
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
    hidden: dict[str, list[HalfArray]] = field(default_factory=dict)
    """``hidden[kind][layer][token, value]`` when it is written; once it is read, see :meth:`TraceFile.hidden`."""
    places: tuple[Place, ...] = ()
    """Where it was read."""


@dataclass(frozen=True, slots=True)
class Place:
    """Rows of a file."""

    path: Path
    start: int
    end: int
    widths: Mapping[str, Sequence[int]]
    """Of the file's hidden states, by kind and layer."""


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
                opened = place.path, _read_hidden(place, self.shape, kind, layer)
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
                _write(file, self.shape, self.hidden_widths, self._pending)
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
    decode = np.concatenate([part.decode for part in parts])
    places = tuple(place for part in parts for place in part.places)
    return SessionTrace(parts[0].session_hash, parts[0].workload, ids, decode, places=places)


def _files(folder: Path) -> list[tuple[int, Path]]:
    found = ((_NAME.match(entry.name), entry) for entry in folder.iterdir())
    return sorted((int(match["number"]), entry) for match, entry in found if match is not None)


def _schema(shape: ModelShape, widths: Mapping[str, Sequence[int]]) -> pa.Schema:
    import pyarrow as pa

    names = pa.dictionary(pa.int32(), pa.string())
    layers = [(f"block_{layer.block}", pa.list_(pa.uint16(), layer.top_k)) for layer in shape.layers]
    fields: list[pa.Field[Any]] = [
        pa.field("session", names, nullable=False),
        pa.field("workload", names, nullable=False),
    ]
    fields += [pa.field("token", pa.uint32(), nullable=False), pa.field("decode", pa.bool_(), nullable=False)]
    fields += [pa.field(*layer) for layer in layers]
    fields += [
        pa.field(f"{kind}_{layer.block}", pa.list_(pa.float16(), width))
        for kind in sorted(widths)
        for layer, width in zip(shape.layers, widths[kind], strict=True)
    ]
    about: dict[str | bytes, str | bytes] = {"spark.trace": _FORMAT, "spark.model": shape.model_dump_json().encode()}
    if widths:
        hidden = json.dumps({kind: list(widths[kind]) for kind in sorted(widths)})
        about |= {"spark.trace": _FORMAT_HIDDEN, "spark.hidden": hidden.encode()}
    return pa.schema(fields, about)


def _write(file: Any, shape: ModelShape, widths: Mapping[str, Sequence[int]], sessions: Sequence[SessionTrace]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(shape, widths)
    hidden = [f"{kind}_{layer.block}.list.element" for kind in widths for layer in shape.layers]
    known = ["session", "workload", "token", "decode", *(f"block_{layer.block}.list.element" for layer in shape.layers)]
    # Bytes of like meaning together: hidden states take a tenth less.
    options: dict[str, Any] = {"use_dictionary": known, "use_byte_stream_split": hidden} if hidden else {}
    with pq.ParquetWriter(file, schema, compression="zstd", **options) as writer:
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
            for kind in sorted(widths):
                for rows, width in zip(session.hidden[kind], widths[kind], strict=True):
                    columns.append(pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), width))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _read(path: Path) -> tuple[ModelShape, list[SessionTrace]]:
    with _reading(path) as file:
        shape, widths = _about(file)
        return shape, list(_sessions(file, path, shape, widths))


@contextmanager
def _reading(path: Path) -> Iterator[pq.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, ValueError, ValidationError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SparkError(f"{path} is not a trace written by spark-agent: {reason}", "record it again") from error


def _about(file: pq.ParquetFile) -> tuple[ModelShape, dict[str, list[int]]]:
    """Whose selections a file holds, and the widths of its hidden states by kind and layer; ``ValueError``."""
    metadata = file.schema_arrow.metadata or {}
    version = metadata.get(b"spark.trace")
    if version not in {_FORMAT, _FORMAT_HIDDEN}:
        raise ValueError(f"spark.trace is {version!r}, expected {_FORMAT!r} or {_FORMAT_HIDDEN!r}")
    shape = ModelShape.model_validate_json(metadata.get(b"spark.model", b""))
    widths = _widths(metadata.get(b"spark.hidden", b""), shape) if version == _FORMAT_HIDDEN else {}
    if not file.schema_arrow.equals(_schema(shape, widths)):
        raise ValueError("its columns are not those of its model")
    widest = max((width for layers in widths.values() for width in layers), default=0)
    token_bytes = 2 * max(sum(layer.top_k for layer in shape.layers), widest)
    if file.metadata.num_rows * token_bytes > MOST_LOADED_BYTES:
        raise ValueError(f"{file.metadata.num_rows} tokens, expected at most {MOST_LOADED_BYTES // token_bytes}")
    return shape, widths


def _widths(content: bytes, shape: ModelShape) -> dict[str, list[int]]:
    found = json.loads(content)
    if not isinstance(found, dict) or not found or not set(found) <= set(HIDDEN_KINDS):
        raise ValueError(f"spark.hidden names {content[:80]!r}, expected {', '.join(HIDDEN_KINDS)}")
    for widths in found.values():
        if not isinstance(widths, list) or len(widths) != len(shape.layers):
            raise ValueError(f"spark.hidden has no width for each of {len(shape.layers)} layers")
        if not all(type(width) is int and 1 <= width <= _MOST_WIDTH for width in widths):
            raise ValueError(f"spark.hidden has widths beyond 1 to {_MOST_WIDTH}")
    return found


def _sessions(
    file: pq.ParquetFile, path: Path, shape: ModelShape, widths: Mapping[str, Sequence[int]]
) -> Iterator[SessionTrace]:
    """One a row group at a time; a row group may hold parts of several sessions."""
    import pyarrow as pa

    wanted = [*_NAMES, "token", "decode", *(f"block_{layer.block}" for layer in shape.layers)]
    row = 0
    for group in range(file.metadata.num_row_groups):
        table = file.read_row_group(group, wanted).combine_chunks()
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
                str(names[0][start]),
                str(names[1][start]),
                [layer[part] for layer in ids],
                decode[part],
                first,
                places=(Place(path, row + start, row + end, widths),),
            )
        row += len(table)


def _read_hidden(place: Place, shape: ModelShape, kind: str, layer: int) -> HalfArray:
    """``[row, value]`` of a whole file."""
    with _reading(place.path) as file:
        found, widths = _about(file)
        if found.fingerprint != shape.fingerprint or kind not in widths:
            raise ValueError(f"it no longer has {kind} hidden states of {shape.fingerprint}")
        array: Any = file.read([f"{kind}_{shape.layers[layer].block}"]).column(0).combine_chunks()
        if array.null_count:
            raise ValueError("hidden states are missing")
        values: HalfArray = array.flatten().to_numpy().astype(np.float16, copy=False)
        return values.reshape(file.metadata.num_rows, widths[kind][layer])


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
