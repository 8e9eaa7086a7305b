"""KTransformers' mask of the experts on its GPU: bool ``[layers, experts]``, ``.npy`` or ``.pt``.

kt-kernel makes it of ``logical_count`` (``generate_gpu_experts_masks`` in ``experts_base.py``) and keeps it in memory.
A file of it is an array, or a tensor, alone or in a dict under ``gpu_experts_mask``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_agent.formats.hints import Hints
from spark_agent.formats.npy_file import read_npy
from spark_agent.formats.profile import ImportedLayer
from spark_agent.formats.reading import MOST_CELLS, Found, fail
from spark_agent.formats.torch_archive import read_torch_archive
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = ["read_mask"]

MASK_KEY = "gpu_experts_mask"


def read_mask(path: Path, hints: Hints) -> Found:
    """The experts that are on the GPU, of every layer that has some; which are hotter among them is not said."""
    value: Any = read_npy(path) if path.suffix == ".npy" else read_torch_archive(path)
    if path.suffix != ".npy":
        value = value.get(MASK_KEY) if isinstance(value, dict) else value
    mask = _mask(path, value)
    layers = [
        ImportedLayer(block=block, n_experts=len(row), top_k=hints.top_k, ranking=tuple(np.flatnonzero(row).tolist()))
        for block, row in enumerate(mask)
        if row.any()
    ]
    if not layers:
        fail(path, "no expert is on the GPU")
    warnings = ["a mask has neither counts nor an order: experts on the GPU come first, by their ids"]
    return Found(layers, [*warnings, "the format names no model: pass --model to check that it fits"])


def _mask(path: Path, value: Any) -> NDArray[np.bool_]:
    if not isinstance(value, np.ndarray) or value.ndim != 2 or not 0 < value.size <= MOST_CELLS:
        fail(path, f"a mask of shape {getattr(value, 'shape', None)}, expected layers x experts")
    if value.shape[0] > MAX_BLOCKS or value.shape[1] > MAX_EXPERTS:
        fail(path, f"a mask of shape {value.shape}: no model has so many")
    if value.dtype.kind not in "biu" or ((value != 0) & (value != 1)).any():
        fail(path, f"a mask of type {value.dtype}, expected true and false alone")
    return value.astype(np.bool_)
