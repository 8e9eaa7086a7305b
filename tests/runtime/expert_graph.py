"""A graph of products with experts through the proxy device, without a model: it can ask for what no router would.

llama.cpp only runs routers that choose among their experts, so a broken one is made here from ggml's own functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spark_runtime.ggml import ggml_base
from spark_runtime.native_tier import DeviceTier, proxy_devices, set_tiering, take_tiers, tier_library

__all__ = ["ExpertGraph", "expert_graph"]

_F32, _I32 = 0, 26
_ROWS, _COLUMNS = 8, 32
_OVERHEAD = 1 << 20
_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "ggml_free": (None, [_P]),
    "ggml_new_tensor_2d": (_P, [_P, ctypes.c_int, _I64, _I64]),
    "ggml_new_tensor_3d": (_P, [_P, ctypes.c_int, _I64, _I64, _I64]),
    "ggml_set_name": (_P, [_P, ctypes.c_char_p]),
    "ggml_mul_mat_id": (_P, [_P, _P, _P, _P]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_dev_init": (_P, [_P, ctypes.c_char_p]),
    "ggml_backend_dev_buffer_type": (_P, [_P]),
    "ggml_backend_dev_backend_reg": (_P, [_P]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, ctypes.c_char_p]),
    "ggml_backend_free": (None, [_P]),
    "ggml_backend_tensor_set": (None, [_P, _P, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_backend_graph_compute": (ctypes.c_int, [_P, _P]),
}


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


def _ggml() -> ctypes.CDLL:
    tier_library()
    # A handle of its own, so that nobody else's argument types change.
    library = ctypes.CDLL(str(Path(ggml_base()._name)))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.ggml_init.restype, library.ggml_init.argtypes = _P, [_InitParams]
    library.ggml_backend_tensor_get.argtypes = [_P, _P, ctypes.c_size_t, ctypes.c_size_t]
    return library


@dataclass
class ExpertGraph:
    """One product a block: each token's input by the experts that ``ids`` name."""

    ggml: ctypes.CDLL
    tier: DeviceTier
    weights: list[np.ndarray]
    backend: int
    graph: int
    ids: list[int]
    outputs: list[int]
    inputs: list[np.ndarray]
    shape: tuple[int, int]
    keep: list[np.ndarray] = field(default_factory=list)

    def compute(self, ids: Sequence[np.ndarray]) -> int:
        """Run once with ``ids[block][token, k]``; ggml's status, 0 for success."""
        for tensor, values in zip(self.ids, ids, strict=True):
            _set(self.ggml, tensor, np.ascontiguousarray(values, dtype=np.int32))
        return int(self.ggml.ggml_backend_graph_compute(self.backend, self.graph))

    def results(self) -> list[np.ndarray]:
        """What each block's product is, ``[token, k, row]``."""
        found = []
        for tensor in self.outputs:
            values = np.empty((*self.shape, _ROWS), dtype=np.float32)
            self.ggml.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
            found.append(values)
        return found

    def expected(self, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The same by numpy."""
        return [
            np.einsum("tkrc,tc->tkr", weights[chosen], inputs)
            for weights, chosen, inputs in zip(self.weights, ids, self.inputs, strict=True)
        ]


def _set(ggml: ctypes.CDLL, tensor: int, values: np.ndarray) -> None:
    ggml.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)


@contextmanager
def expert_graph(
    blocks: int = 2, n_experts: int = 16, top_k: int = 2, tokens: int = 1, seed: int = 0
) -> Iterator[ExpertGraph]:
    """Weights in the first proxy's tier buffer, everything else in its usual one; freed at the end."""
    ggml, rng = _ggml(), np.random.default_rng(seed)
    [device] = proxy_devices(1)
    set_tiering(1, on=True)
    with ExitStack() as stack:

        def context() -> int:
            made = ggml.ggml_init(_InitParams(_OVERHEAD, None, True))
            stack.callback(ggml.ggml_free, made)
            return int(made)

        def allocate(of: int, buffer_type: int) -> None:
            buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(of, buffer_type)
            assert buffer
            stack.callback(ggml.ggml_backend_buffer_free, buffer)

        experts, rest = context(), context()
        tensors = []
        for block in range(blocks):
            tensor = ggml.ggml_new_tensor_3d(experts, _F32, _COLUMNS, _ROWS, n_experts)
            ggml.ggml_set_name(tensor, f"blk.{block}.ffn_up_exps.weight".encode())
            tensors.append(tensor)
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(
            ggml.ggml_backend_reg_get_proc_address(
                ggml.ggml_backend_dev_backend_reg(device), b"ggml_backend_dev_get_extra_bufts"
            )
        )
        allocate(experts, extra(device)[0])
        [tier] = take_tiers(1)
        weights = [rng.standard_normal((n_experts, _ROWS, _COLUMNS)).astype(np.float32) for _ in tensors]
        inputs = [rng.standard_normal((tokens, _COLUMNS)).astype(np.float32) for _ in tensors]
        graph = ggml.ggml_new_graph(rest)
        ids, sources, outputs = [], [], []
        for tensor in tensors:
            sources.append(ggml.ggml_new_tensor_3d(rest, _F32, _COLUMNS, 1, tokens))
            ids.append(ggml.ggml_new_tensor_2d(rest, _I32, top_k, tokens))
            outputs.append(ggml.ggml_mul_mat_id(rest, tensor, sources[-1], ids[-1]))
            ggml.ggml_build_forward_expand(graph, outputs[-1])
        allocate(rest, ggml.ggml_backend_dev_buffer_type(device))
        for tensor, values in zip([*tensors, *sources], [*weights, *inputs], strict=True):
            _set(ggml, tensor, values)
        backend = ggml.ggml_backend_dev_init(device, None)
        stack.callback(ggml.ggml_backend_free, backend)
        yield ExpertGraph(ggml, tier, weights, backend, graph, ids, outputs, inputs, (tokens, top_k))
