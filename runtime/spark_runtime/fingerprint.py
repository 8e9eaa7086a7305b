"""Identity of a model's experts: profiles bind to it, so that counts of one model never place another.

Weights are sampled, not read whole: a few slices of every expert tensor and router tell any two trainings or
quantisations apart while a 200 GB model is identified in well under a second from a warm disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from spark_runtime.errors import ModelFileError
from spark_runtime.gguf_file import GgufModel, TensorInfo
from spark_schemas.model import ExpertLayer

__all__ = ["fingerprint_of", "sibling_of"]

_SLICES = 4
_SLICE_BYTES = 4096


def fingerprint_of(
    model: GgufModel, architecture: str, layers: Sequence[ExpertLayer], tensors: Mapping[int, Mapping[str, TensorInfo]]
) -> str:
    """``mf1-…``: architecture, every layer's shape and tensor types, sampled bytes of experts and routers."""
    structure = [architecture, [layer.model_dump(mode="json") for layer in layers]]
    experts = [tensors[layer.block][kind] for layer in layers for kind in sorted(tensors[layer.block])]
    return "mf1-" + _digest(structure, [*experts, *_routers(model, layers)])


def sibling_of(model: GgufModel, architecture: str, layers: Sequence[ExpertLayer]) -> str:
    """``ms1-…``: what all quantisations of one model share: the structure and the routers.

    llama.cpp never quantises a router, so its bytes survive every quantisation and differ between trainings.
    """
    structure = [architecture, [[layer.block, layer.n_experts, layer.top_k, layer.n_shared] for layer in layers]]
    return "ms1-" + _digest(structure, _routers(model, layers))


def _routers(model: GgufModel, layers: Sequence[ExpertLayer]) -> list[TensorInfo]:
    names = (f"blk.{layer.block}.ffn_gate_inp.weight" for layer in layers)
    return [model.tensors[name] for name in names if name in model.tensors]


def _digest(structure: object, tensors: Iterable[TensorInfo]) -> str:
    digest = hashlib.sha256(json.dumps(structure, sort_keys=True, separators=(",", ":")).encode())
    for tensor in tensors:
        digest.update(f"\n{tensor.name} {tensor.shape} {tensor.type_name}\n".encode())
        for piece in _samples(tensor):
            digest.update(piece)
    return digest.hexdigest()[:32]


def _samples(tensor: TensorInfo) -> Iterable[bytes]:
    length = min(_SLICE_BYTES, tensor.n_bytes)
    room = tensor.n_bytes - length
    try:
        with tensor.path.open("rb", buffering=0) as file:
            for index in range(_SLICES):
                file.seek(tensor.offset + room * index // (_SLICES - 1))
                yield file.read(length)
    except OSError as error:
        raise ModelFileError(f"cannot read {tensor.path.name}: {error.strerror}", "check the disk") from error
