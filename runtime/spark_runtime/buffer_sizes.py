"""How much llama.cpp allocates for a model, learnt without allocating it, and read from a real load to compare.

llama.cpp offers these numbers to C++ alone, but logs them. A load with ``no_alloc`` goes through everything that
decides sizes (which layer goes to which device, the caches, the worst compute graph) and reads no weights: 20
milliseconds for a small model, more for a large vocabulary. Weights, keys and values get empty buffers then, so the log
says 0 for them; their sizes follow from the tensors that were asked for, each measured by its device, and from the
caches' own totals. Only recurrent states and the logits of one token are really allocated.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spark_runtime.devices import device_at, registered_devices
from spark_runtime.errors import UnsupportedModelError
from spark_runtime.ggml import LOG_CALLBACK, GgmlTensor, complaints, ggml_base, type_name, typed
from spark_runtime.gguf_file import GgufModel, TensorInfo
from spark_runtime.llama import bindings, context_tokens
from spark_runtime.memory_plan import DeviceNeeds, Needs
from spark_runtime.model_shape import EXPERT_TENSOR
from spark_schemas.model import ModelShape

__all__ = ["HOST", "BufferSizes", "buffer_sizes", "log_lines", "needs_of", "read_buffer_sizes"]

HOST = "CPU"
"""Name of llama.cpp's device and buffers in host memory."""

_MIB = 2**20
_LOAD_MODE_NONE = 0
_INPUTS = frozenset(("token_embd.weight", "position_embd.weight", "token_types.weight", "per_layer_token_embd.weight"))
"""Looked up by row, which llama.cpp always does on the CPU."""
_IN_EVERY_LAYER = ("rope_freqs.", "rope_factors_")
_FIRST_LAYER = "token_embd_norm."

_BUFFER = re.compile(r": +(\S+) +(?:(model|KV|RS|compute|output)|DSV4 \S+ state) buffer size = +([\d.]+) MiB")
_LAYER = re.compile(r"^load_tensors: layer +(\d+) assigned to device (\S+),")
_TENSOR = re.compile(r"^create_tensor: loading tensor (\S+)")
_UNUSED = re.compile(r"^model has unused tensor (\S+) ")
_CACHED_LAYER = re.compile(r"^llama_kv_cache: layer +\d+: dev = (\S+)")
_CACHE = re.compile(r"^llama_kv_cache: size = +([\d.]+) MiB \(")


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Bytes by the name of the buffers, for example ``CUDA0``; what the log rounds is rounded up."""

    model: Mapping[str, int]
    """Weights. A dry load keeps routed experts apart, a real load counts them here."""
    experts: Mapping[str, int]
    """Routed experts by the buffers of the device that computes their layer; empty for a real load."""
    context: Mapping[str, int]
    """Keys, values and recurrent states."""
    compute: Mapping[str, int]
    output: Mapping[str, int]
    """Logits of one token per sequence, in host memory; more when more are asked for at once."""
    blocks: Mapping[int, str]
    """The buffers of each block's device; one block beyond the last is the output layer."""

    def total(self, *, experts: bool = True) -> int:
        """Bytes of everything, with or without routed experts."""
        kinds = (self.model, self.context, self.compute, self.output, *((self.experts,) if experts else ()))
        return sum(sum(kind.values()) for kind in kinds)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect every line that llama.cpp logs inside the block, whatever its level, as it comes.

    Complaints still reach :func:`spark_runtime.ggml.complaints`. The log is one for the process: not thread-safe.
    """
    lines: list[str] = []
    llama = bindings()

    def keep(level: int, text: bytes | None, data: object) -> None:
        if text:
            lines.extend(text.decode(errors="replace").splitlines())
        LOG_CALLBACK(level, text, data)

    callback = type(LOG_CALLBACK)(keep)
    llama.llama_log_set(ctypes.cast(callback, llama.llama_log_callback), None)
    try:
        yield lines
    finally:
        llama.llama_log_set(ctypes.cast(LOG_CALLBACK, llama.llama_log_callback), None)


def buffer_sizes(
    model: GgufModel,
    *,
    n_ctx: int,
    n_batch: int,
    n_ubatch: int,
    n_gpu_layers: int = -1,
    n_seq_max: int = 1,
    n_outputs_max: int = 0,
    devices: Sequence[int] = (),
    tensor_split: Sequence[float] = (),
) -> BufferSizes:
    """What a load with these parameters would allocate.

    Each of ``n_seq_max`` sequences has ``n_ctx`` tokens. ``devices`` are addresses of ggml devices, all that llama.cpp
    knows if empty; ``n_outputs_max`` the most logits that one call asks for, 0 for a batch. Raises
    :class:`UnsupportedModelError` when llama.cpp refuses the model.
    """
    llama = bindings()
    params = llama.llama_model_default_params()
    params.no_alloc, params.load_mode, params.n_gpu_layers = True, _LOAD_MODE_NONE, n_gpu_layers
    listed = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
    if devices:
        params.devices = ctypes.cast(listed, ctypes.c_void_p)
    shares = (ctypes.c_float * max(len(tensor_split), llama.llama_max_devices()))(*tensor_split)
    if tensor_split:
        params.tensor_split = shares
    context_params = llama.llama_context_default_params()
    context_params.n_ctx, context_params.n_batch = context_tokens(n_ctx, n_seq_max), n_batch
    context_params.n_ubatch, context_params.kv_unified = n_ubatch, False
    context_params.n_seq_max = n_seq_max
    context_params.n_outputs_max = max(n_outputs_max, n_seq_max) if n_outputs_max else 0
    with log_lines() as lines, complaints() as log:
        loaded = llama.llama_model_load_from_file(os.fsencode(model.path), params)
        context = llama.llama_init_from_model(loaded, context_params) if loaded else None
        if context:
            llama.llama_free(context)
        if loaded:
            llama.llama_model_free(loaded)
    if not context:
        raise UnsupportedModelError(
            f"llama.cpp cannot open {model.path.name} with a context of {n_ctx} tokens: "
            f"{log[0].split(': ', 1)[-1] if log else 'it gives no reason'}",
            "the installed llama-cpp-python may be older than this model's architecture, or the file is damaged",
        )
    return _dry_sizes(model, lines, _buffer_types(devices))


def read_buffer_sizes(lines: Sequence[str]) -> BufferSizes:
    """What a load allocated, from the lines it logged."""
    kinds: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    blocks: dict[int, str] = {}
    for line in lines:
        if match := _BUFFER.search(line):
            kind = match[2] if match[2] in {"model", "compute", "output"} else "context"
            kinds[kind][match[1]] += _bytes(match[3])
        elif match := _LAYER.match(line):
            blocks[int(match[1])] = match[2]
    model, context, compute, output = (dict(kinds[kind]) for kind in ("model", "context", "compute", "output"))
    return BufferSizes(model=model, experts={}, context=context, compute=compute, output=output, blocks=blocks)


def needs_of(shape: ModelShape, sizes: BufferSizes, devices: Sequence[str]) -> Needs:
    """What a plan has to hold beside experts: on these devices by the name of their buffers, the rest on the host.

    Raises ``ValueError`` when a layer with experts is on none of them: only offloaded layers can be tiered.
    """
    for layer in shape.layers:
        if sizes.blocks.get(layer.block) not in devices:
            raise ValueError(f"block {layer.block} is on {sizes.blocks.get(layer.block)}, expected one of {devices}")
    on_devices = tuple(
        DeviceNeeds(
            core_bytes=sizes.model.get(name, 0),
            context_bytes=sizes.context.get(name, 0),
            compute_bytes=sizes.compute.get(name, 0) + sizes.output.get(name, 0),
            layers=tuple(index for index, layer in enumerate(shape.layers) if sizes.blocks[layer.block] == name),
        )
        for name in devices
    )

    def elsewhere(*kinds: Mapping[str, int]) -> int:
        return sum(size for kind in kinds for name, size in kind.items() if name not in devices)

    return Needs(on_devices, elsewhere(sizes.model), elsewhere(sizes.context, sizes.compute, sizes.output))


def _bytes(mebibytes: str) -> int:
    """Most bytes that are logged as so many MiB; two digits are printed."""
    hundredths = round(float(mebibytes) * 100)
    return (2 * hundredths + 1) * _MIB // 200 if hundredths else 0


@dataclass(frozen=True, slots=True)
class _BufferType:
    name: str
    address: int
    alignment: int

    def size_of(self, tensor: TensorInfo) -> int:
        """Bytes that a tensor takes here, which may be more than it has: kernels read whole blocks of rows."""
        base = _backend_functions()
        number = _type_number(tensor.type_name)
        header = GgmlTensor(type=number, name=tensor.name.encode()[:63])
        stride = base.ggml_type_size(number)
        for axis, extent in enumerate(tensor.shape):
            header.ne[axis], header.nb[axis] = extent, stride
            stride = base.ggml_row_size(number, extent) if axis == 0 else stride * extent
        size: int = base.ggml_backend_buft_get_alloc_size(self.address, ctypes.addressof(header))
        return -(-size // self.alignment) * self.alignment


def _dry_sizes(model: GgufModel, lines: Sequence[str], types: Mapping[str, _BufferType]) -> BufferSizes:
    logged = read_buffer_sizes(lines)
    weights: defaultdict[str, int] = defaultdict(int)
    experts: defaultdict[str, int] = defaultdict(int)
    for name, device in _placed_tensors(lines, logged.blocks):
        if tensor := model.tensors.get(name):
            buffers = types[device]
            (experts if EXPERT_TENSOR.match(name) else weights)[buffers.name] += buffers.size_of(tensor)
    context = defaultdict(int, logged.context)
    for device, size in _caches(lines):
        context[types[device].name] += size
    return BufferSizes(
        model=dict(weights),
        experts=dict(experts),
        context={name: size for name, size in context.items() if size},
        compute=logged.compute,
        output=logged.output,
        blocks={block: types[device].name for block, device in logged.blocks.items()},
    )


def _placed_tensors(lines: Sequence[str], blocks: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Each tensor that was asked for with its device; twice for token embeddings that are the output as well."""
    output = blocks[max(blocks)]
    unused = {match[1] for line in lines if (match := _UNUSED.match(line))}
    placed: set[tuple[str, str]] = set()
    seen: set[str] = set()
    for line in lines:
        if not (match := _TENSOR.match(line)) or match[1] in unused:
            continue
        name = match[1]
        if block := re.match(r"blk\.(\d+)\.", name):
            homes = [blocks[int(block[1])]]
        elif name in _INPUTS and name not in seen:
            homes = [HOST]
        elif name.startswith(_FIRST_LAYER):
            homes = [blocks[0]]
        elif name.startswith(_IN_EVERY_LAYER):
            homes = sorted(set(blocks.values()))
        else:
            homes = [output]
        seen.add(name)
        for home in homes:
            if (name, home) not in placed:
                placed.add((name, home))
                yield name, home


def _caches(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Each cache's bytes by device: its total is logged, and its layers are of one size."""
    layers: defaultdict[str, int] = defaultdict(int)
    for line in lines:
        if match := _CACHED_LAYER.match(line):
            layers[match[1]] += 1
        elif match := _CACHE.match(line):
            size, count = _bytes(match[1]), sum(layers.values())
            for device, number in layers.items():
                yield device, -(-size * number // count)
            layers.clear()


def _buffer_types(devices: Sequence[int]) -> dict[str, _BufferType]:
    """Default buffers by the name of the device, over llama.cpp's devices and those that are not registered."""
    base = _backend_functions()
    types: dict[str, _BufferType] = {}
    for device in (*registered_devices(), *map(device_at, devices)):
        address = base.ggml_backend_dev_buffer_type(device.address)
        types[device.name] = _BufferType(device.buffers, address, base.ggml_backend_buft_get_alignment(address))
    return types


@functools.cache
def _type_number(name: str) -> int:
    """The number of a type that a tensor has: the search ends before the end of ggml's table."""
    return next(number for number in itertools.count() if type_name(number) == name)


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_type_size": (ctypes.c_size_t, [ctypes.c_int]),
    "ggml_row_size": (ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]),
    "ggml_backend_buft_get_alignment": (ctypes.c_size_t, [ctypes.c_void_p]),
    "ggml_backend_buft_get_alloc_size": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_void_p]),
    "ggml_backend_dev_buffer_type": (ctypes.c_void_p, [ctypes.c_void_p]),
}


@functools.cache
def _backend_functions() -> ctypes.CDLL:
    return typed(ggml_base(), _SIGNATURES)
