"""exllamav3's placement profile (``.exl3moe``): safetensors with ``counts[layers, experts]``, a ranking and a census.

Only the counts are read: the ranking follows from them, and the census is of single prompts. ``fingerprint`` in the
metadata is JSON in a string. From pull request 315 of turboderp-org/exllamav3, which was open when this was read.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_agent.formats.hints import Hints
from spark_agent.formats.reading import (
    MOST_CELLS,
    FormatError,
    Found,
    check_sums,
    fail,
    layers_of_counts,
    parse_json,
    whole_counts,
)

__all__ = ["read_exl3moe"]

_MOST_HEADER_BYTES = 2**24
_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
}


def read_exl3moe(path: Path, hints: Hints) -> Found:
    """Counts of every layer, numbered without those that have no experts."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
                fail(path, f"a header of {length} bytes in a file of {size}: not safetensors")
            header = parse_json(path, file.read(length))
            if not isinstance(header, dict):
                fail(path, "its header is no object")
            counts = _counts(path, file, header, 8 + length, size)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}", "check the path") from error
    found = Found(layers_of_counts(path, dict(enumerate(counts)), hints.top_k))
    fingerprint = _fingerprint(path, header.get("__metadata__"))
    found.model = fingerprint
    if fingerprint is None:
        found.warnings.append("it does not say of which model it is: pass --model to check that it fits")
    found.warnings.append("prompts and generation are counted together; single prompts are not kept")
    check_sums(found)
    return found


def _counts(path: Path, file: Any, header: dict[str, Any], start: int, size: int) -> NDArray[np.int64]:
    entry = header.get("counts")
    if not isinstance(entry, dict):
        fail(path, f"no tensor counts, found {', '.join(sorted(header))[:80]}")
    shape, kind, span = entry.get("shape"), entry.get("dtype"), entry.get("data_offsets")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
        fail(path, f"counts has the shape {shape}, expected layers x experts")
    if kind not in _TYPES or shape[0] * shape[1] > MOST_CELLS:
        fail(path, f"counts is {kind} {shape}, expected numbers of a model's size")
    dtype = np.dtype(_TYPES[kind])
    n_bytes = shape[0] * shape[1] * dtype.itemsize
    if not isinstance(span, list) or len(span) != 2 or not all(type(n) is int and n >= 0 for n in span):
        fail(path, f"counts lies at {span}, expected where it starts and ends")
    if span[1] - span[0] != n_bytes or start + span[1] > size:
        fail(path, f"counts lies at {span}, expected {n_bytes} bytes within the file")
    file.seek(start + span[0])
    return whole_counts(path, "counts", np.frombuffer(file.read(n_bytes), dtype=dtype).reshape(shape))


def _fingerprint(path: Path, metadata: Any) -> str | None:
    """The model that the profile is bound to, as text; the JSON inside must be an object."""
    text = metadata.get("fingerprint") if isinstance(metadata, dict) else None
    if text is None:
        return None
    value = parse_json(path, text) if isinstance(text, str) else None
    if not isinstance(value, dict):
        fail(path, f"its fingerprint is {str(text)[:40]!r}, expected an object as JSON text")
    return json.dumps(value, sort_keys=True)[:200]
