"""Tables as ``torch.save`` would write them, without torch: an archive of a pickle and raw numbers."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["torch_archive_bytes"]

_STORAGES = {"?": "BoolStorage", "i8": "LongStorage", "i4": "IntStorage", "f4": "FloatStorage"}
_WHEN = (1980, 1, 1, 0, 0, 0)
"""The same bytes for the same numbers."""


def torch_archive_bytes(tables: Mapping[str, NDArray[np.generic]], texts: Mapping[str, str]) -> bytes:
    """A dict of tensors and texts by their names; ``torch.load(weights_only=True)`` reads it.

    Raises ``KeyError`` for a type of number that is not among bool, int32, int64 and float32.
    """
    storages: list[bytes] = []
    items = b"".join(_text(name) + _tensor(table, storages) for name, table in tables.items())
    items += b"".join(_text(name) + _text(text) for name, text in texts.items())
    content = {"data.pkl": pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK + items}
    content["data.pkl"] += pickle.SETITEMS + pickle.STOP
    content["byteorder"] = b"little"
    content |= {f"data/{key}": data for key, data in enumerate(storages)}
    content["version"] = b"3\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}", _WHEN), data)
    return buffer.getvalue()


def _tensor(table: NDArray[np.generic], storages: list[bytes]) -> bytes:
    little = np.ascontiguousarray(table, dtype=table.dtype.newbyteorder("<"))
    kind = little.dtype.str.lstrip("<|")
    storage = _name("torch", _STORAGES["?" if kind == "b1" else kind])
    key = str(len(storages))
    storages.append(little.tobytes())
    # Not numpy's, which may be anything along an axis of one.
    strides = tuple(math.prod(little.shape[axis + 1 :]) for axis in range(little.ndim))
    saved = _tuple(_text("storage"), storage, _text(key), _text("cpu"), _number(little.size)) + pickle.BINPERSID
    hooks = _name("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    layout = (_tuple(*map(_number, little.shape)), _tuple(*map(_number, strides)))
    rebuild = _tuple(saved, _number(0), *layout, pickle.NEWFALSE, hooks)
    return _name("torch._utils", "_rebuild_tensor_v2") + rebuild + pickle.REDUCE


def _text(text: str) -> bytes:
    data = text.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    return pickle.BININT + struct.pack("<i", value)


def _tuple(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _name(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()
