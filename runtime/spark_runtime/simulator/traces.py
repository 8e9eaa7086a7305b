"""Token-level selections of many sessions, as the simulator takes them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.simulator.lanes import Lanes

__all__ = ["LayerClass", "Trace"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Layers that may share slots: as many experts and selections each, and experts of the same bytes."""

    layers: tuple[int, ...]
    """Places in :attr:`Trace.ids`."""
    n_experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions one after the other; ``ids[layer]`` is ``[token, k]`` in the router's order."""

    ids: tuple[NDArray[np.integer], ...]
    n_experts: tuple[int, ...]
    offsets: IntArray
    """``[session + 1]``: where each session's tokens start and end."""
    decode: NDArray[np.bool_] | None = None
    """Per token whether it was decoded; ``None``: all were."""
    expert_bytes: tuple[int, ...] | None = None
    """Per layer, where known; layers of different bytes share no slots."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for what is no trace, with what was found."""
        if not self.ids or len(self.ids) != len(self.n_experts):
            raise ValueError(f"{len(self.ids)} layers and {len(self.n_experts)} numbers of experts, expected as many")
        n_tokens = int(self.offsets[-1]) if len(self.offsets) else -1
        if n_tokens < 0 or self.offsets[0] != 0 or (np.diff(self.offsets) < 0).any():
            raise ValueError("its sessions do not add up to its tokens")
        for layer, (ids, n_experts) in enumerate(zip(self.ids, self.n_experts, strict=True)):
            if ids.ndim != 2 or len(ids) != n_tokens or not 1 <= ids.shape[1] <= n_experts:
                raise ValueError(f"layer {layer}: selections {ids.shape} of {n_experts} experts over {n_tokens} tokens")
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < n_experts:
                bad = ids[(ids < 0) | (ids >= n_experts)].flat[0]
                raise ValueError(f"layer {layer}: expert {bad}, expected 0 to {n_experts - 1}")
            ordered = np.sort(ids, axis=1)
            if (ordered[:, 1:] == ordered[:, :-1]).any():
                raise ValueError(f"layer {layer}: a token selects one expert twice")
        if self.decode is not None and len(self.decode) != n_tokens:
            raise ValueError(f"{len(self.decode)} phases of {n_tokens} tokens")

    @property
    def n_sessions(self) -> int:
        """Sessions, also those without tokens."""
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        """Tokens of all sessions and phases."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> IntArray:
        """Tokens of each session."""
        return np.diff(self.offsets)

    @property
    def selections_per_token(self) -> int:
        """Selections over all layers."""
        return sum(ids.shape[1] for ids in self.ids)

    def classes(self) -> list[LayerClass]:
        """Layers by what they may share, each class in the layers' order."""
        found: dict[tuple[int, int, int], list[int]] = {}
        sizes = self.expert_bytes or (0,) * len(self.ids)
        for layer, (ids, n_experts, size) in enumerate(zip(self.ids, self.n_experts, sizes, strict=True)):
            found.setdefault((n_experts, ids.shape[1], size), []).append(layer)
        return [LayerClass(tuple(layers), n_experts, top_k) for (n_experts, top_k, _), layers in found.items()]

    def counts(self, session: int, *, decode: bool = True) -> list[IntArray]:
        """Selections per expert of each layer in one session, of one phase where phases are known."""
        part = slice(int(self.offsets[session]), int(self.offsets[session + 1]))
        kept = slice(None) if self.decode is None else self.decode[part] == decode
        return [
            np.bincount(ids[part][kept].ravel(), minlength=n_experts)
            for ids, n_experts in zip(self.ids, self.n_experts, strict=True)
        ]

    def select(self, sessions: Sequence[int] | IntArray, *, decode: bool | None = None) -> Trace:
        """Some sessions, of both phases or of one."""
        starts, ends = self.offsets[:-1], self.offsets[1:]
        rows = [np.arange(starts[session], ends[session]) for session in sessions]
        if decode is not None and self.decode is not None:
            rows = [part[self.decode[part] == decode] for part in rows]
        taken = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in rows])]).astype(np.int64)
        return Trace(
            tuple(ids[taken] for ids in self.ids),
            self.n_experts,
            offsets,
            None if self.decode is None else self.decode[taken],
            self.expert_bytes,
        )

    def calls(self, batch: int = 1, prompt_batch: int = 512) -> list[IntArray]:
        """Tokens of each session's calls: so many at once in decode, so many in prefill, never both in one."""
        result = []
        for start, end in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            phases = np.ones(end - start, dtype=bool) if self.decode is None else self.decode[start:end]
            edges = [0, *(np.flatnonzero(np.diff(phases)) + 1).tolist(), end - start]
            sizes: list[int] = []
            for first, last in itertools.pairwise(edges):
                if first < last:
                    size = batch if phases[first] else prompt_batch
                    whole, rest = divmod(last - first, size)
                    sizes += [size] * whole + ([rest] if rest else [])
            result.append(np.array(sizes, dtype=np.int64))
        return result

    def pooled(self, of: LayerClass, calls: Sequence[IntArray]) -> Lanes:
        """A lane for each session, in which a class's layers share their slots."""
        return Lanes(np.stack([self.ids[layer] for layer in of.layers], axis=1), self.offsets[:-1], calls)

    def layered(self, of: LayerClass, calls: Sequence[IntArray]) -> Lanes:
        """A lane for each layer and session of a class, layer after layer."""
        ids = np.concatenate([self.ids[layer] for layer in of.layers])[:, None]
        first = np.concatenate([place * self.n_tokens + self.offsets[:-1] for place in range(len(of.layers))])
        return Lanes(ids, first, [*calls] * len(of.layers))
