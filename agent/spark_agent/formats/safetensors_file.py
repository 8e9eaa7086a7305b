"""Single tensors of a safetensors file, read by their place: a header of JSON, and bytes that it points into."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_agent.formats.reading import MOST_CELLS, FormatError, fail, parse_json

__all__ = ["SafetensorsFile"]

_MOST_HEADER_BYTES = 2**24
_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
}


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A header that was checked; tensors are read when they are asked for."""

    path: Path
    header: dict[str, Any]
    start: int
    """Where the tensors' bytes begin."""
    size: int

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read the header; raise :class:`FormatError` for anything that is none."""
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                head = file.read(8)
                length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
                if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
                    fail(path, f"a header of {length} bytes in a file of {size}: not safetensors")
                header = parse_json(path, file.read(length))
        except OSError as error:
            raise FormatError(f"cannot read {path}: {error.strerror}", "check the path") from error
        if not isinstance(header, dict):
            fail(path, "its header is no object")
        return cls(path, header, 8 + length, size)

    @property
    def metadata(self) -> dict[str, Any]:
        """The texts beside the tensors; raise :class:`FormatError` where they are no texts."""
        found = self.header.get("__metadata__", {})
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            fail(self.path, "its metadata, expected texts")
        return found

    def table(self, name: str) -> NDArray[np.generic] | None:
        """A table ``[layers, experts]``, ``None`` where there is none; raise :class:`FormatError` for another shape."""
        entry = self.header.get(name)
        if entry is None:
            return None
        if not isinstance(entry, dict):
            fail(self.path, f"{name}, expected a tensor")
        shape, kind, span = entry.get("shape"), entry.get("dtype"), entry.get("data_offsets")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
            fail(self.path, f"{name} has the shape {shape}, expected layers x experts")
        if kind not in _TYPES or shape[0] * shape[1] > MOST_CELLS:
            fail(self.path, f"{name} is {kind} {shape}, expected numbers of a model's size")
        dtype = np.dtype(_TYPES[kind])
        n_bytes = shape[0] * shape[1] * dtype.itemsize
        if not isinstance(span, list) or len(span) != 2 or not all(type(n) is int and n >= 0 for n in span):
            fail(self.path, f"{name} lies at {span}, expected where it starts and ends")
        if span[1] - span[0] != n_bytes or self.start + span[1] > self.size:
            fail(self.path, f"{name} lies at {span}, expected {n_bytes} bytes within the file")
        try:
            with self.path.open("rb") as file:
                file.seek(self.start + span[0])
                raw = file.read(n_bytes)
        except OSError as error:
            raise FormatError(f"cannot read {self.path}: {error.strerror}", "check the path") from error
        if len(raw) != n_bytes:
            fail(self.path, f"{name} ends early")
        return np.frombuffer(raw, dtype=dtype).reshape(shape)
