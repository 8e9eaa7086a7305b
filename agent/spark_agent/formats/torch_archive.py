"""Tensors of a ``torch.save`` file, without torch and without running anything that is in it.

A file is a ZIP archive, stored without compression: ``NAME/data.pkl`` and a raw ``NAME/data/KEY`` for each storage.
The pickle may hold dicts, lists, tuples, strings, numbers and tensors of plain number types; every other instruction or
name in it is refused before anything is read, and what "tensor" means is decided here.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_agent.formats.reading import FormatError, fail
from spark_agent.formats.zip_file import opened

__all__ = ["read_torch_archive"]

_MOST_PICKLE_BYTES = 2**24
_MOST_STORAGE_BYTES = 2**30
_MOST_ENTRIES = 2**16
_MOST_DIMS = 8
_OPCODES = frozenset(
    {
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "POP_MARK",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "EMPTY_DICT",
        "DICT",
        "SETITEM",
        "SETITEMS",
        "EMPTY_LIST",
        "APPEND",
        "APPENDS",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "BINPUT",
        "LONG_BINPUT",
        "BINGET",
        "LONG_BINGET",
        "MEMOIZE",
        "GLOBAL",
        "REDUCE",
        "BINPERSID",
    }
)
"""What ``torch.save`` writes for such data. Not among them: everything that makes or fills objects of a class."""
_STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str
    length: int


@dataclass(frozen=True, slots=True)
class _Type:
    dtype: str


def read_torch_archive(path: Path) -> Any:
    """The value that was saved, with numpy arrays in the place of tensors.

    Raises :class:`FormatError` for any other file, for code in the pickle, compressed entries, and sizes that are
    untrue or too large.
    """
    with opened(path, _MOST_ENTRIES, "a file of torch.save") as found:
        archive, entries = found.archive, found.infos
        for info in entries.values():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                fail(path, f"{info.filename} is compressed, and torch.save compresses nothing")
        name = next((name for name in entries if name.endswith("/data.pkl")), None)
        if name is None:
            fail(path, "no data.pkl in it: not a file of torch.save")
        data = _read(path, archive, entries[name], _MOST_PICKLE_BYTES)
        _check(path, data)
        reader = _Reader(path, archive, entries, name.removesuffix("data.pkl"), data)
        try:
            return reader.load()
        except FormatError:
            raise
        except Exception as error:
            # A pickle of allowed instructions in a senseless order fails in many ways.
            raise FormatError(f"{path.name}: damaged pickle: {error}") from error


def _read(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    if info.file_size > most:
        fail(path, f"{info.filename} has {info.file_size} bytes, expected at most {most}")
    with archive.open(info) as file:
        data = file.read(most + 1)
    if len(data) != info.file_size:
        fail(path, f"{info.filename} has {len(data)} bytes, its header says {info.file_size}")
    return data


def _check(path: Path, data: bytes) -> None:
    """Look at every instruction and every name before any of them runs."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES:
                fail(path, f"its pickle would run {opcode.name}, expected only plain values and tensors")
            if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(data):
                # The memo grows to the highest number, whoever uses it.
                fail(path, f"its pickle remembers a value as number {argument}")
            if opcode.name == "GLOBAL" and _named(str(argument).replace(" ", ".")) is None:
                fail(path, f"its pickle names {argument}, expected only plain values and tensors")
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"{path.name}: damaged pickle: {error}") from error


def _named(name: str) -> Any:
    if name == "collections.OrderedDict":
        return OrderedDict
    if name == "torch._utils._rebuild_tensor_v2":
        return _Reader.tensor
    dtype = _STORAGES.get(name.removeprefix("torch."))
    return None if dtype is None or not name.startswith("torch.") else _Type(dtype)


class _Reader(pickle.Unpickler):
    def __init__(
        self, path: Path, archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo], prefix: str, data: bytes
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._path, self._archive, self._entries, self._prefix = path, archive, entries, prefix
        self._loaded: dict[str, NDArray[np.generic]] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = _named(f"{module}.{name}")
        if found is None:
            fail(self._path, f"its pickle names {module}.{name}, expected only plain values and tensors")
        return self.tensor if found is _Reader.tensor else found

    def persistent_load(self, saved: Any) -> _Storage:
        kind, storage, key, _, length = saved
        if kind != "storage" or not isinstance(storage, _Type) or not isinstance(key, str) or type(length) is not int:
            fail(self._path, "a storage that is none")
        return _Storage(storage.dtype, key, length)

    def tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_ignored: Any) -> NDArray[np.generic]:
        """What a saved tensor becomes: rows one after the other, within its storage."""
        if not isinstance(storage, _Storage) or not isinstance(size, tuple) or not isinstance(stride, tuple):
            fail(self._path, "a tensor that is none")
        if len(size) > _MOST_DIMS or any(type(n) is not int or n < 0 for n in (offset, *size)):
            fail(self._path, f"a tensor of size {size}")
        if storage.key not in self._loaded:
            info = self._entries.get(f"{self._prefix}data/{storage.key}")
            if info is None:
                fail(self._path, f"storage {storage.key} is missing")
            raw = _read(self._path, self._archive, info, _MOST_STORAGE_BYTES)
            if len(raw) != storage.length * np.dtype(storage.dtype).itemsize:
                fail(self._path, f"storage {storage.key} has {len(raw)} bytes for {storage.length} numbers")
            self._loaded[storage.key] = np.frombuffer(raw, dtype=storage.dtype)
        values = self._loaded[storage.key]
        length, expected = 1, []
        for extent in reversed(size):
            expected.append(length)
            length *= extent
        # Along an axis of one, a stride is never taken.
        rows = len(stride) == len(size) and all(
            found == needed or extent == 1
            for found, needed, extent in zip(stride, reversed(expected), size, strict=True)
        )
        if offset + length > len(values) or (length and not rows):
            fail(self._path, f"a tensor of size {size} and stride {stride} in a storage of {len(values)} numbers")
        return values[offset : offset + length].reshape(size)
