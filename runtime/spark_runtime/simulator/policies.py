"""What decides which experts are in slots, by name, and how many selections of a trace find none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.simulator.early import EarlyCopies, Guessed
from spark_runtime.simulator.guesses import EarlyStart, Guesses
from spark_runtime.simulator.lanes import Lanes
from spark_runtime.simulator.optimum import optimal_cold_hits
from spark_runtime.simulator.pools import WAITING_DOUBLINGS, PoolStarts, Replayed, replay_pools
from spark_runtime.simulator.stack import Unit, reuse_distances
from spark_runtime.simulator.traces import LayerClass, Trace
from spark_runtime.tier_start import DECAY, PRIOR_TOKENS

__all__ = ["CACHES", "POLICIES", "Cache", "PolicyName", "Sharing", "replay"]

_Number = TypeVar("_Number", bound=np.generic)
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Frequency = Sequence[FloatArray]
"""Per layer a share for every expert."""

PolicyName = Literal["uniform", "static", "oracle", "lru_unprotected", "lru", "lfu", "lru_pinned", "scored", "belady"]
"""``uniform`` keeps the first experts, ``static`` the profile's hottest, ``oracle`` the judged sessions' own hottest:
none of them moves anything. ``lru`` never evicts what the current token selected, ``lru_unprotected`` takes selections
one by one and may. ``lfu`` counts without forgetting. ``lru_pinned`` keeps a share of the slots for the hottest.
``scored`` is what the runtime does. ``belady`` knows the future."""

Sharing = Literal["layer", "pool"]
"""Slots of each layer's own, or one pool for all layers whose experts have the same tensors."""

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
CACHES: tuple[PolicyName, ...] = ("lru_unprotected", "lru", "lfu", "lru_pinned", "scored", "belady")
"""Those that move experts."""
_IN_ORDER_ONLY = ("lru_unprotected",)


@dataclass(frozen=True, slots=True)
class Cache:
    """One policy with its numbers."""

    policy: PolicyName
    sharing: Sharing = "layer"
    decay: float = DECAY
    """Of ``scored``, per token."""
    prior_tokens: float = PRIOR_TOKENS
    """Worth of a profile to ``scored``, tokens."""
    pinned_share: float = 0.75
    """Of the slots, for ``lru_pinned``."""
    waiting_doublings: int = WAITING_DOUBLINGS
    """Of the scores of layers that a call has not come to yet, in one pool."""
    foreseen: bool = False
    """Whether one pool spares what such layers will select, as if it were known."""
    early: EarlyFetch = NO_EARLY_FETCH
    """What ``scored`` may fetch early in one pool."""
    early_from: EarlyStart = "none"
    """What its guesses start from."""

    def check(self) -> None:
        """Raise ``ValueError`` for what does not exist."""
        if self.early.experts and (self.policy != "scored" or self.sharing != "pool"):
            raise ValueError("experts are fetched early by scored in one pool only")
        if self.sharing == "pool" and self.policy in _IN_ORDER_ONLY:
            raise ValueError(f"{self.policy} exists with slots of each layer's own only")


def replay(
    cache: Cache,
    trace: Trace,
    slots: Sequence[int],
    profiles: Sequence[Frequency | None],
    calls: Sequence[IntArray] | None = None,
    guesses: Callable[[LayerClass], Guesses] | None = None,
) -> Replayed:
    """What found no slot and what was copied, ``[token, layer]`` each in the trace's order.

    Copies stand with the first token of their call.
    ``profiles[session]`` is what the session's cache starts with, and the prior of its scores; ``None`` starts with the
    first experts. Every session starts anew. ``calls`` are :meth:`Trace.calls`, one token each if left out. ``guesses``
    are what ``cache.early`` goes by. Raises ``ValueError`` for fewer slots than top-k in a layer.
    """
    cache.check()
    if len(profiles) != trace.n_sessions or len(slots) != len(trace.ids):
        raise ValueError(f"{len(profiles)} profiles and {len(slots)} layers' slots, expected one for each")
    made = trace.calls() if calls is None else calls
    shape = (trace.n_tokens, len(trace.ids))
    if cache.early.experts and guesses is None:
        raise ValueError("nothing is guessed, so nothing can be fetched early")
    early = EarlyCopies.zeros(shape) if cache.early.experts else None
    result = Replayed(np.zeros(shape, np.uint32), np.zeros(shape, np.uint32), early)
    for of in trace.classes():
        own = [slots[layer] for layer in of.layers]
        if min(own) < of.top_k:
            raise ValueError(f"{min(own)} slots, expected at least top_k = {of.top_k}")
        guessed = Guessed(cache.early.experts, guesses(of)) if cache.early.experts and guesses is not None else None
        part = _class_replay(cache, trace, of, np.array(own), profiles, made, guessed)
        result.cold[:, of.layers] = part.cold
        result.loads[:, of.layers] = part.loads
        if result.early is not None and part.early is not None:
            for name in ("fetched", "used", "wasted"):
                getattr(result.early, name)[:, of.layers] = getattr(part.early, name)
    return result


def _class_replay(
    cache: Cache,
    trace: Trace,
    of: LayerClass,
    slots: IntArray,
    profiles: Sequence[Frequency | None],
    calls: Sequence[IntArray],
    guessed: Guessed | None,
) -> Replayed:
    frequency = _frequencies(trace, of, profiles)
    if cache.policy not in CACHES:
        return _static(cache.policy, trace, of, slots, frequency)
    n_layers, singly = len(of.layers), all((sizes == 1).all() for sizes in calls)
    order = _orders(frequency, (trace.n_sessions, n_layers, of.n_experts))
    lane_slots = np.tile(slots, (trace.n_sessions, 1))
    if cache.sharing == "pool":
        lanes = trace.pooled(of, calls)
    else:
        lanes = trace.layered(of, calls)
        order, lane_slots = _by_layer(order), _by_layer(lane_slots[..., None])[..., 0]
    if cache.policy == "belady":
        found = _optimal(lanes, order, lane_slots, of.n_experts)
    elif cache.policy in {"lru", "lru_unprotected"} and cache.sharing == "layer" and singly:
        unit: Unit = "token" if cache.policy == "lru" else "selection"
        distances = reuse_distances(lanes, of.n_experts, order[:, 0], unit=unit)
        within = np.repeat(lane_slots[:, 0], lanes.lengths)
        cold = (distances >= within[:, None]).sum(axis=1, dtype=np.uint32)[:, None]
        found = Replayed(cold, cold)
    elif cache.policy == "lru_unprotected":
        raise ValueError("lru_unprotected takes one token at a time")
    else:
        found = _scored(cache, lanes, order, lane_slots, frequency, of, guessed)
    if cache.sharing == "pool":
        return found
    return Replayed(found.cold.reshape(n_layers, -1).T, found.loads.reshape(n_layers, -1).T)


def _scored(
    cache: Cache,
    lanes: Lanes,
    order: IntArray,
    slots: IntArray,
    frequency: FloatArray | None,
    of: LayerClass,
    guessed: Guessed | None,
) -> Replayed:
    """LRU and LFU are the runtime's policy at the ends of its decay."""
    decay = {"lru": 0.0, "lru_pinned": 0.0, "lfu": 1.0}.get(cache.policy, cache.decay)
    prior: FloatArray = np.zeros(order.shape)
    if cache.policy == "scored" and frequency is not None:
        prior = frequency * (of.top_k * cache.prior_tokens)
        prior = prior if cache.sharing == "pool" else _by_layer(prior)
    pinned = np.zeros_like(slots)
    if cache.policy == "lru_pinned":
        # As many as leave the rest twice a token's selections.
        floor = np.minimum(2 * of.top_k, slots)
        movable = np.where(slots < of.n_experts, slots - floor, 0)
        pinned = np.minimum((cache.pinned_share * slots).astype(np.int64), movable)
    return replay_pools(
        lanes,
        PoolStarts(order, prior, slots, pinned),
        decay,
        cache.waiting_doublings,
        foreseen=cache.foreseen,
        guessed=guessed,
    )


def _optimal(lanes: Lanes, order: IntArray, slots: IntArray, n_experts: int) -> Replayed:
    if any((sizes != 1).any() for sizes in lanes.calls):
        raise ValueError("belady takes one token at a time")
    rank = np.argsort(order, axis=2, kind="stable")
    cold = optimal_cold_hits(lanes, rank < slots[:, :, None], n_experts)
    return Replayed(cold, cold)


def _static(
    policy: PolicyName, trace: Trace, of: LayerClass, slots: IntArray, frequency: FloatArray | None
) -> Replayed:
    session = np.repeat(np.arange(trace.n_sessions), trace.lengths)
    cold = np.zeros((trace.n_tokens, len(of.layers)), dtype=np.uint32)
    for place, layer in enumerate(of.layers):
        ids = trace.ids[layer]
        if policy == "oracle":
            frequency_of = np.bincount(ids.ravel(), minlength=of.n_experts)[None].astype(np.float64)
        elif policy == "static" and frequency is not None:
            frequency_of = frequency[:, place]
        else:
            frequency_of = np.zeros((1, of.n_experts))
        rank = np.argsort(np.argsort(-frequency_of, axis=1, kind="stable"), axis=1, kind="stable")
        row = np.minimum(session, len(rank) - 1)
        cold[:, place] = (rank[row[:, None], ids] >= slots[place]).sum(axis=1)
    return Replayed(cold, cold)


def _frequencies(trace: Trace, of: LayerClass, profiles: Sequence[Frequency | None]) -> FloatArray | None:
    """``[session, layer, expert]``; a session without a profile has zeros, and ``None`` stands for all of those."""
    if all(profile is None for profile in profiles):
        return None
    result = np.zeros((trace.n_sessions, len(of.layers), of.n_experts))
    for session, profile in enumerate(profiles):
        if profile is not None:
            result[session] = [profile[layer] for layer in of.layers]
    return result


def _orders(frequency: FloatArray | None, shape: tuple[int, int, int]) -> IntArray:
    if frequency is None:
        return np.broadcast_to(np.arange(shape[2]), shape).copy()
    # As placement.expert_order: equal frequencies by lower id.
    return np.argsort(-frequency, axis=2, kind="stable")


def _by_layer(values: NDArray[_Number]) -> NDArray[_Number]:
    """``[session, layer, …]`` to ``[layer x session, 1, …]``, a lane for each."""
    swapped = values.swapaxes(0, 1)
    return swapped.reshape(-1, 1, *values.shape[2:])
