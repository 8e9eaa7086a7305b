"""Trace files: Parquet with a row for each token, its selections and perhaps its hidden states by layer."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from spark_agent.errors import SparkError
from spark_runtime.hidden_kinds import HIDDEN_KINDS
from spark_schemas.model import ModelShape

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["Place", "SessionTrace", "read_hidden", "read_trace", "write_trace"]

IntArray = NDArray[np.int64]
HalfArray = NDArray[np.float16]

MOST_LOADED_BYTES = 2**34
"""Of the selections that a file may claim to hold, uncompressed, and of each layer's hidden states."""
_FORMAT, _FORMAT_HIDDEN = b"1", b"2"
_MOST_WIDTH = 2**17


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
    """``hidden[kind][layer][token, value]`` when it is written; once it is read, see ``traces.TraceFile.hidden``."""
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


def write_trace(
    file: Any, shape: ModelShape, widths: Mapping[str, Sequence[int]], sessions: Sequence[SessionTrace]
) -> None:
    """Write sessions to an open file, with their hidden states of these widths by kind and layer; ``OSError``."""
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


def read_trace(path: Path) -> tuple[ModelShape, list[SessionTrace]]:
    """Whose trace a file is, and its sessions or parts of them; :class:`SparkError` for another file or damaged one."""
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


def read_hidden(place: Place, shape: ModelShape, kind: str, layer: int) -> HalfArray:
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
