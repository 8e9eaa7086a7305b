"""The runtime's slot policy over many lanes at once: the same decisions as ``native/slots.cpp``, to the last bit.

A score is a 32-bit number, decayed through the same two tables. Within a call no score changes, so scores are compared
through one key an expert: whether this step selected it, its score's bits (which order positive floats as they are),
and its stamp. The lowest key leaves; ties go to the lower entry, as ``argmin`` gives them. Scores of layers that the
call has not come to yet count double, which keeps their order among themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.simulator.early import EarlyCopies, EarlyTable, Guessed, turns
from spark_runtime.simulator.lanes import Lanes, Run

__all__ = ["WAITING_DOUBLINGS", "Keys", "PoolStarts", "Replayed", "replay_pools"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
_KeyArray = NDArray[np.uint64]

MAX_SLOT_TOKENS = 8
"""Larger calls go around the slots (``native/tier.h``)."""
WAITING_DOUBLINGS = 1
"""What the runtime does."""
MAX_WAITING_DOUBLINGS = 64
_DECAY_STEP = 256
_NEVER = np.uint64(2**64 - 1)
_TOUCHED = np.uint64(2**63)
_EXPONENT = np.uint64(2**55)
"""The lowest bit of the exponent of a key's score: added to it, the score is doubled."""
_SCORE = np.uint64((2**31 - 1) << 32)
"""The bits of a key that are its score."""


@dataclass(frozen=True, slots=True)
class PoolStarts:
    """How the pool of every lane starts; a pool's layers have the same number of experts and the same top-k."""

    order: IntArray
    """``[lane, layer, expert]``: all ids, hottest first; the first ``slots`` are resident."""
    prior: FloatArray
    """``[lane, layer, expert]``: finite, from 0 on, in selections."""
    slots: IntArray
    """``[lane, layer]``"""
    pinned: IntArray
    """``[lane, layer]``: so many of the first of ``order`` never leave."""

    def take(self, lanes: IntArray) -> PoolStarts:
        """The starts of some lanes."""
        return PoolStarts(self.order[lanes], self.prior[lanes], self.slots[lanes], self.pinned[lanes])

    def check(self, top_k: int) -> None:
        """Raise ``ValueError`` for a pool that the runtime would refuse too, but for its floor of ``2 * top_k``."""
        n_experts = self.order.shape[2]
        if not 1 <= top_k <= n_experts:
            raise ValueError(f"top_k {top_k}, expected 1 to {n_experts}")
        if (self.slots < top_k).any() or (self.slots > n_experts).any():
            bad = self.slots[(self.slots < top_k) | (self.slots > n_experts)][0]
            raise ValueError(f"{bad} slots, expected at least top_k = {top_k} and at most {n_experts}")
        if (self.pinned < 0).any() or (self.pinned > self.slots).any():
            raise ValueError("pinned experts, expected 0 to the slots")
        if not (np.isfinite(self.prior) & (self.prior >= 0)).all():
            raise ValueError("priors, expected finite numbers from 0 on")
        if (np.sort(self.order, axis=2) != np.arange(n_experts)).any():
            raise ValueError("an order, expected every expert once")
        movable = self.slots < n_experts
        if (movable & (_capacity(self, top_k) < top_k)).any():
            raise ValueError(f"pinned experts leave fewer than top_k = {top_k} slots for the rest")


@dataclass(frozen=True, slots=True)
class Replayed:
    """Per token, lane after lane."""

    cold: NDArray[np.uint32]
    """``[token, layer]``: selections that found no slot."""
    loads: NDArray[np.uint32]
    """``[token, layer]``: experts copied for the call that starts with this token, without those fetched early."""
    early: EarlyCopies | None = None
    """``None`` where nothing may be fetched early."""


def replay_pools(
    lanes: Lanes,
    starts: PoolStarts,
    decay: float,
    waiting_doublings: int = WAITING_DOUBLINGS,
    *,
    foreseen: bool = False,
    guessed: Guessed | None = None,
) -> Replayed:
    """Replay every lane through its pool, with experts fetched early where something is ``guessed``.

    Layers of one pool share its slots down to their floor of ``2 * top_k``; give each layer a lane of its own for slots
    that are not shared. So often are the scores of layers that a call has not come to yet doubled, while a slot is
    looked for: their routers may still ask for what would leave. The runtime doubles them once. ``foreseen`` spares
    what they will ask for, which nothing that runs can know. Raises ``ValueError`` for what makes no sense.
    """
    if guessed is not None and foreseen:
        raise ValueError("what is foreseen needs no guesses")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay {decay}, expected 0 to 1")
    if not 0 <= waiting_doublings <= MAX_WAITING_DOUBLINGS:
        raise ValueError(f"{waiting_doublings} doublings, expected 0 to {MAX_WAITING_DOUBLINGS}")
    n_layers, top_k = lanes.ids.shape[1:]
    starts.check(top_k)
    lengths = lanes.lengths
    total = int(lengths.sum())
    shape = (total, n_layers)
    early = None if guessed is None else EarlyCopies.zeros(shape)
    if guessed is not None and guessed.guesses.counts.shape != shape:
        raise ValueError(f"guesses {guessed.guesses.counts.shape}, expected {shape}")
    result = Replayed(np.zeros(shape, np.uint32), np.zeros(shape, np.uint32), early)
    begins = None if guessed is None else guessed.guesses.begins
    weights = _weights(decay, int(lengths.max(initial=0)) + 2)
    for chunk in lanes.chunks(n_layers * starts.order.shape[2]):
        pools = _Pools(starts.take(chunk), top_k, weights, waiting_doublings, foreseen=foreseen)
        if guessed is not None and begins is not None:
            pools.early = EarlyTable(guessed, begins, pools.resident.shape)
        for run in lanes.runs(chunk):
            pools.call(run, result)
    return result


def _weights(decay: float, n: int) -> NDArray[np.float32]:
    """What a selection is worth after each age, tokens, as the runtime's two tables give it."""
    exact = float(np.float32(decay))
    low = np.array([exact**age for age in range(_DECAY_STEP)], dtype=np.float32)
    high = np.array([exact ** (age * _DECAY_STEP) for age in range(_DECAY_STEP)], dtype=np.float32)
    ages = np.arange(n)
    return low[ages % _DECAY_STEP] * high[np.minimum(ages // _DECAY_STEP, _DECAY_STEP - 1)]


def _capacity(starts: PoolStarts, top_k: int) -> IntArray:
    """``[lane, layer]``: different experts of one call that find slots, whatever the other layers hold."""
    kept = np.maximum(_floor(starts, top_k), starts.pinned)
    others = kept.sum(axis=1, keepdims=True) - kept
    free: IntArray = np.maximum(starts.slots.sum(axis=1, keepdims=True) - others - starts.pinned, 0)
    return free


def _floor(starts: PoolStarts, top_k: int) -> IntArray:
    return np.minimum(starts.slots, min(2 * top_k, starts.order.shape[2]))


class _Pools:
    """The tables of a chunk's lanes; an entry is a layer's expert."""

    def __init__(
        self,
        starts: PoolStarts,
        top_k: int,
        weights: NDArray[np.float32],
        waiting_doublings: int,
        *,
        foreseen: bool,
    ) -> None:
        n_lanes, self.n_layers, self.n_experts = starts.order.shape
        self.top_k = top_k
        self.weights = weights
        self.foreseen = foreseen
        self.waiting_doublings = waiting_doublings
        n_entries = self.n_layers * self.n_experts
        rank = np.argsort(starts.order, axis=2, kind="stable")
        shape = (n_lanes, n_entries)
        self.resident = (rank < starts.slots[:, :, None]).reshape(shape)
        pinned = rank < starts.pinned[:, :, None]
        self.pinned = pinned.reshape(shape) if pinned.any() else None
        self.prior = starts.prior.astype(np.float32).reshape(shape)
        self.score = np.zeros(shape, dtype=np.float32)
        self.last = np.full(shape, -1, dtype=np.int32)
        self.stamp = np.zeros(shape, dtype=np.uint64)
        self.tokens = np.zeros(n_lanes, dtype=np.int32)
        self.n_resident = starts.slots.copy()
        self.floor = _floor(starts, top_k)
        self.most = self.n_experts - starts.pinned
        self.capacity = _capacity(starts, top_k)
        self.first = np.arange(self.n_layers) * self.n_experts
        self.rank = np.tile(np.arange(top_k, dtype=np.uint64), self.n_layers)
        self.early: EarlyTable | None = None

    def call(self, run: Run, result: Replayed) -> None:
        """One decode call of every lane of a run: every layer's experts into slots, then all of it counted."""
        lanes, ids = run.lanes, run.ids
        n_lanes, n_tokens = ids.shape[:2]
        keys = Keys(self, lanes)
        early = self.early
        if early is not None:
            early.begin(keys, run.rows[:, 0])
        if self.foreseen and keys.shared:
            keys.spare((ids + self.first[:, None]).reshape(n_lanes, -1))
        cold = np.zeros((n_lanes, n_tokens, self.n_layers), dtype=np.uint32)
        loads = np.zeros((n_lanes, self.n_layers), dtype=np.uint32)
        used = n_tokens * self.top_k
        for layer in range(self.n_layers):
            entries = ids[:, :, layer].reshape(n_lanes, used) + self.first[layer]
            missing = ~keys.resident.reshape(-1)[entries + keys.first]
            cold[:, :, layer] = missing.reshape(n_lanes, n_tokens, self.top_k).sum(axis=2)
            if n_tokens > 1:
                fits = np.minimum(used, self.most[lanes, layer]) <= self.capacity[lanes, layer]
                through = fits & (n_tokens <= MAX_SLOT_TOKENS)
                _keep_first(missing, entries)
                loads[:, layer] = missing.sum(axis=1)
                missing &= through[:, None]
                keys.ensure(layer, entries, missing, through)
            else:
                loads[:, layer] = cold[:, 0, layer]
                keys.ensure(layer, entries, missing, None)
                if early is not None and layer + 1 < self.n_layers:
                    early.fetch(keys, layer + 1)
        result.cold[run.rows] = cold
        result.loads[run.rows[:, 0]] = loads
        for token in range(n_tokens):
            entries = (ids[:, token] + self.first[:, None]).reshape(n_lanes, -1)
            self._observe(lanes, entries)
            if early is not None and result.early is not None:
                early.count(keys, entries, run.rows[:, token], result.early)

    def _observe(self, lanes: slice, entries: IntArray) -> None:
        """Let one token's selections move the scores; the router's first choice is the most recent of its token."""
        now = self.tokens[lanes, None]
        score, last, stamp = self.score[lanes], self.last[lanes], self.stamp[lanes]
        age = now - np.take_along_axis(last, entries, axis=1)
        decayed = np.take_along_axis(score, entries, axis=1) * self.weights[age]
        np.put_along_axis(score, entries, decayed + np.float32(1), axis=1)
        np.put_along_axis(last, entries, now, axis=1)
        after = (now.astype(np.uint64) + np.uint64(1)) * np.uint64(self.top_k)
        np.put_along_axis(stamp, entries, after - self.rank, axis=1)
        self.tokens[lanes] += 1


class Keys:
    """What decides who leaves, during one call of some lanes."""

    def __init__(self, pools: _Pools, lanes: slice) -> None:
        self.pools, self.lanes = pools, lanes
        age = pools.tokens[lanes, None] - pools.last[lanes]
        value = pools.prior[lanes] + pools.score[lanes] * pools.weights[age]
        self.raw: _KeyArray = value.view(np.uint32).astype(np.uint64) << np.uint64(32)
        self.raw |= pools.stamp[lanes]
        if pools.pinned is not None:
            self.raw[pools.pinned[lanes]] = _NEVER
        self.resident = pools.resident[lanes]
        self.n_resident = pools.n_resident[lanes]
        self.key: _KeyArray = np.where(self.resident, self.raw, _NEVER)
        self.by_layer = self.key.reshape(len(self.key), pools.n_layers, pools.n_experts)
        self.first = np.arange(len(self.key))[:, None] * self.key.shape[1]
        """Where a lane begins in the tables, one row after the other."""
        self.shared = pools.n_layers > 1
        if self.shared:
            # Of every layer, doubled until the call has come to it.
            self.lowest = _doubled(self.by_layer.min(axis=2), pools.waiting_doublings)
            self.floor = pools.floor[lanes]
            self.at_floor = self.n_resident <= self.floor

    def ensure(
        self, layer: int, entries: IntArray, missing: NDArray[np.bool_], through: NDArray[np.bool_] | None
    ) -> None:
        """Make ``entries[lane, selection]`` resident, in the lanes that go ``through`` the slots (``None``: all)."""
        at_once, key = entries + self.first, self.key.reshape(-1)
        # What this call selects stays.
        key[at_once] = _NEVER
        lanes, places = np.nonzero(missing)
        if len(lanes):
            wanted = entries[lanes, places]
            if self.shared:
                self.lowest[:, layer] = self.by_layer[:, layer].min(axis=1)
            turn = turns(lanes)
            for number in range(int(turn.max()) + 1):
                at = turn == number
                self.replace(layer, lanes[at], wanted[at], layer)
        if self.shared or through is not None:
            kept = self.raw.reshape(-1)[at_once]
            # Other layers may still take it, when nothing else is left.
            touched = np.where(kept == _NEVER, _NEVER, kept | _TOUCHED)
            if through is not None and not through.all():
                touched = np.where(through[:, None], touched, kept)
                touched[~self.resident.reshape(-1)[at_once]] = _NEVER
            key[at_once] = touched
            if self.shared:
                self.lowest[:, layer] = self.by_layer[:, layer].min(axis=1)

    def spare(self, entries: IntArray) -> None:
        """Let ``entries[lane, selection]`` leave only when nothing else is left."""
        key = np.take_along_axis(self.key, entries, axis=1)
        np.put_along_axis(self.key, entries, np.where(key == _NEVER, key, key | _TOUCHED), axis=1)
        self.lowest = _doubled(self.by_layer.min(axis=2), self.pools.waiting_doublings)

    def spare_guessed(self, layer: int, entries: IntArray) -> None:
        """Let none of a layer's ``entries``, as they lie in the tables, leave for another one that is guessed."""
        self.key.reshape(-1)[entries] = _NEVER
        self._set_lowest(layer)

    def release(self, layer: int, entries: IntArray) -> None:
        """Let them leave again, those that have a slot by now."""
        there = self.resident.reshape(-1)[entries]
        self.key.reshape(-1)[entries] = np.where(there, self.raw.reshape(-1)[entries], _NEVER)
        self._set_lowest(layer)

    def _set_lowest(self, layer: int) -> None:
        """Of a layer that the call has not come to."""
        self.lowest[:, layer] = _doubled(self.by_layer[:, layer].min(axis=1), self.pools.waiting_doublings)

    def replace(self, layer: int, lanes: IntArray, wanted: IntArray, current: int) -> None:
        """One expert leaves in each of these lanes, and ``wanted`` takes its slot.

        ``current`` is the layer that the call has come to. Where it is another, only what this step did not select may
        leave, and where there is nothing else, nothing does.
        """
        n_experts = self.pools.n_experts
        if not self.shared:
            leaving = self.by_layer[lanes, layer].argmin(axis=1)
            self.key[lanes, leaving] = _NEVER
            self.resident[lanes, leaving] = False
            self.resident[lanes, wanted] = True
            return
        # One index in the place of two takes numpy half the time, and this is where the time goes.
        first, of_layer = lanes * self.key.shape[1], lanes * self.pools.n_layers
        lowest = np.where(self.at_floor[lanes], _NEVER, self.lowest[lanes])
        lowest[:, layer] = self.lowest[lanes, layer]
        owner = lowest.argmin(axis=1)
        if layer != current:
            free = lowest.reshape(-1)[np.arange(0, lowest.size, self.pools.n_layers) + owner] < _TOUCHED
            if not free.all():
                lanes, wanted, owner = lanes[free], wanted[free], owner[free]
                first, of_layer = first[free], of_layer[free]
                if not len(lanes):
                    return
        of_owner = of_layer + owner
        of_layer += layer
        theirs = self.by_layer.reshape(-1, n_experts)[of_owner]
        leaving = theirs.argmin(axis=1)
        theirs.reshape(-1)[np.arange(0, theirs.size, n_experts) + leaving] = _NEVER
        leaving += first + owner * n_experts
        resident = self.resident.reshape(-1)
        self.key.reshape(-1)[leaving] = _NEVER
        resident[leaving] = False
        resident[first + wanted] = True
        early = self.pools.early
        if early is not None:
            early.moved(lanes, owner, leaving)
            if layer != current:
                early.arrived(lanes, layer, first + wanted)
        n_resident, floor, at_floor = (table.reshape(-1) for table in (self.n_resident, self.floor, self.at_floor))
        n_resident[of_owner] -= 1
        n_resident[of_layer] += 1
        at_floor[of_owner] = n_resident[of_owner] <= floor[of_owner]
        at_floor[of_layer] = n_resident[of_layer] <= floor[of_layer]
        left = theirs.min(axis=1)
        self.lowest.reshape(-1)[of_owner] = np.where(
            owner > current, _doubled(left, self.pools.waiting_doublings), left
        )


def _doubled(keys: _KeyArray, times: int) -> _KeyArray:
    """Scores doubled, so often, in keys that nothing holds; below the normal numbers a score is its own exponent."""
    if times and keys.size:
        free = keys < _TOUCHED
        for _ in range(times):
            keys = keys + np.where(free, np.minimum(keys & _SCORE, _EXPONENT), np.uint64(0))
    return keys


def _keep_first(missing: NDArray[np.bool_], entries: IntArray) -> None:
    """Of several selections of one missing expert in a lane, only the first is copied for."""
    lanes, places = np.nonzero(missing)
    _, first = np.unique(lanes * (entries.max(initial=0) + 1) + entries[lanes, places], return_index=True)
    again = np.ones(len(lanes), dtype=bool)
    again[first] = False
    missing[lanes[again], places[again]] = False
