"""llama.cpp's importance matrix (GGUF, ``general.type`` imatrix): how often each expert was used, as a by-product.

Per tensor ``NAME.counts``, float32, one number for each expert; ``imatrix.chunk_count`` and ``imatrix.chunk_size`` say
how many tokens there were. Read from ``tools/imatrix/imatrix.cpp`` of ggml-org/llama.cpp.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spark_agent.formats.hints import Hints
from spark_agent.formats.reading import FormatError, Found, check_sums, fail, layers_of_counts, whole_counts
from spark_runtime.errors import NotGgufError, SparkRuntimeError
from spark_runtime.gguf_file import GgufModel, TensorInfo, read_gguf
from spark_schemas.ids import MAX_COUNT
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = ["read_imatrix"]

_NAME = re.compile(r"blk\.(\d{1,4})\.ffn_(up|gate|down|gate_up)_exps\.weight\.counts")
_KINDS = ("up", "gate_up", "gate", "down")
_OLDER_NAME = re.compile(rb"[a-z_][a-z0-9_.]*\.weight", re.ASCII)
_MOST_NAME_BYTES = 128
_EXACT = 2**24
"""float32 counts by one up to here."""


def read_imatrix(path: Path, hints: Hints) -> Found:
    """Counts of every layer with experts. Dense tensors and shared experts are passed over."""
    try:
        file = read_gguf(path)
    except NotGgufError as error:
        if _is_older(path):
            raise FormatError(
                f"{path.name}: an importance matrix in the older format (.dat), which has no counts of single experts, "
                "and none after a conversion",
                "make it again: llama-imatrix -m MODEL.gguf -f TEXT -o NAME.gguf",
            ) from error
        fail(path, str(error))
    except SparkRuntimeError as error:
        fail(path, str(error))
    kind = file.metadata.get("general.type")
    if kind != "imatrix":
        fail(path, f"general.type is {kind!r}, expected 'imatrix'")
    counts = _tables(path, file)
    chosen = {block: next(found[kind] for kind in _KINDS if kind in found) for block, found in counts.items()}
    found = Found(layers_of_counts(path, chosen, hints.top_k), phase="prefill")
    found.warnings.append("an imatrix is of prompts alone, and of the text it was made from")
    different = [block for block, kinds in counts.items() if len({tuple(row.tolist()) for row in kinds.values()}) > 1]
    if different:
        found.warnings.append(f"block {different[0]} (and {len(different) - 1} more) counts its tensors differently")
    if all(int(row.min()) == int(row.max()) for row in chosen.values()):
        found.warnings.append("every expert counts the same: it was merged with a file in the older format, or made up")
    if max(int(row.max()) for row in chosen.values()) >= _EXACT:
        found.warnings.append(f"counts of {_EXACT} and more are rounded: the format keeps them as float32")
    check_sums(found)
    _compare_tokens(found, file, chosen)
    return found


def _tables(path: Path, file: GgufModel) -> dict[int, dict[str, NDArray[np.int64]]]:
    """Counts by block and kind of tensor."""
    counts: dict[int, dict[str, NDArray[np.int64]]] = {}
    for name, tensor in file.tensors.items():
        match = _NAME.fullmatch(name)
        if match is not None:
            if int(match[1]) >= MAX_BLOCKS:
                fail(path, f"{name}: no model has so many blocks")
            counts.setdefault(int(match[1]), {})[match[2]] = _counts(path, tensor)
    if not counts:
        fail(path, "no counts of experts: the model is dense, or the file is of an older llama.cpp")
    if all(len(row) == 1 for kinds in counts.values() for row in kinds.values()):
        # The older format has one number a tensor, and conversion keeps that.
        fail(path, "one count for all experts of a tensor: it was converted from the older format, which has no more")
    return counts


def _is_older(path: Path) -> bool:
    """Whether it begins as ``.dat`` does: how many entries, then the length and the text of a tensor's name."""
    try:
        with path.open("rb") as file:
            head = file.read(8 + _MOST_NAME_BYTES)
    except OSError:
        return False
    if len(head) < 8:
        return False
    n_entries, length = struct.unpack("<ii", head[:8])
    name = head[8 : 8 + length] if 0 < length <= _MOST_NAME_BYTES else b""
    return n_entries > 0 and len(name) == length and _OLDER_NAME.fullmatch(name) is not None


def _compare_tokens(found: Found, file: GgufModel, counts: dict[int, NDArray[np.int64]]) -> None:
    """Compare with what the header says; the last block may have routed fewer tokens."""
    chunks, size = file.metadata.get("imatrix.chunk_count"), file.metadata.get("imatrix.chunk_size")
    if not isinstance(chunks, int) or not isinstance(size, int) or chunks * size == 0:
        return
    total = max(int(row.sum()) for row in counts.values())
    if total % (chunks * size):
        found.warnings.append(f"{total} selections a layer are no multiple of the header's {chunks} x {size} tokens")
    elif found.tokens is None and chunks * size <= MAX_COUNT:
        found.tokens = chunks * size


def _counts(path: Path, tensor: TensorInfo) -> NDArray[np.int64]:
    n_experts = int(np.prod(tensor.shape, dtype=np.int64))
    if tensor.type_name != "f32" or n_experts > MAX_EXPERTS or sorted(tensor.shape)[:3] != [1, 1, 1]:
        fail(path, f"{tensor.name} is {tensor.type_name} {tensor.shape}, expected a float32 for each expert")
    with tensor.path.open("rb") as data:
        data.seek(tensor.offset)
        raw = data.read(4 * n_experts)
    if len(raw) != 4 * n_experts:
        fail(path, f"{tensor.name} ends early")
    return whole_counts(path, tensor.name, np.frombuffer(raw, dtype="<f4"))
