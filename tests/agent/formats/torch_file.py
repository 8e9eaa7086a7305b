"""Files as ``torch.save`` writes them, made by hand: torch is not installed."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

STORAGES = {"i4": "IntStorage", "i8": "LongStorage", "f4": "FloatStorage", "f8": "DoubleStorage", "u1": "ByteStorage"}


class TorchFile:
    """Builds the pickle opcode by opcode, and the archive around it."""

    def __init__(self) -> None:
        self.storages: dict[str, bytes] = {}

    def value(self, value: Any) -> bytes:
        if value is None:
            return b"N"
        if isinstance(value, str):
            return b"X" + struct.pack("<I", len(value)) + value.encode()
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        if isinstance(value, dict):
            return b"}(" + b"".join(self.value(key) + self.value(item) for key, item in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(self.value(item) for item in value) + b"e"
        if isinstance(value, tuple):
            return b"(" + b"".join(self.value(item) for item in value) + b"t"
        return self.tensor(value)

    def tensor(
        self, array: np.ndarray, *, offset: int = 0, stride: tuple[int, ...] | None = None, claimed: int | None = None
    ) -> bytes:
        key = str(len(self.storages))
        self.storages[key] = array.tobytes()
        step, strides = 1, []
        for extent in reversed(array.shape):
            strides.append(step)
            step *= extent
        numel = array.size if claimed is None else claimed
        storage = b"(" + self.value("storage") + b"ctorch\n" + STORAGES[array.dtype.str[1:]].encode() + b"\n"
        storage += self.value(key) + self.value("cpu") + self.value(numel) + b"tQ"
        layout = self.value(tuple(array.shape)) + self.value(tuple(reversed(strides)) if stride is None else stride)
        hooks = b"ccollections\nOrderedDict\n)R"
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + self.value(offset) + layout + b"\x89" + hooks + b"tR"

    def archive(self, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
            archive.writestr("archive/byteorder", b"little")
            for key, data in self.storages.items():
                archive.writestr(f"archive/data/{key}", data)
            archive.writestr("archive/version", b"3\n")
        return buffer.getvalue()


def save(path: Path, value: Any) -> Path:
    """What ``torch.save(value, path)`` would write; arrays stand for tensors."""
    file = TorchFile()
    path.write_bytes(file.archive(file.value(value)))
    return path
