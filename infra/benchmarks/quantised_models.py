"""Small models in other weight types, quantised by llama.cpp itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

from spark_runtime.gguf_file import read_gguf
from spark_runtime.llama import bindings
from spark_runtime.model_shape import expert_tensors

__all__ = ["TYPES", "quantise"]

TYPES = {
    "q4_0": "Q4_0",
    "q4_K": "Q4_K_S",
    "q6_K": "Q6_K",
    "q8_0": "Q8_0",
    "iq4_nl": "IQ4_NL",
    "mxfp4": "MXFP4_MOE",
    "f16": "F16",
    "bf16": "BF16",
    "mix": "Q4_K_S",
}
"""Names of ggml types (as ``ggml_type_name`` spells them) -> llama.cpp's file type that has them.

``mix`` is what K-quant files look like: the experts' down projections of block 1 in ``q6_K``, all else in ``q4_K``, so
that layers of one model differ in their bytes.
"""
_MIXED = re.compile(r"blk\.1\.ffn_down_exps\.")


def quantise(source: Path, target: Path, kind: str, *, threads: int = 1) -> Path:
    """Write ``source`` (in F32) as ``target`` with all weights of one type; ``ValueError`` if an expert's is another.

    Tensors whose rows are too short for the type take the one that llama.cpp falls back to.
    """
    llama = bindings()
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{TYPES[kind]}")
    params.nthread = threads
    params.pure = True
    overrides = _overrides(kind)
    if overrides:
        # Kept alive by this name until the call is over.
        table = (llama.llama_model_tensor_override * (len(overrides) + 1))()
        for entry, (pattern, number) in zip(table, overrides, strict=False):
            entry.pattern, entry.type = pattern.encode(), number
        params.tt_overrides = table
    if llama.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) != 0:
        raise ValueError(f"llama.cpp cannot quantise {source.name} to {kind}")
    for block, parts in expert_tensors(read_gguf(target)).items():
        for name, tensor in parts.items():
            if name.endswith(".weight") and tensor.type_name != expert_type(kind, tensor.name):
                raise ValueError(f"{source.name}: {name} of block {block} became {tensor.type_name}, wanted {kind}")
    return target


def expert_type(kind: str, tensor: str) -> str:
    """The type that an expert weight has in a model of this kind."""
    if kind == "mix":
        return "q6_K" if _MIXED.match(tensor) else "q4_K"
    return kind


def _overrides(kind: str) -> list[tuple[str, int]]:
    """Patterns that llama.cpp searches for in names, with the type that they take."""
    llama = bindings()
    if kind == "mxfp4":
        # This file type has experts in MXFP4 and the rest in Q8_0, unless told to be pure.
        return [(r"_exps\.weight$", llama.GGML_TYPE_MXFP4), ("", llama.GGML_TYPE_Q8_0)]
    if kind == "mix":
        return [(_MIXED.pattern, llama.GGML_TYPE_Q6_K)]
    return []
