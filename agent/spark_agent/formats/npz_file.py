"""Arrays of numpy's ``.npz``, which may be compressed: bounded before a byte is unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from spark_agent.formats.reading import fail
from spark_agent.formats.zip_file import opened

__all__ = ["read_npz"]

_MOST_ENTRIES = 64
_MOST_BYTES = 2**30
"""Unpacked, all arrays that are asked for together."""


def read_npz(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[np.generic]]:
    """The arrays of these names that are there.

    An array is unpacked as far as its own header says and no further, so what a bomb claims costs nothing. Raises
    :class:`FormatError` for another file, for arrays of objects and for untrue sizes.
    """
    with opened(path, _MOST_ENTRIES, "an archive of arrays") as entries:
        wanted = {name: entries.infos[f"{name}.npy"] for name in names if f"{name}.npy" in entries.infos}
        if sum(info.file_size for info in wanted.values()) > _MOST_BYTES:
            fail(path, f"its arrays have more than {_MOST_BYTES} bytes")
        return {name: _array(path, name, entries.archive.open(info), info.file_size) for name, info in wanted.items()}


def _array(path: Path, name: str, file: IO[bytes], stated: int) -> NDArray[np.generic]:
    with file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            fail(path, f"{name} is of version {version}, expected 1.0 or 2.0")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = _header(read(file))
        if dtype.kind not in "iuf":
            fail(path, f"{name} is of type {dtype}, expected numbers")
        n_bytes = dtype.itemsize
        for extent in shape:
            n_bytes *= extent
        if n_bytes > min(stated, _MOST_BYTES):
            fail(path, f"{name} of shape {shape} has {n_bytes} bytes, its entry {stated}")
        raw = file.read(n_bytes)
        if len(raw) != n_bytes:
            fail(path, f"{name} ends after {len(raw)} of {n_bytes} bytes")
        return np.frombuffer(raw, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def _header(header: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    shape, fortran, dtype = header
    return tuple(int(extent) for extent in shape), bool(fortran), dtype
