"""Reading hidden states beside the selections: what a layer starts from, and what its router reads.

Both are found by the weights they meet, whatever a model builder calls them: a block's input is what its attention norm
normalises, and a router reads what ``ffn_gate_inp`` is multiplied with. The graph is cut after those two operations;
what they read is still there then, as the residual is added later and a product never overwrites its factors.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spark_runtime.collector import Collector
from spark_runtime.errors import RoutingReadError, UnsupportedModelError
from spark_runtime.ggml import GgmlTensor, op_number
from spark_runtime.hidden_kinds import HIDDEN_KINDS, HiddenKind
from spark_runtime.tap import EvalTap

__all__ = ["MOST_HIDDEN", "HiddenTap"]

MOST_HIDDEN = float(np.finfo(np.float16).max)
"""Larger values are kept as this: float16 has no others."""
_WEIGHTS: dict[HiddenKind, re.Pattern[bytes]] = {
    "input": re.compile(rb"^blk\.(\d+)\.attn_norm\.weight$"),
    "router": re.compile(rb"^blk\.(\d+)\.ffn_gate_inp\.weight$"),
}
_WHAT: dict[HiddenKind, str] = {
    "input": "a block's input before an attention norm",
    "router": "what the router reads",
}
_FLOAT32_TYPE, _FLOAT32_BYTES = 0, 4
_OP_OFFSET = GgmlTensor.op.offset


class _Source(NamedTuple):
    kind: HiddenKind
    block: int
    address: int
    """Of the tensor that holds the hidden states."""


class HiddenTap(EvalTap):
    """A callback that feeds a collector with selections and with hidden states of the blocks that have experts."""

    def __init__(self, collector: Collector, kinds: Collection[HiddenKind]) -> None:
        super().__init__(collector)
        self.widths: dict[HiddenKind, list[int]] = {}
        """Values of a token by layer, once the graph has been learned and checked."""
        self._kinds = [kind for kind in HIDDEN_KINDS if kind in kinds]
        self._blocks = [layer.block for layer in collector.shape.layers]
        self._architecture = collector.shape.architecture
        self._mul, self._mul_mat = op_number("MUL"), op_number("MUL_MAT")
        self._known: dict[int, tuple[HiddenKind, int] | None] = {}
        """Address of a weight -> what it meets; weights keep their address for the model's life."""
        self._learned: dict[tuple[HiddenKind, int], int] = {}
        """Width by kind and block."""

    def check_learned(self) -> None:
        """Raise :class:`UnsupportedModelError` when the graph has no such tensor for some layer."""
        for kind in self._kinds:
            missing = [block for block in self._blocks if (kind, block) not in self._learned]
            if missing:
                raise UnsupportedModelError(
                    f"hidden states of {self._architecture} cannot be kept: {_WHAT[kind]} was not found in block "
                    f"{missing[0]}",
                    "record without --hidden: selections are read from every architecture",
                )
            self.widths[kind] = [self._learned[kind, block] for block in self._blocks]

    def _call(self, address: int, ask: bool, data: int | None) -> bool:
        wanted = super()._call(address, ask, data)
        try:
            found = self._source(address)
            if found is None:
                return wanted
            if self._learning:
                self._learned[found.kind, found.block] = GgmlTensor.from_address(found.address).ne[0]
                return wanted
            if not ask:
                self._collector.observe_hidden(found.kind, found.block, self._rows(found))
        except BaseException as error:
            # Whatever it is, ctypes would print it and go on.
            self._error = error
            return False
        return ask or wanted

    def _source(self, address: int) -> _Source | None:
        """Which hidden states a node meets its weight with."""
        # Called for every node of every graph, so what is no concern of ours leaves at once.
        op = ctypes.c_int.from_address(address + _OP_OFFSET).value
        if op not in (self._mul, self._mul_mat):
            return None
        node = GgmlTensor.from_address(address)
        for place in (0, 1):
            known = self._met_by(node.src[place])
            if known is None:
                continue
            met = node.src[1 - place]
            if op == self._mul_mat and known[0] == "router":
                return _Source(*known, met)
            if op == self._mul and known[0] == "input":
                return _Source(*known, GgmlTensor.from_address(met).src[0])
        return None

    def _met_by(self, address: int | None) -> tuple[HiddenKind, int] | None:
        if not address:
            return None
        if address not in self._known:
            name = GgmlTensor.from_address(address).name
            matches = [(kind, _WEIGHTS[kind].match(name)) for kind in self._kinds]
            found = [(kind, int(match[1])) for kind, match in matches if match and int(match[1]) in self._blocks]
            self._known[address] = found[0] if found else None
        return self._known[address]

    def _rows(self, source: _Source) -> NDArray[np.float16]:
        """Copy ``[token, value]`` out of a tensor of float32 rows."""
        tensor = GgmlTensor.from_address(source.address)
        width, rows = tensor.ne[0], prod(tensor.ne[1:])
        n_bytes = width * rows * _FLOAT32_BYTES
        if tensor.type != _FLOAT32_TYPE or self._n_bytes(source.address) != n_bytes or not tensor.data:
            raise RoutingReadError(
                f"hidden states of block {source.block} have type {tensor.type}, extent {list(tensor.ne)} and strides "
                f"{list(tensor.nb)}, expected rows of float32",
                "record without --hidden, and report this model's architecture",
            )
        values = np.empty((rows, width), dtype=np.float32)
        if n_bytes:
            self._read(source.address, values.ctypes.data, 0, n_bytes)
        if np.isnan(values).any():
            raise RoutingReadError(f"hidden states of block {source.block} are not numbers", "the model may be damaged")
        return np.clip(values, -MOST_HIDDEN, MOST_HIDDEN).astype(np.float16)
