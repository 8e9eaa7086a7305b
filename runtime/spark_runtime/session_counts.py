"""Counts of one session: selections per (phase, layer, expert), reuse distances, and optionally the decode trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spark_runtime.recency import RecencyOrder
from spark_runtime.tier_start import TierStart
from spark_schemas.histogram import LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.ids import Phase
from spark_schemas.live import LiveMisses
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

__all__ = ["SessionCounts", "TierMisses", "TokenTrace"]

IntArray = NDArray[np.int64]
HalfArray = NDArray[np.float16]

_BYTES_AN_EXPERT = 32
"""Selections in two phases, reuse distances and the order of use, 64 bits each."""
_BYTES_A_LAYER = 800
"""Four arrays and what holds them."""


@dataclass(frozen=True, slots=True)
class TierMisses:
    """Decode selections that slots counted, and how many of them found their expert absent, after one start."""

    selections: int
    cold_hits: int
    start: TierStart


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """Tokens of a session in their order."""

    decode: NDArray[np.bool_]
    """Whether each was decoded; the others are of prompts."""
    ids: list[IntArray]
    """``[token, k]`` of every layer; -1 throughout a call of which a layer did not route every token, as nothing says
    which ones it left out."""
    hidden: dict[str, list[HalfArray]] = field(default_factory=dict)
    """By kind (``hidden_kinds.HiddenKind``): ``[token, value]`` of every layer, not a number where -1 is above."""


@dataclass(frozen=True, slots=True)
class _Call:
    phase: Phase
    n_tokens: int
    ids: Sequence[IntArray]
    hidden: Mapping[str, Sequence[HalfArray]]


class SessionCounts:
    """Accumulates one session's selections, one committed decode call after another.

    Prefill and decode are counted apart. Reuse distances are kept for decode only: prefill touches nearly every expert
    and goes around the slots. A trace keeps the order of selections; it never leaves the machine.
    """

    def __init__(self, shape: ModelShape, *, keep_trace: bool = False) -> None:
        self.shape = shape
        self.tokens: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self.counts: dict[Phase, list[IntArray]] = {
            phase: [np.zeros(layer.n_experts, dtype=np.int64) for layer in shape.layers] for phase in self.tokens
        }
        self._routed: dict[Phase, list[int]] = {phase: [0] * len(shape.layers) for phase in self.tokens}
        self._recency = [RecencyOrder(layer.n_experts) for layer in shape.layers]
        self._distances = [np.zeros(layer.n_experts + 1, dtype=np.int64) for layer in shape.layers]
        self._trace: list[_Call] | None = [] if keep_trace else None
        self.trace_bytes = 0
        """What the trace takes in memory, and what :meth:`take_trace` gives back."""
        self._misses: TierMisses | None = None
        self._starts_differ = False

    @staticmethod
    def size_bytes(shape: ModelShape) -> int:
        """About what one without a trace takes in memory."""
        return sum(_BYTES_AN_EXPERT * layer.n_experts + _BYTES_A_LAYER for layer in shape.layers)

    def add(
        self,
        phase: Phase,
        n_tokens: int,
        ids: Sequence[IntArray],
        hidden: Mapping[str, Sequence[HalfArray]] | None = None,
    ) -> None:
        """Add ``ids[layer][token, k]`` of ``n_tokens`` tokens, in their order, and for a trace their hidden states."""
        self.tokens[phase] += n_tokens
        for index, selected in enumerate(ids):
            n_experts = self.shape.layers[index].n_experts
            self.counts[phase][index] += np.bincount(selected.ravel(), minlength=n_experts)
            self._routed[phase][index] += len(selected)
            if phase == "decode":
                distances = self._recency[index].observe(selected)
                self._distances[index] += np.bincount(distances.ravel(), minlength=n_experts + 1)
        if self._trace is not None:
            self._trace.append(_Call(phase, n_tokens, ids, hidden or {}))
            self.trace_bytes += sum(selected.nbytes for selected in ids)
            self.trace_bytes += sum(rows.nbytes for layers in (hidden or {}).values() for rows in layers)

    def absorb(
        self,
        phase: Phase,
        n_tokens: int,
        counts: Sequence[IntArray],
        routed: Sequence[int],
        reuse: Sequence[IntArray] | None = None,
    ) -> None:
        """Add what was counted elsewhere for ``n_tokens`` tokens: per layer selections, routed tokens, reuse distances.

        The distances must continue this session's :attr:`recency`. A trace cannot be kept this way.
        """
        if self._trace is not None:
            raise ValueError("counts have no order, expected selections for a trace")
        self.tokens[phase] += n_tokens
        for index, selected in enumerate(counts):
            self.counts[phase][index] += selected
            self._routed[phase][index] += routed[index]
            if reuse is not None:
                self._distances[index] += reuse[index]

    def note_misses(self, misses: TierMisses) -> None:
        """Add what slots missed of decode selections that were absorbed."""
        last = self._misses
        if last is not None and last.start is not misses.start:
            # They say nothing any more; and a conversation of a whole day must not hold every start it saw.
            self._starts_differ, self._misses = True, None
        if self._starts_differ:
            return
        if last is not None:
            selections, cold_hits = last.selections + misses.selections, last.cold_hits + misses.cold_hits
            misses = TierMisses(selections, cold_hits, misses.start)
        self._misses = misses

    @property
    def misses(self) -> TierMisses | None:
        """What slots missed of all decode selections; ``None`` where they did not count all of them after one start."""
        if self._misses is None:
            return None
        selections = sum(int(layer.sum()) for layer in self.counts["decode"])
        return self._misses if self._misses.selections == selections > 0 else None

    @property
    def recency(self) -> list[NDArray[np.uint32]]:
        """How recently each expert was used in decode, by layer; see ``RecencyOrder.stamps``."""
        return [order.stamps for order in self._recency]

    @recency.setter
    def recency(self, stamps: Sequence[NDArray[np.uint32]]) -> None:
        for order, values in zip(self._recency, stamps, strict=True):
            order.stamps = values

    @property
    def tokens_total(self) -> int:
        """Tokens of both phases."""
        return sum(self.tokens.values())

    def trace(self) -> list[IntArray]:
        """Decode selections ``ids[token, k]`` of every layer; raise ``ValueError`` when none were to be kept."""
        decode, ids = self.token_trace()
        return [layer[decode] for layer in ids]

    def token_trace(self) -> tuple[NDArray[np.bool_], list[IntArray]]:
        """:attr:`TokenTrace.decode` and :attr:`TokenTrace.ids` of what :meth:`take_trace` has not taken.

        Raises ``ValueError`` when no trace was to be kept.
        """
        if self._trace is None:
            raise ValueError("no trace was kept, expected SessionCounts(keep_trace=True)")
        calls = [call.phase == "decode" for call in self._trace]
        decode = np.repeat(calls, [call.n_tokens for call in self._trace]).astype(bool)
        layers = []
        for index, layer in enumerate(self.shape.layers):
            parts = [np.empty((0, layer.top_k), dtype=np.int64)]
            for call in self._trace:
                whole = len(call.ids[index]) == call.n_tokens
                parts.append(call.ids[index] if whole else np.full((call.n_tokens, layer.top_k), -1, dtype=np.int64))
            layers.append(np.concatenate(parts))
        return decode, layers

    def take_trace(self) -> TokenTrace:
        """The tokens since the last time, which are forgotten here; ``ValueError`` when no trace was to be kept."""
        decode, ids = self.token_trace()
        calls, self._trace = self._trace or [], []
        self.trace_bytes = 0
        hidden = {}
        for kind in calls[0].hidden if calls else ():
            layers = []
            for index in range(len(self.shape.layers)):
                width = max(call.hidden[kind][index].shape[1] for call in calls)
                parts = [
                    rows if len(rows) == call.n_tokens else np.full((call.n_tokens, width), np.nan, np.float16)
                    for call in calls
                    for rows in [call.hidden[kind][index]]
                ]
                layers.append(np.concatenate(parts))
            hidden[kind] = layers
        return TokenTrace(decode, ids, hidden)

    def to_histogram(self, session_hash: str, workload: str, live: LiveMisses | None = None) -> SessionHistogram | None:
        """The counts as they may be stored and uploaded, with what was measured; ``None`` before the first token."""
        if not self.tokens_total:
            return None
        return SessionHistogram(
            session_hash=session_hash,
            split=split_of(session_hash),
            workload=workload,
            prefill=self._phase("prefill"),
            decode=self._phase("decode"),
            reuse=self._reuse() if self.tokens["decode"] else None,
            live=live,
        )

    def _phase(self, phase: Phase) -> PhaseHistogram | None:
        if not self.tokens[phase]:
            return None
        layers = tuple(
            LayerCounts(block=layer.block, tokens=routed, counts=tuple(counts.tolist()))
            for layer, routed, counts in zip(self.shape.layers, self._routed[phase], self.counts[phase], strict=True)
        )
        return PhaseHistogram(tokens=self.tokens[phase], layers=layers)

    def _reuse(self) -> tuple[LayerReuse, ...]:
        return tuple(
            LayerReuse(block=layer.block, distances=tuple(distances.tolist()))
            for layer, distances in zip(self.shape.layers, self._distances, strict=True)
        )
