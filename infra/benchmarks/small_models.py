"""Small random models of any mixture-of-experts architecture, deterministic for a seed.

Usage: small_models.py OUT.gguf ARCHITECTURE [--experts N] [--top-k N] [--embedding N] [--width N] [--vocabulary N]
[--type q4_0] [--seed N]. llama.cpp itself says which tensors an architecture wants, so no list of them can be wrong.
Routers are wide and experts differ in scale, so that routing spreads over all experts and no expert can stand in for
another unnoticed.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from quantised_models import TYPES, quantise
from small_architectures import ModelSize, metadata_of

from spark_runtime.ggml import GgmlTensor, GgufInitParams, complaints, ggml_base
from spark_runtime.llama import bindings

__all__ = ["write_small_model"]

SPREAD, ROUTER_SPREAD, CHOICE_SPREAD = 0.1, 0.2, 0.02
"""Standard deviations of weights, of router weights, and of what is added to the routers' results."""

Shapes = Mapping[str, tuple[int, ...]]
"""Tensors by name, slowest dimension first."""


def write_small_model(
    path: Path,
    architecture: str,
    size: ModelSize | None = None,
    *,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    split: bool = False,
) -> Path:
    """Write a model in F32; ``ValueError`` if llama.cpp makes none of it.

    ``changes`` are metadata to set beyond the architecture's own; an architecture unknown here takes the common ones.
    ``split`` stores gate and up of the experts apart where llama.cpp would have them in one tensor.
    """
    size = size or ModelSize()
    metadata = metadata_of(architecture, size) | dict(changes or {})
    draft = path.with_suffix(".draft")
    try:
        _write(draft, architecture, metadata, {}, seed)
        wanted = _wanted_tensors(draft)
    finally:
        draft.unlink(missing_ok=True)
    _write(path, architecture, metadata, _split(wanted) if split else wanted, seed)
    return path


def _wanted_tensors(draft: Path) -> dict[str, tuple[int, ...]]:
    llama = bindings()
    wanted: dict[str, tuple[int, ...]] = {}

    def take(address: int, _data: object) -> None:
        tensor = GgmlTensor.from_address(ctypes.cast(address, ctypes.c_void_p).value or 0)
        extent = [int(size) for size in tensor.ne]
        while len(extent) > 1 and extent[-1] == 1:
            extent.pop()
        wanted[tensor.name.decode()] = tuple(reversed(extent))

    fill = llama.llama_model_set_tensor_data_t(take)
    context = ggml_base().gguf_init_from_file(bytes(draft), GgufInitParams(no_alloc=True, ctx=None))
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    with complaints() as log:
        model = llama.llama_model_init_from_user(context, fill, None, params)
    ggml_base().gguf_free(context)
    if not model:
        raise ValueError(f"llama.cpp makes no such model: {log}")
    llama.llama_model_free(model)
    return wanted


def _split(wanted: Shapes) -> dict[str, tuple[int, ...]]:
    """Gate and up of the experts as two tensors instead of one."""
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in wanted.items():
        if name.endswith("ffn_gate_up_exps.weight"):
            experts, rows, columns = shape
            for kind in ("gate", "up"):
                result[name.replace("gate_up", kind)] = (experts, rows // 2, columns)
        else:
            result[name] = shape
    return result


def _write(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Shapes, seed: int) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"small {architecture}")
    vocabulary = metadata["vocab_size"]
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"tok_{token}" for token in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    for key, value in metadata.items():
        _add_value(writer, f"{architecture}.{key}", value)
    for name, shape in tensors.items():
        writer.add_tensor(name, _weights(name, shape, seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case ("uint64", items):
            kind = gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, items, kind, sub_type=gguf.GGUFValueType.UINT64)
        case _:
            writer.add_array(key, value)


def _weights(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if "norm" in name and not name.endswith(".bias"):
        return np.ones(shape, dtype=np.float32)
    data: NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("scale"):
        # Scales of quantised weights are positive and near one.
        data *= np.float32(0.25)
        return np.exp(data, out=data)
    data *= np.float32(_spread(name))
    if name.endswith("ssm_a"):
        # A state has to fade.
        return np.negative(np.abs(data, out=data), out=data)
    if name.endswith("_exps.weight"):
        scale = np.exp(np.float32(0.5) * rng.standard_normal(shape[0], dtype=np.float32))
        data *= scale[:, None, None]
    return data


def _spread(name: str) -> float:
    if "ffn_gate_inp." in name:
        return ROUTER_SPREAD
    # Beside probabilities of 1/32, more than this would choose the same experts for every token.
    return CHOICE_SPREAD if "exp_probs_b" in name else SPREAD


def main() -> None:
    """Write one model, quantised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("architecture")
    for name in ("experts", "top_k", "embedding", "width", "vocabulary"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(ModelSize(), name))
    parser.add_argument("--type", choices=sorted(TYPES), default="q4_0")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    size = ModelSize(options.embedding, options.width, options.experts, options.top_k, options.vocabulary)
    whole = write_small_model(options.out.with_suffix(".f32.gguf"), options.architecture, size, seed=options.seed)
    try:
        quantise(whole, options.out, options.type)
    finally:
        whole.unlink()
    sys.stderr.write(f"{options.out}: {options.out.stat().st_size / 1e6:.0f} MB\n")


if __name__ == "__main__":
    main()
