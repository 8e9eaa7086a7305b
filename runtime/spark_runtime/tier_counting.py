"""A session's counts from the slots' own counters, which hold what was selected since they were last read.

Stands where a :class:`spark_runtime.collector.Collector` stands when selections come one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spark_runtime.errors import RoutingReadError
from spark_runtime.session_counts import SessionCounts, TierMisses
from spark_runtime.tier import PHASES, IntArray, Tier, TierCounters
from spark_runtime.tier_start import TierStart
from spark_schemas.ids import Phase

__all__ = ["TierCounting", "TierListener", "TierTotals"]

TierListener = Callable[[Phase, int, list[IntArray], int], None]
"""Hears of a phase's tokens, selections by layer and expert, and cold hits, on the computing thread."""


@dataclass(frozen=True, slots=True)
class TierTotals:
    """What all counted sessions together did, by phase. Never changed: a newer one takes its place."""

    tokens: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    selections: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    cold_hits: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    """Selections whose expert was not in video memory."""
    loads: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    """Experts copied from host memory."""
    bytes_moved: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    early_bytes: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    """Fetched early, by a guess; not among ``bytes_moved``."""
    early_used_bytes: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    """Of those, of experts that were selected while they were in video memory."""
    early_wasted_bytes: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    """Of those, of experts that left again before."""

    def plus(self, counters: TierCounters) -> TierTotals:
        """These and what was counted since."""

        def summed(before: dict[Phase, int], now: dict[Phase, int]) -> dict[Phase, int]:
            return {phase: before[phase] + now[phase] for phase in PHASES}

        return TierTotals(
            tokens=summed(self.tokens, {phase: max(counters.tokens[phase], default=0) for phase in PHASES}),
            selections=summed(
                self.selections, {phase: sum(int(layer.sum()) for layer in counters.counts[phase]) for phase in PHASES}
            ),
            cold_hits=summed(self.cold_hits, {phase: sum(counters.cold[phase]) for phase in PHASES}),
            loads=summed(self.loads, {phase: sum(counters.loads[phase]) for phase in PHASES}),
            bytes_moved=summed(self.bytes_moved, counters.bytes_moved),
            early_bytes=summed(self.early_bytes, counters.early_bytes),
            early_used_bytes=summed(self.early_used_bytes, counters.early_used_bytes),
            early_wasted_bytes=summed(self.early_wasted_bytes, counters.early_wasted_bytes),
        )

    def cold_hit_rate(self, phase: Phase) -> float | None:
        """Cold hits over selections; ``None`` without selections."""
        selections = self.selections[phase]
        return self.cold_hits[phase] / selections if selections else None


class TierCounting:
    """Moves counts from the tier to the current session: when another one takes its place, or when asked to."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._session: SessionCounts | None = None
        self._committed: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self._open = False
        self._start = tier.start
        self.totals = TierTotals()
        """Of all sessions, as of the last :meth:`flush`; may be read by any thread."""
        self.listener: TierListener | None = None
        """Hears what each :meth:`flush` gave a session."""

    @property
    def session(self) -> SessionCounts | None:
        """Where selections go; ``None`` drops them."""
        return self._session

    @session.setter
    def session(self, session: SessionCounts | None) -> None:
        if session is self._session:
            return
        self.flush()
        if self._session is not None:
            self._session.recency = self._tier.recency()
        self._session = session
        if session is not None:
            self._tier.set_recency(session.recency)
            self._tier.reset_counts()
            self._start = self._tier.start

    def place(self, start: TierStart) -> None:
        """Place experts anew between two calls; what was counted so far stays with the placement before.

        Raises as :meth:`Tier.place`.
        """
        self.flush()
        self._tier.place(start)
        self._start = self._tier.start

    def begin(self) -> None:
        """Start a decode call."""
        if self._open:
            self.flush()  # the call before failed
        self._open = True

    def commit(self, phase: Phase, n_tokens: int) -> None:
        """End a decode call of ``n_tokens`` tokens that succeeded."""
        self._committed[phase] += n_tokens
        self._open = False

    def flush(self) -> None:
        """Give the session what has been counted; raise :class:`RoutingReadError` if it does not add up.

        After a failed call, counts that hold a part of it are dropped as a whole: they cannot be told apart.
        """
        committed, self._committed = self._committed, dict.fromkeys(PHASES, 0)
        failed, self._open = self._open, False
        if self._session is None:
            return
        counters = self._tier.counters(reset=True)
        # Counts of before and after a new placement cannot be told apart.
        start, self._start = self._start if self._start is self._tier.start else None, self._tier.start
        self.totals = self.totals.plus(counters)
        for phase, n_tokens in committed.items():
            fault = self._fault(counters, phase, n_tokens)
            if fault is not None and not failed:
                raise RoutingReadError(fault, "report this model's architecture: its experts are not read correctly")
            if fault is None and n_tokens:
                reuse = counters.reuse if phase == "decode" else None
                self._session.absorb(phase, n_tokens, counters.counts[phase], counters.tokens[phase], reuse)
                if self.listener is not None:
                    self.listener(phase, n_tokens, counters.counts[phase], sum(counters.cold[phase]))
                if phase == "decode" and start is not None:
                    selections = sum(int(layer.sum()) for layer in counters.counts[phase])
                    self._session.note_misses(TierMisses(selections, sum(counters.cold[phase]), start))

    def _fault(self, counters: TierCounters, phase: Phase, n_tokens: int) -> str | None:
        shape = self._tier.shape
        for layer, routed, counts in zip(shape.layers, counters.tokens[phase], counters.counts[phase], strict=True):
            fewer = routed < n_tokens and phase == "prefill" and shape.may_route_fewer(layer)
            if routed != n_tokens and not fewer:
                return f"block {layer.block} routed {routed} tokens, expected {n_tokens}: counting stopped"
            if int(counts.sum()) != routed * layer.top_k:
                return f"block {layer.block} selected {int(counts.sum())} experts, expected {routed} x {layer.top_k}"
        return None
