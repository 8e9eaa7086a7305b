"""Reading GGUF metadata and tensor positions, over all files of a split model.

The reader is the one inside the installed llama.cpp: what it accepts is what the engine can load, it checks sizes and
overflows, and it knows every tensor type of that version. Nothing is read beyond the headers.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_runtime.errors import ModelFileError, NotGgufError, TruncatedModelError
from spark_runtime.ggml import MAX_DIMS, GgufInitParams, complaints, ggml_base, type_name

__all__ = ["GgufModel", "MetaValue", "TensorInfo", "read_gguf"]

MetaValue = bool | int | float | str | tuple[int, ...] | tuple[float, ...]

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# struct codes by GGUF value type; strings and arrays are read in their own ways.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ARRAY = 65536
"""Longer arrays are vocabularies, which placement has no use for."""
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` as ggml counts it (fastest dimension first) and where its bytes are."""

    name: str
    shape: tuple[int, int, int, int]
    type_name: str
    n_bytes: int
    path: Path
    offset: int
    """Bytes from the start of ``path``."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Metadata and tensors of a model in one file or in all of its shards."""

    path: Path
    """The first file, the one that llama.cpp opens."""
    files: tuple[Path, ...]
    metadata: Mapping[str, MetaValue]
    tensors: Mapping[str, TensorInfo]

    def get_int(self, key: str, default: int | None = None) -> int:
        """A non-negative whole number; raise :class:`ModelFileError` when it is missing or something else."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelFileError(f"{self.path.name}: {key} is {value!r}, expected a whole number of at least 0")
        return value

    def get_int_per_block(self, key: str, n_blocks: int, default: int | None = None) -> tuple[int, ...]:
        """A value for every block: some architectures store one number, others an array."""
        value = self.metadata.get(key, default)
        if isinstance(value, tuple):
            numbers = tuple(number for number in value if isinstance(number, int) and number >= 0)
            if len(numbers) < max(len(value), n_blocks):
                raise ModelFileError(
                    f"{self.path.name}: {key} has {len(value)} values, {len(numbers)} of them whole numbers of at "
                    f"least 0, expected {n_blocks} such numbers"
                )
            return numbers[:n_blocks]
        return (self.get_int(key, default),) * n_blocks


def read_gguf(path: Path) -> GgufModel:
    """Read a model's headers, following ``-00001-of-0000N`` shards.

    Raises :class:`NotGgufError`, :class:`TruncatedModelError` or :class:`ModelFileError`, each naming the file, what
    was found and what was expected.
    """
    first, metadata, tensors = _read_shards(_shard_paths(path))
    model = GgufModel(path=first[0], files=first, metadata=metadata, tensors=tensors)
    declared = model.get_int("split.count", 0)
    if declared > 1 and declared != len(model.files):
        raise ModelFileError(
            f"{path.name}: a split model of {declared} files, but its name is not NAME-00001-of-{declared:05d}.gguf",
            "restore the original file names: shards find each other by them",
        )
    return model


def _shard_paths(path: Path) -> list[Path]:
    match = _SHARD.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    paths = [path.with_name(f"{match['stem']}-{index:05d}-of-{match['count']}.gguf") for index in range(1, count + 1)]
    missing = [shard.name for shard in paths if not shard.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        raise TruncatedModelError(
            f"{path.name}: {len(missing)} of {count} files of this split model are missing: {shown}",
            f"put all {count} files into {path.parent}",
        )
    return paths


def _read_shards(paths: list[Path]) -> tuple[tuple[Path, ...], dict[str, MetaValue], dict[str, TensorInfo]]:
    metadata: dict[str, MetaValue] = {}
    tensors: dict[str, TensorInfo] = {}
    for index, shard in enumerate(paths):
        own_metadata, own_tensors = _read_file(shard)
        if index == 0:
            metadata = own_metadata
        elif own_metadata.get("split.no") != index:
            raise ModelFileError(
                f"{shard.name}: split.no is {own_metadata.get('split.no')!r}, expected {index}",
                "download this file again: it belongs to another model or position",
            )
        for tensor in own_tensors:
            if tensor.name in tensors:
                raise ModelFileError(f"{shard.name}: tensor {tensor.name} is also in {tensors[tensor.name].path.name}")
            tensors[tensor.name] = tensor
    return tuple(paths), metadata, tensors


def _read_file(path: Path) -> tuple[dict[str, MetaValue], list[TensorInfo]]:
    _check_magic(path)
    library = ggml_base()
    with complaints() as log:
        context = library.gguf_init_from_file(os.fsencode(path), GgufInitParams(no_alloc=True, ctx=None))
    if not context:
        reason = log[0].split(": ", 1)[-1] if log else "llama.cpp's reader gives no reason"
        raise TruncatedModelError(
            f"{path.name} is a damaged or incomplete GGUF file ({path.stat().st_size} bytes): {reason}",
            "download it again and compare its size and checksum with the publisher's",
        )
    try:
        metadata = dict(_metadata(library, context))
        tensors = list(_tensors(library, context, path))
    finally:
        library.gguf_free(context)
    end = max((tensor.offset + tensor.n_bytes for tensor in tensors), default=0)
    size = path.stat().st_size
    if end > size:
        raise TruncatedModelError(
            f"{path.name} is truncated: {size} bytes, expected at least {end}",
            "download it again: the file ends before its last tensor",
        )
    return metadata, tensors


def _check_magic(path: Path) -> None:
    try:
        # Opening a pipe would wait for its writer.
        if not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):
            raise NotGgufError(
                f"{path.name} is a pipe, socket or device, expected a GGUF file", "save the model to a file first"
            )
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except FileNotFoundError as error:
        raise ModelFileError(f"no such model file: {path}", "check the path") from error
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}", "check the path and its permissions") from error
    if magic != _MAGIC:
        found = f"starts with {magic!r}" if magic else "is empty"
        raise NotGgufError(
            f"{path.name} {found}, expected {_MAGIC!r}: not a GGUF model", "Spark runs GGUF files of llama.cpp"
        )


def _metadata(library: ctypes.CDLL, context: int) -> Iterator[tuple[str, MetaValue]]:
    for index in range(library.gguf_get_n_kv(context)):
        key = library.gguf_get_key(context, index).decode(errors="replace")
        kind = library.gguf_get_kv_type(context, index)
        if kind == _STRING:
            yield key, library.gguf_get_val_str(context, index).decode(errors="replace")
        elif kind != _ARRAY:
            yield key, _unpack(_CODES[kind], 1, library.gguf_get_val_data, context, index)[0]
        else:
            element, count = library.gguf_get_arr_type(context, index), library.gguf_get_arr_n(context, index)
            if element in _CODES and 0 < count <= _MAX_ARRAY:
                yield key, _unpack(_CODES[element], count, library.gguf_get_arr_data, context, index)


def _unpack(code: str, count: int, get: Callable[[int, int], int], context: int, index: int) -> tuple[int, ...]:
    layout = struct.Struct(f"={count}{code}")
    return layout.unpack(ctypes.string_at(get(context, index), layout.size))


def _tensors(library: ctypes.CDLL, context: int, path: Path) -> Iterator[TensorInfo]:
    data_offset = library.gguf_get_data_offset(context)
    for index in range(library.gguf_get_n_tensors(context)):
        extent = library.gguf_get_tensor_ne(context, index)
        yield TensorInfo(
            name=library.gguf_get_tensor_name(context, index).decode(errors="replace"),
            shape=(extent[0], extent[1], extent[2], extent[MAX_DIMS - 1]),
            type_name=type_name(library.gguf_get_tensor_type(context, index)),
            n_bytes=library.gguf_get_tensor_size(context, index),
            path=path,
            offset=data_offset + library.gguf_get_tensor_offset(context, index),
        )
