"""Between the engine and a session's counts: checks what was read and commits one decode call at a time.

The engine says when a call begins and ends; a source of selections (today the evaluation callback of ``tap``, later
the native backend's counters) says what was selected. Nothing else knows where selections come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spark_runtime.errors import RoutingReadError
from spark_runtime.session_counts import SessionCounts
from spark_schemas.ids import Phase
from spark_schemas.model import ModelShape

__all__ = ["Collector"]

IntArray = NDArray[np.int64]
HalfArray = NDArray[np.float16]


class Collector:
    """Gathers the selections of one decode call and adds them to the current session when the call has succeeded.

    A failed or cancelled call leaves no half-counted layer behind.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.session: SessionCounts | None = None
        """Where selections go; ``None`` drops them."""
        self._index_of = {layer.block: index for index, layer in enumerate(shape.layers)}
        self._pending: list[list[IntArray]] = [[] for _ in shape.layers]
        self._hidden: dict[str, list[list[HalfArray]]] = {}

    def begin(self) -> None:
        """Start a decode call: forget what a failed one left."""
        for parts in self._pending:
            parts.clear()
        self._hidden.clear()

    def observe(self, block: int, ids: IntArray) -> None:
        """Take ``ids[token, k]`` that a block selected; raise :class:`RoutingReadError` if no router can have."""
        index = self._index_of.get(block)
        if index is None:
            raise RoutingReadError(f"block {block} selected experts, expected only {sorted(self._index_of)}")
        layer = self.shape.layers[index]
        if ids.ndim != 2 or ids.shape[1] != layer.top_k:
            raise RoutingReadError(f"block {block} selected {ids.shape} experts, expected (tokens, {layer.top_k})")
        if ids.size and not (ids.min() >= 0 and ids.max() < layer.n_experts):
            raise RoutingReadError(
                f"block {block} selected experts {ids.min()} to {ids.max()}, expected 0 to {layer.n_experts - 1}"
            )
        self._pending[index].append(ids)

    def observe_hidden(self, kind: str, block: int, rows: HalfArray) -> None:
        """Take hidden states ``rows[token, value]`` of a block; see ``hidden_kinds.HiddenKind``."""
        parts = self._hidden.setdefault(kind, [[] for _ in self.shape.layers])
        parts[self._index_of[block]].append(rows)

    def commit(self, phase: Phase, n_tokens: int) -> None:
        """End a decode call of ``n_tokens`` tokens that succeeded."""
        if self.session is None:
            self.begin()
            return
        ids = []
        for layer, parts in zip(self.shape.layers, self._pending, strict=True):
            selected = np.concatenate(parts) if parts else np.empty((0, layer.top_k), dtype=np.int64)
            fewer = len(selected) < n_tokens and phase == "prefill" and self.shape.may_route_fewer(layer)
            if len(selected) != n_tokens and not fewer:
                raise RoutingReadError(
                    f"block {layer.block} routed {len(selected)} tokens, expected {n_tokens}: counting stopped",
                    "report this model's architecture: its experts are not read correctly",
                )
            ids.append(selected)
        self.session.add(phase, n_tokens, ids, self._committed_hidden(ids, n_tokens))
        self.begin()

    def _committed_hidden(self, ids: Sequence[IntArray], n_tokens: int) -> dict[str, list[HalfArray]]:
        """Hidden states by kind and layer, of every token, or of those that a layer routed."""
        result: dict[str, list[HalfArray]] = {}
        for kind, layers in self._hidden.items():
            found = [np.concatenate(parts) if parts else np.empty((0, 0), np.float16) for parts in layers]
            for layer, rows, selected in zip(self.shape.layers, found, ids, strict=True):
                if len(rows) not in {n_tokens, len(selected)}:
                    raise RoutingReadError(
                        f"block {layer.block} gave {len(rows)} hidden states ({kind}) of {n_tokens} tokens",
                        "record without --hidden, and report this model's architecture",
                    )
            result[kind] = found
        return result
