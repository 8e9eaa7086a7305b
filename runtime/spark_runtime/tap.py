"""Reading the router's selections while llama.cpp computes, through its evaluation callback.

The callback watches ``MUL_MAT_ID``, the multiplication with selected experts, and reads the ids it was given. That is
what really was multiplied, for every architecture, under whatever names a model builder gives its tensors.
"""

from __future__ import annotations

import ctypes
import re

import numpy as np
from numpy.typing import NDArray

from spark_runtime.collector import Collector
from spark_runtime.errors import RoutingReadError
from spark_runtime.ggml import GgmlTensor, ggml_base, op_number

__all__ = ["EvalTap"]

EVAL_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
# One multiplication a layer is enough: every expert that is chosen multiplies with its (fused) up projection once.
_WATCHED = re.compile(rb"^blk\.(\d+)\.ffn_(?:up|gate_up)_exps\.weight$")
_OP_OFFSET = GgmlTensor.op.offset
_INT32_TYPE, _INT32_BYTES = 26, 4


class EvalTap:
    """A callback for ``llama_context_params.cb_eval`` that feeds a collector.

    The object must outlive the context: ``callback`` is the only reference that keeps the C function alive. An error
    inside the callback stops the computation and is raised by :meth:`check` afterwards, because an exception cannot
    travel through C.
    """

    def __init__(self, collector: Collector) -> None:
        self.callback = EVAL_CALLBACK(self._call)
        self._collector = collector
        self._op = op_number("MUL_MAT_ID")
        self._read = ggml_base().ggml_backend_tensor_get
        self._n_bytes = ggml_base().ggml_nbytes
        # Weights keep their address for the model's life, so a name is parsed once: address -> block, -1 unwatched.
        self._blocks: dict[int, int] = {}
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise what went wrong inside the callback since the last check."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _call(self, address: int, ask: bool, _data: int | None) -> bool:
        # Called for every node of every graph: leave at once unless it is a multiplication with experts.
        if ctypes.c_int.from_address(address + _OP_OFFSET).value != self._op:
            return False
        try:
            tensor = GgmlTensor.from_address(address)
            block = self._block_of(tensor.src[0])
            if ask:
                return block >= 0
            self._collector.observe(block, self._ids(tensor.src[2]))
        except BaseException as error:
            # Whatever it is, ctypes would print it and go on.
            self._error = error
            return False
        return True

    def _block_of(self, weights: int) -> int:
        block = self._blocks.get(weights)
        if block is None:
            match = _WATCHED.match(GgmlTensor.from_address(weights).name)
            block = self._blocks[weights] = int(match[1]) if match else -1
        return block

    def _ids(self, address: int) -> NDArray[np.int64]:
        """Copy ``ids[token, k]`` out of a tensor that is usually a strided view of all experts in order of score."""
        tensor = GgmlTensor.from_address(address)
        top_k, n_tokens, row = tensor.ne[0], tensor.ne[1], tensor.nb[1]
        span = self._n_bytes(address)
        if n_tokens == 0:
            return np.empty((0, top_k), dtype=np.int64)
        strided = tensor.type == _INT32_TYPE and span == (n_tokens - 1) * row + top_k * _INT32_BYTES
        if not strided or tensor.ne[2] != 1 or tensor.ne[3] != 1:
            raise RoutingReadError(
                f"selected ids have extent {list(tensor.ne)} and strides {list(tensor.nb)}, expected rows of int32",
                "report this model's architecture: its experts are not read correctly",
            )
        raw = np.empty(span // _INT32_BYTES, dtype=np.int32)
        self._read(address, raw.ctypes.data, 0, span)
        rows = np.lib.stride_tricks.as_strided(raw, (n_tokens, top_k), (row, _INT32_BYTES))
        return rows.astype(np.int64)
