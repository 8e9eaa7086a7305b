"""From a GGUF to its MoE shape: which blocks have experts, how many, how many are chosen, and their exact bytes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from spark_runtime.context_memory import kv_bytes_per_token, state_bytes
from spark_runtime.errors import ModelFileError, NotMoeError, UnsupportedModelError
from spark_runtime.fingerprint import fingerprint_of, sibling_of
from spark_runtime.gguf_file import GgufModel, TensorInfo, read_gguf
from spark_schemas.model import MAX_BLOCKS, ExpertLayer, ModelShape

__all__ = ["EXPERT_TENSOR", "expert_tensors", "read_model_shape", "shape_of"]

EXPERT_TENSOR = re.compile(r"^blk\.(\d+)\.ffn_(gate_up|gate|up|down)_exps\.(weight|bias|scale|input_scale)$")
"""Everything a selected expert needs: fused or separate weights, with their per-expert biases and scales."""
_ONE_TENSOR_PER_EXPERT = re.compile(r"^blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight$")


def read_model_shape(path: Path) -> ModelShape:
    """Read the shape of the model at ``path``; see :func:`shape_of` and ``gguf_file.read_gguf`` for errors."""
    return shape_of(read_gguf(path))


def shape_of(model: GgufModel) -> ModelShape:
    """The shape of a GGUF's routed experts.

    Blocks that predict further tokens (``nextn_predict_layers``) are left out: their experts do not serve the model's
    own tokens. Raises :class:`NotMoeError` for a dense model, :class:`ModelFileError` where metadata and tensors
    contradict each other.
    """
    try:
        return _shape_of(model)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "shape"
        raise ModelFileError(
            f"{model.path.name}: {where} cannot be right: {fault['msg']}", "the file's metadata may be damaged"
        ) from error


def _shape_of(model: GgufModel) -> ModelShape:
    architecture = _architecture(model)
    n_blocks_all = model.get_int(f"{architecture}.block_count")
    if n_blocks_all > MAX_BLOCKS:
        raise ModelFileError(f"{model.path.name}: {n_blocks_all} blocks, expected at most {MAX_BLOCKS}")
    n_blocks = n_blocks_all - model.get_int(f"{architecture}.nextn_predict_layers", 0)
    by_block = {block: parts for block, parts in expert_tensors(model).items() if block < n_blocks}
    if not by_block:
        raise _no_experts(model, architecture)
    top_k = model.get_int_per_block(f"{architecture}.expert_used_count", n_blocks_all, 0)
    layers = tuple(_layer(model, architecture, block, by_block[block], top_k[block]) for block in sorted(by_block))
    name = model.metadata.get("general.name")
    routed = sum(tensor.n_bytes for parts in by_block.values() for tensor in parts.values())
    draft = sum(tensor.n_bytes for tensor in model.tensors.values() if _block_of(tensor.name) >= n_blocks)
    return ModelShape(
        fingerprint=fingerprint_of(model, architecture, layers, by_block),
        sibling=sibling_of(model, architecture, layers),
        architecture=architecture,
        name=name[:200] if isinstance(name, str) else None,
        n_blocks=n_blocks,
        context_length=max(1, model.get_int(f"{architecture}.context_length", 1)),
        core_bytes=sum(tensor.n_bytes for tensor in model.tensors.values()) - routed - draft,
        kv_bytes_per_token=kv_bytes_per_token(model, architecture, n_blocks),
        state_bytes=state_bytes(model, architecture, n_blocks),
        layers=layers,
    )


def expert_tensors(model: GgufModel) -> dict[int, dict[str, TensorInfo]]:
    """Tensors of routed experts by block and kind, for example ``{3: {"up.weight": …}}``."""
    result: defaultdict[int, dict[str, TensorInfo]] = defaultdict(dict)
    for tensor in model.tensors.values():
        match = EXPERT_TENSOR.match(tensor.name)
        if match:
            result[int(match[1])][f"{match[2]}.{match[3]}"] = tensor
    return dict(result)


def _architecture(model: GgufModel) -> str:
    kind = model.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(
            f"{model.path.name} is a GGUF of the type {str(kind)[:40]!r}, expected 'model'",
            "adapters, projectors, vocabularies and importance matrices belong to a model: name the model's file",
        )
    architecture = model.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ModelFileError(f"{model.path.name}: general.architecture is {architecture!r}, expected a name")
    return architecture


def _block_of(name: str) -> int:
    match = re.match(r"^blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _no_experts(model: GgufModel, architecture: str) -> UnsupportedModelError:
    if any(_ONE_TENSOR_PER_EXPERT.match(name) for name in model.tensors):
        return UnsupportedModelError(
            f"{model.path.name} stores every expert in a tensor of its own, a layout from before April 2024",
            "convert the model again with a current llama.cpp",
        )
    return NotMoeError(
        f"{model.path.name} ({architecture}) has no routed experts: expected tensors like blk.0.ffn_up_exps.weight",
        "Spark tiers mixture-of-experts models; run a dense model with llama.cpp itself",
    )


def _layer(model: GgufModel, architecture: str, block: int, parts: Mapping[str, TensorInfo], top_k: int) -> ExpertLayer:
    where = f"{model.path.name}: block {block}"
    if "down.weight" not in parts or not {"up.weight", "gate_up.weight"} & set(parts):
        raise ModelFileError(f"{where} has expert tensors {sorted(parts)}, expected up (or gate_up) and down weights")
    n_experts = parts["down.weight"].shape[2]
    if not 1 <= top_k <= n_experts:
        raise ModelFileError(f"{where}: {architecture}.expert_used_count is {top_k}, expected 1 to {n_experts} experts")
    expert_bytes = 0
    for kind, tensor in parts.items():
        experts = _expert_extent(tensor, kind)
        if experts != n_experts or tensor.n_bytes % n_experts:
            raise ModelFileError(
                f"{where}: {tensor.name} holds {experts} experts in {tensor.n_bytes} bytes, expected {n_experts} alike"
            )
        expert_bytes += tensor.n_bytes // n_experts
    shared = [name for name in model.tensors if name.startswith(f"blk.{block}.ffn_") and "_shexp." in name]
    return ExpertLayer(
        block=block,
        n_experts=n_experts,
        top_k=top_k,
        n_shared=max(1, model.get_int(f"{architecture}.expert_shared_count", 1)) if shared else 0,
        fused_gate_up="gate_up.weight" in parts,
        expert_bytes=expert_bytes,
        tensor_types={kind: tensor.type_name for kind, tensor in sorted(parts.items())},
    )


def _expert_extent(tensor: TensorInfo, kind: str) -> int:
    """The dimension that counts experts: the third of a weight, the second of a bias, the first of a scale."""
    if kind.endswith(".weight"):
        return tensor.shape[2]
    if kind.endswith(".bias"):
        return tensor.shape[1]
    return tensor.shape[0]
