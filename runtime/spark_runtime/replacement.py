"""Whether experts of a running model should be placed anew: what recent traffic says, and what it would cost. Pure.

The slots adapt by themselves: what is evicted depends on decayed selections plus the profile's prior. What they cannot
do is correct the prior. So the prior is computed anew from the profile and from recent traffic, and takes the place of
the present one only where that is worth it: part of the recent traffic is held aside, on it the hot sets of both priors
are compared window by window, and the lower end of the interval must pay for the copies with a margin. Placing once is
far worse than what the slots do with it, so the difference counts only as much as misses remain: the live cold hits
over those that the present hot set alone would have.

Counts per (layer, expert) lie one layer after the other in one axis, as in :mod:`spark_runtime.votes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import Interval, LayerSizes, bootstrap_interval, greedy_slots
from spark_runtime.votes import by_layer, layer_sums

__all__ = ["Decision", "Outcome", "RecentTraffic", "Rules", "Window", "decide", "pool_slots", "shares_of"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Outcome = Literal["changed", "no_change"]


@dataclass(frozen=True, slots=True)
class Rules:
    """When to look, and what must be gained. Tokens are decoded ones."""

    window_tokens: int = 256
    """Traffic is compared in stretches of about this: their differences give the interval."""
    windows: int = 32
    """Most recent stretches that count."""
    fewest_windows: int = 8
    """Fewer say nothing yet."""
    aside_every: int = 4
    """One stretch in so many judges, and teaches nothing."""
    every_tokens: int = 2048
    """Between two looks."""
    half_life_windows: float = 8.0
    """A stretch is worth half after so many newer ones."""
    profile_windows: float = 4.0
    """Worth of the profile beside them."""
    horizon_tokens: int = 8192
    """For how long a change is counted on to help."""
    margin: float = 2.0
    """What is saved within the horizon, in bytes, must be so many times what is copied at once."""
    least_saving: float = 0.02
    """And at least this share of the present cold hits: a prior is not exchanged for noise."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of decoded tokens."""

    counts: IntArray
    """``[experts of all layers]``"""
    tokens: int
    cold_hits: int
    """As the slots counted them."""
    aside: bool


class RecentTraffic:
    """The latest stretches of decoded tokens, bounded; every ``aside_every``-th is held aside."""

    def __init__(self, n_experts: Sequence[int], rules: Rules) -> None:
        self.n_experts = tuple(n_experts)
        self.rules = rules
        self.tokens = 0
        """Ever."""
        self._closed = 0
        self._windows: deque[Window] = deque(maxlen=rules.windows)
        self._empty()

    def _empty(self) -> None:
        self._counts = np.zeros(sum(self.n_experts), dtype=np.int64)
        self._tokens = self._cold = 0

    @property
    def windows(self) -> tuple[Window, ...]:
        """Oldest first, without the one that is not full yet."""
        return tuple(self._windows)

    def add(self, counts: Sequence[IntArray], tokens: int, cold_hits: int) -> None:
        """Add what was decoded since: ``counts[layer][expert]``. A long stretch stays one."""
        self._counts += np.concatenate(counts)
        self._tokens += tokens
        self._cold += cold_hits
        self.tokens += tokens
        if self._tokens >= self.rules.window_tokens:
            self._closed += 1
            aside = self._closed % self.rules.aside_every == 0
            self._windows.append(Window(self._counts, self._tokens, self._cold, aside))
            self._empty()

    def frequencies(self, profile: Sequence[FloatArray] | None) -> list[FloatArray]:
        """A profile moved towards the stretches that are not held aside; each layer sums to one.

        Without a profile an even one stands in its place.
        """
        sizes = self.n_experts
        even = [np.full(size, 1 / size) for size in sizes]
        total = self.rules.profile_windows * np.concatenate(even if profile is None else list(profile))
        weight = np.full(len(sizes), self.rules.profile_windows)
        for age, window in enumerate(reversed(self._windows)):
            if window.aside:
                continue
            worth = 0.5 ** (age / self.rules.half_life_windows)
            sums = layer_sums(window.counts, sizes)
            seen = sums > 0
            total += np.repeat(np.divide(worth, sums, out=np.zeros(len(sizes)), where=seen), sizes) * window.counts
            weight += worth * seen
        result = total / np.repeat(weight, sizes)
        return shares_of(result, sizes)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was looked at and what came of it. Cold hits are a decoded token, over all layers."""

    outcome: Outcome
    reason: str
    tokens: int
    """Decoded since the agent started."""
    live_cold_hits: float | None
    """Measured on the stretches held aside; ``None`` before there are enough."""
    predicted_saving: Interval | None
    cost_bytes: int
    """To copy at once."""


def shares_of(values: FloatArray, sizes: Sequence[int]) -> list[FloatArray]:
    """Each layer's stretch of ``values``, positive in sum, as shares."""
    return [part / part.sum() for part in np.split(values, np.cumsum(sizes)[:-1])]


def pool_slots(
    frequency: Sequence[FloatArray], sizes: Sequence[LayerSizes], slots: Sequence[int], pools: Sequence[object]
) -> list[int]:
    """Slots a layer by frequency, with as many in each pool as it has now: ``pools[layer]`` names a layer's pool.

    No memory is allocated anew then, and no expert that stays is copied.
    """
    result = list(slots)
    for pool in dict.fromkeys(pools):
        layers = [layer for layer, name in enumerate(pools) if name == pool]
        budget = sum(slots[layer] * sizes[layer].expert_bytes for layer in layers)
        found = greedy_slots([frequency[layer] for layer in layers], [sizes[layer] for layer in layers], budget)
        for layer, count in zip(layers, found, strict=True):
            result[layer] = count
    return result


def decide(
    traffic: RecentTraffic,
    present: Sequence[FloatArray] | None,
    candidate: Sequence[FloatArray],
    sizes: Sequence[LayerSizes],
    slots: Sequence[int],
    pools: Sequence[object],
    cost_bytes: int = 0,
) -> Decision:
    """Whether ``candidate`` frequencies should take the place of the ``present`` ones (``None``: the first experts).

    ``slots`` are those of each layer now, ``pools`` as in :func:`pool_slots`, ``cost_bytes`` what the change would copy
    at once. Deterministic.
    """
    rules, windows = traffic.rules, traffic.windows
    aside = [window for window in windows if window.aside]

    def no_change(reason: str, live: float | None = None, saving: Interval | None = None) -> Decision:
        return Decision("no_change", reason, traffic.tokens, live, saving, cost_bytes)

    if len(windows) < rules.fewest_windows or len(aside) < 2:
        return no_change(f"too little traffic: {len(windows)} stretches of {rules.fewest_windows}")
    now = _cold_hits(aside, present, sizes, slots, pools, traffic.n_experts)
    then = _cold_hits(aside, candidate, sizes, slots, pools, traffic.n_experts)
    live = sum(window.cold_hits for window in aside) / sum(window.tokens for window in aside)
    if not now.mean() or not live:
        return no_change("nothing is missed", live)
    remaining = min(1.0, live / float(now.mean()))
    found = bootstrap_interval(((now - then) * remaining).tolist())
    expert_bytes = float(np.average([size.expert_bytes for size in sizes], weights=[size.top_k for size in sizes]))
    if found.low <= 0:
        return no_change("the gain cannot be told from none", live, found)
    if found.mean < rules.least_saving * live:
        return no_change(f"it would save less than {rules.least_saving:.0%} of the cold hits", live, found)
    if found.low * rules.horizon_tokens * expert_bytes < rules.margin * cost_bytes:
        return no_change("what it saves does not pay for what it copies", live, found)
    return Decision("changed", "recent traffic differs from the profile", traffic.tokens, live, found, cost_bytes)


def _cold_hits(
    windows: Sequence[Window],
    frequency: Sequence[FloatArray] | None,
    sizes: Sequence[LayerSizes],
    slots: Sequence[int],
    pools: Sequence[object],
    n_experts: Sequence[int],
) -> FloatArray:
    """Cold hits a token in each window, were the hot set never to change."""
    if frequency is None:
        hot = [np.arange(size) < count for size, count in zip(n_experts, slots, strict=True)]
    else:
        placed = pool_slots(frequency, sizes, slots, pools)
        hot = [_hottest(freq, count) for freq, count in zip(frequency, placed, strict=True)]
    return np.array(
        [
            sum(int(layer[~mask].sum()) for layer, mask in zip(by_layer(window.counts, n_experts), hot, strict=True))
            / window.tokens
            for window in windows
        ]
    )


def _hottest(frequency: FloatArray, count: int) -> NDArray[np.bool_]:
    mask = np.zeros(len(frequency), dtype=bool)
    mask[np.argsort(-frequency, kind="stable")[:count]] = True
    return mask
