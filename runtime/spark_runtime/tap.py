"""Reading the router's selections while llama.cpp computes, through its evaluation callback.

The callback watches ``MUL_MAT_ID``, the multiplication with selected experts, and reads the ids it is given. That is
what really is multiplied, for every architecture, under whatever names a model builder gives its tensors.

Where the callback looks, llama.cpp cuts its graph, and kernels that it would fuse across the cut run apart, with other
rounding: a CUDA build fuses a layer's up and gate multiplications with their activation. So the cut is made just
before a layer's first multiplication with experts, where nothing is fused: its predecessor is asked for, and the ids
are read when the multiplication itself is announced. Which node precedes it is learned from the graph, by name.

This is the form in Python, for machines without a C++ compiler; ``native_tap`` is the quick one.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spark_runtime.collector import Collector
from spark_runtime.errors import RoutingReadError
from spark_runtime.ggml import GgmlTensor, ggml_base, op_number

__all__ = ["EVAL_CALLBACK", "EvalTap", "Tap", "malformed_ids"]

EVAL_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
_EXPERT_WEIGHTS = re.compile(rb"^blk\.(\d+)\.ffn_(up|gate|gate_up|down)_exps\.weight$")
_OP_OFFSET = GgmlTensor.op.offset
_NAME_OFFSET = GgmlTensor.name.offset
_NAME = ctypes.c_char * GgmlTensor.name.size
_INT32_TYPE, _INT32_BYTES = 26, 4


class Tap(Protocol):
    """What a context needs of a source of selections."""

    @property
    def callback(self) -> Any:
        """A C function for ``llama_context_params.cb_eval``."""

    @property
    def user_data(self) -> int | None:
        """What it is given with each call."""

    def check(self) -> None:
        """End a decode call: everything it selected has been handed on, or what went wrong is raised."""


def malformed_ids(extent: Sequence[int], strides: Sequence[int]) -> RoutingReadError:
    """The error for ids that are not rows of int32: extents in elements, strides in bytes, fastest dimension first."""
    return RoutingReadError(
        f"selected ids have extent {list(extent)} and strides {list(strides)}, expected rows of int32",
        "report this model's architecture: its experts are not read correctly",
    )


class EvalTap:
    """A callback for ``llama_context_params.cb_eval`` that feeds a collector.

    The object must outlive the context: ``callback`` is the only reference that keeps the C function alive. An error
    inside the callback stops the computation and is raised by :meth:`check` afterwards, because an exception cannot
    travel through C.
    """

    def __init__(self, collector: Collector) -> None:
        self.callback = EVAL_CALLBACK(self._call)
        self.user_data: int | None = None
        self._collector = collector
        self._mul_mat_id = op_number("MUL_MAT_ID")
        self._read = ggml_base().ggml_backend_tensor_get
        self._n_bytes = ggml_base().ggml_nbytes
        # Weights keep their address for the model's life, so a name is parsed once: address -> (block, role).
        self._weights: dict[int, tuple[int, bytes] | None] = {}
        self._cuts: dict[bytes, int] = {}
        """Name of the node before a layer's experts -> block; -1 for a name that several layers share."""
        self._cut_ops: set[int] = set()
        self._learning = False
        self._previous = 0
        """Address of the node asked about last."""
        self._computed = 0
        """Address of the node up to which everything has just been computed, 0 after the next one was asked about."""
        self._seen_ids = 0
        """Address of the ids of the layer in progress: its other multiplications read the same ones."""
        self._error: BaseException | None = None

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Inside the block graphs run uncut: nothing is counted, and what precedes each layer's experts is learned."""
        self._learning = True
        try:
            yield
        finally:
            self._learning = False

    def check(self) -> None:
        """Raise what went wrong inside the callback since the last check."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _call(self, address: int, ask: bool, _data: int | None) -> bool:
        # Called for every node of every graph, so what is no concern of ours leaves at once.
        try:
            op = ctypes.c_int.from_address(address + _OP_OFFSET).value
            if not ask:
                self._computed = address
                if op == self._mul_mat_id:
                    self._observe_late(GgmlTensor.from_address(address))
                return True
            previous, self._previous = self._previous, address
            # Good for the very next node only: addresses come back in later graphs.
            computed, self._computed = self._computed, 0
            if op == self._mul_mat_id:
                return self._announce(GgmlTensor.from_address(address), previous, ready=computed == previous)
            return op in self._cut_ops and not self._learning and self._is_cut(address)
        except BaseException as error:
            # Whatever it is, ctypes would print it and go on.
            self._error = error
            return False

    def _is_cut(self, address: int) -> bool:
        return self._cuts.get(_NAME.from_address(address + _NAME_OFFSET).value, -1) >= 0

    def _announce(self, node: GgmlTensor, previous: int, *, ready: bool) -> bool:
        """Take note of a multiplication; ``ready``: all before it has been computed. Whether to cut after it."""
        known = self._weights_of(node.src[0])
        if known is None:
            return False
        block, role = known
        ids = node.src[2]
        if role == b"down":
            self._seen_ids = 0  # the layer's last multiplication; the next layer's ids may lie at the same address
            return False
        if ids == self._seen_ids:
            return False
        self._seen_ids = ids
        if ready and not self._learning:
            self._collector.observe(block, self._ids(ids))
            return False
        self._learn(block, previous)
        return not self._learning

    def _observe_late(self, node: GgmlTensor) -> None:
        """Read the ids of a multiplication that nothing had been known to precede."""
        known = self._weights_of(node.src[0])
        if known is not None:
            self._collector.observe(known[0], self._ids(node.src[2]))

    def _learn(self, block: int, previous: int) -> None:
        if not previous:
            return
        node = GgmlTensor.from_address(previous)
        if self._cuts.setdefault(node.name, block) != block:
            self._cuts[node.name] = -1
        self._cut_ops.add(node.op)

    def _weights_of(self, address: int) -> tuple[int, bytes] | None:
        """Block and role of a weight; ``None`` for what is not a layer's routed experts."""
        if address not in self._weights:
            match = _EXPERT_WEIGHTS.match(GgmlTensor.from_address(address).name)
            self._weights[address] = (int(match[1]), match[2]) if match else None
        return self._weights[address]

    def _ids(self, address: int) -> NDArray[np.int64]:
        """Copy ``ids[token, k]`` out of a tensor that is usually a strided view of all experts in order of score."""
        tensor = GgmlTensor.from_address(address)
        top_k, n_tokens, row = tensor.ne[0], tensor.ne[1], tensor.nb[1]
        span = self._n_bytes(address)
        if n_tokens == 0:
            return np.empty((0, top_k), dtype=np.int64)
        strided = tensor.type == _INT32_TYPE and span == (n_tokens - 1) * row + top_k * _INT32_BYTES
        if not strided or tensor.ne[2] != 1 or tensor.ne[3] != 1:
            raise malformed_ids(tensor.ne, tensor.nb)
        raw = np.empty(span // _INT32_BYTES, dtype=np.int32)
        self._read(address, raw.ctypes.data, 0, span)
        rows = np.lib.stride_tricks.as_strided(raw, (n_tokens, top_k), (row, _INT32_BYTES))
        return rows.astype(np.int64)
