"""The native slot policy by itself: the state machine that decides which experts stay, replayed on the host.

Layers whose experts have the same tensors share one pool of slots. The tiers decide with the same code, or on a GPU
with kernels that are tested against it, so a replay of a trace shows what a tier would have done: without a model.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.errors import TierError
from spark_runtime.ggml import typed
from spark_runtime.native_tap import native_library
from spark_runtime.native_tier import LayerCounts
from spark_runtime.tier import PHASES
from spark_runtime.tier_start import LayerStart, TierStart
from spark_schemas.ids import Phase

__all__ = ["ExpertState", "Move", "PoolView", "SlotPool", "tier_pools"]

IntArray = NDArray[np.int64]
_TEXT_BYTES = 512
_META = np.dtype([("score", "<f4"), ("stamp", "<u4"), ("prior", "<f4"), ("touched", "<u4")])


class _Start(ctypes.Structure):
    _fields_: ClassVar = [
        ("n_experts", ctypes.c_uint32),
        ("top_k", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("pinned", ctypes.c_uint32),
        ("order", ctypes.c_void_p),
        ("prior", ctypes.c_void_p),
    ]


class _Move(ctypes.Structure):
    _fields_: ClassVar = [("expert", ctypes.c_uint32), ("slot", ctypes.c_uint32)]


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [
        (name, ctypes.c_uint32)
        for name in (
            "first",
            "n_experts",
            "top_k",
            "floor",
            "n_resident",
            "clock",
            "n_pinned",
            "first_distance",
            "recency_clock",
            "first_weight",
        )
    ]


@dataclass(frozen=True, slots=True)
class Move:
    """An expert that has to be copied into a slot."""

    expert: int
    slot: int


@dataclass(frozen=True, slots=True)
class ExpertState:
    """What the policy knows about the experts of a layer; arrays are ``[n_experts]``."""

    slots: IntArray
    """-1 for experts without a slot."""
    scores: NDArray[np.float32]
    """Decayed selections as of each expert's last one, without the prior."""
    stamps: IntArray
    """The layer's selections up to and with an expert's last one; 0 for those never selected."""
    priors: NDArray[np.float32]
    """Infinite for pinned experts."""
    recency: IntArray
    """As stamps, of the session that is counted, in decode alone."""


_ADDRESS, _INT, _SIZE, _U32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint32
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "spark_slots_new": (_ADDRESS, []),
    "spark_slots_free": (None, [_ADDRESS]),
    "spark_slots_of_tier": (_ADDRESS, [_ADDRESS, ctypes.c_int32, _ADDRESS]),
    "spark_slots_place": (_SIZE, [_ADDRESS, _ADDRESS, _SIZE, ctypes.c_float, ctypes.c_char_p, _SIZE]),
    "spark_slots_capacity": (_U32, [_ADDRESS, _U32]),
    "spark_slots_resident": (ctypes.c_bool, [_ADDRESS, _U32, _U32, _U32]),
    "spark_slots_ensure": (ctypes.c_int64, [_ADDRESS, _U32, _ADDRESS, _U32, _INT, _ADDRESS, _ADDRESS]),
    "spark_slots_pass": (_INT, [_ADDRESS, _U32, _ADDRESS, _U32, _INT]),
    "spark_slots_observe": (None, [_ADDRESS, _U32, _ADDRESS, _U32, _U32, _INT]),
    "spark_slots_set_early": (None, [_ADDRESS, _U32, ctypes.c_int32, ctypes.c_bool]),
    "spark_slots_guesses": (_U32, [_ADDRESS, _U32, _ADDRESS, _ADDRESS]),
    "spark_slots_follow": (None, [_ADDRESS, _U32, _ADDRESS, _U32, _U32]),
    "spark_slots_fetch_early": (_U32, [_ADDRESS, _U32, _INT, _ADDRESS]),
    "spark_slots_learn": (None, [_ADDRESS]),
    "spark_slots_decode": (None, [_ADDRESS, _ADDRESS, _SIZE, _U32]),
    "spark_slots_end_step": (None, [_ADDRESS]),
    "spark_slots_reset_counts": (None, [_ADDRESS]),
    "spark_slots_layer": (None, [_ADDRESS, _U32, _ADDRESS]),
    "spark_slots_experts": (None, [_ADDRESS, _U32, _ADDRESS, _ADDRESS, _ADDRESS]),
    "spark_slots_counts": (None, [_ADDRESS, _U32, _INT, _ADDRESS]),
}


@functools.cache
def _library() -> ctypes.CDLL:
    return typed(native_library(), _SIGNATURES)


class PoolView:
    """A pool to be read. Layers are named by their place in it. Not thread-safe."""

    def __init__(self, handle: int, n_layers: int) -> None:
        """View the pool at an address; it must outlive this."""
        self._library = _library()
        self._handle = handle
        self._sizes = [int(self._layer(place).n_experts) for place in range(n_layers)]

    @property
    def n_layers(self) -> int:
        """Layers that share the slots."""
        return len(self._sizes)

    def capacity(self, layer: int) -> int:
        """How many different experts of a layer one call can have in slots, whatever the other layers hold."""
        return int(self._library.spark_slots_capacity(self._handle, self._index(layer)))

    def floor(self, layer: int) -> int:
        """Slots that a layer never loses to the others."""
        return int(self._layer(layer).floor)

    def n_resident(self, layer: int) -> int:
        """Experts of a layer in slots, as the policy counts them."""
        return int(self._layer(layer).n_resident)

    def goes_through(self, layer: int, n_used: int, n_tokens: int) -> bool:
        """Whether a call of ``n_tokens`` tokens is computed from the slots; larger ones go around them."""
        return bool(self._library.spark_slots_resident(self._handle, self._index(layer), n_used, n_tokens))

    def experts(self, layer: int) -> ExpertState:
        """Which slots a layer's experts are in, and what decides whether they stay."""
        n_experts = self._sizes[layer]
        slots = np.empty(n_experts, dtype=np.int32)
        meta = np.empty(n_experts, dtype=_META)
        recency = np.empty(n_experts, dtype=np.uint32)
        self._library.spark_slots_experts(
            self._handle, self._index(layer), slots.ctypes.data, meta.ctypes.data, recency.ctypes.data
        )
        return ExpertState(
            slots=slots.astype(np.int64),
            scores=meta["score"].copy(),
            stamps=meta["stamp"].astype(np.int64),
            priors=meta["prior"].copy(),
            recency=recency.astype(np.int64),
        )

    def counts(self, layer: int, phase: Phase) -> LayerCounts:
        """What a layer selected in a phase since the counts were reset."""
        values = LayerCounts.room(self._sizes[layer])
        self._library.spark_slots_counts(self._handle, self._index(layer), PHASES.index(phase), values.ctypes.data)
        return LayerCounts.read(values)

    def _index(self, layer: int) -> int:
        if not 0 <= layer < len(self._sizes):
            raise IndexError(f"layer {layer}, expected 0 to {len(self._sizes) - 1}")
        return layer

    def _layer(self, layer: int) -> _Layer:
        state = _Layer()
        self._library.spark_slots_layer(self._handle, layer, ctypes.byref(state))
        return state


class SlotPool(PoolView):
    """A pool of one's own. Not thread-safe."""

    def __init__(self, start: TierStart) -> None:
        """Fill the slots; raises as :meth:`place`, and :class:`InstallationError` without the native library."""
        library = _library()
        handle: int = library.spark_slots_new()
        if not handle:
            raise MemoryError("no memory for a slot pool")
        weakref.finalize(self, library.spark_slots_free, handle)
        super().__init__(handle, 0)
        self._early = NO_EARLY_FETCH
        self.place(start)

    def place(self, start: TierStart) -> None:
        """Put experts into slots; those that stay keep theirs, and with the same layers counts and scores go on.

        Raises :class:`TierError` for a start that makes no sense; nothing has changed then.
        """
        orders = [_ids(layer.order) for layer in start.layers]
        priors = [np.ascontiguousarray(layer.prior, dtype=np.float32) for layer in start.layers]
        for layer, order, prior in zip(start.layers, orders, priors, strict=True):
            _check_start(layer, order, prior)
        starts = (_Start * len(orders))(
            *(
                _Start(len(order), layer.top_k, layer.slots, layer.pinned, order.ctypes.data, prior.ctypes.data)
                for layer, order, prior in zip(start.layers, orders, priors, strict=True)
            )
        )
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        if self._library.spark_slots_place(self._handle, starts, len(orders), start.decay, text, _TEXT_BYTES):
            raise TierError(text.value.decode(errors="replace"))
        self._sizes = [len(order) for order in orders]

    def ensure(self, layer: int, ids: IntArray, phase: Phase) -> tuple[IntArray, list[Move]]:
        """Make the experts ``ids[token, k]`` of one call resident: their slots, and what was copied for it, in order.

        Raises :class:`TierError` for ids that are no experts, or for more of them than :meth:`capacity`; of the latter
        some may have moved.
        """
        wanted = _ids(ids)
        slots = np.empty(wanted.shape, dtype=np.int32)
        moves = (_Move * wanted.size)()
        count = self._library.spark_slots_ensure(
            self._handle,
            self._index(layer),
            wanted.ctypes.data,
            wanted.size,
            PHASES.index(phase),
            slots.ctypes.data,
            moves,
        )
        if count < 0:
            raise self._refusal(layer, wanted)
        return slots.astype(np.int64), [Move(move.expert, move.slot) for move in moves[:count]]

    def pass_by(self, layer: int, ids: IntArray, phase: Phase) -> None:
        """Count a call that goes around the slots. Raises :class:`TierError` for ids that are no experts."""
        wanted = _ids(ids)
        status = self._library.spark_slots_pass(
            self._handle, self._index(layer), wanted.ctypes.data, wanted.size, PHASES.index(phase)
        )
        if status:
            raise self._refusal(layer, wanted)

    def set_early(self, early: EarlyFetch) -> None:
        """How experts are fetched early from now on; without any, what was learned is forgotten."""
        self._early = early
        self._library.spark_slots_set_early(self._handle, early.experts, early.threshold_units, early.learning)

    def guesses(self, layer: int) -> NDArray[np.int16]:
        """What has been learned of a layer, as :class:`spark_runtime.native_tier.LayerGuesses` has it."""
        n_rows = self._library.spark_slots_guesses(self._handle, self._index(layer), None, None)
        weights = np.empty((n_rows, self._sizes[layer]), dtype=np.int16)
        self._library.spark_slots_guesses(self._handle, layer, weights.ctypes.data, None)
        return weights

    def set_guesses(self, layer: int, weights: NDArray[np.int16]) -> None:
        """Go on with others; raise :class:`TierError` where they are not this layer's."""
        expected = self.guesses(layer).shape
        if weights.shape != expected or weights.dtype != np.int16:
            found = f"weights {weights.shape} of {weights.dtype}"
            raise TierError(f"layer {layer}: {found}, expected {expected} of int16")
        self._library.spark_slots_guesses(self._handle, layer, None, np.ascontiguousarray(weights).ctypes.data)

    def fetch_early(self, layer: int, ids: IntArray, phase: Phase) -> list[Move]:
        """After ``ids[token, k]`` of a layer are in slots: what is copied early for the layer after it."""
        self._follow(layer, ids)
        moves = (_Move * max(1, self._early.experts))()
        count = self._library.spark_slots_fetch_early(self._handle, layer, PHASES.index(phase), moves)
        return [Move(move.expert, move.slot) for move in moves[:count]]

    def _follow(self, layer: int, ids: IntArray) -> None:
        wanted = _ids(ids)
        n_tokens, n_used = wanted.shape
        self._library.spark_slots_follow(self._handle, self._index(layer), wanted.ctypes.data, n_used, n_tokens)

    def learn(self) -> None:
        """Correct the guesses by a step whose layers were all observed; before :meth:`end_step`."""
        self._library.spark_slots_learn(self._handle)

    def decode(self, ids: IntArray) -> None:
        """Steps of one token each, ``ids[token, layer, k]``. Raises :class:`TierError` as :meth:`ensure`."""
        wanted = _ids(ids)
        if wanted.ndim != 3 or wanted.shape[1] != self.n_layers:
            raise TierError(f"selections {wanted.shape}, expected [token, {self.n_layers} layers, k]")
        for layer in range(self.n_layers):
            of_layer = wanted[:, layer]
            bad = ((of_layer < 0) | (of_layer >= self._sizes[layer])).any()
            if bad or not self.goes_through(layer, wanted.shape[2], 1):
                raise self._refusal(layer, of_layer)
        self._library.spark_slots_decode(self._handle, wanted.ctypes.data, len(wanted), wanted.shape[2])

    def observe(self, layer: int, ids: IntArray, phase: Phase) -> None:
        """Count ``ids[token, k]`` and let them move the scores, after the call. Raises :class:`TierError` as above."""
        wanted = _ids(ids)
        if ((wanted < 0) | (wanted >= self._sizes[layer])).any():
            raise self._refusal(layer, wanted)
        n_tokens, n_used = wanted.shape
        self._library.spark_slots_observe(
            self._handle, self._index(layer), wanted.ctypes.data, n_used, n_tokens, PHASES.index(phase)
        )

    def end_step(self) -> None:
        """All layers of a step were observed."""
        self._library.spark_slots_end_step(self._handle)

    def step(self, ids: Sequence[IntArray], phase: Phase) -> list[list[Move]]:
        """One decode call of a tier: ``ids[layer][token, k]`` in the layers' order; what was copied into slots."""
        moves: list[list[Move]] = []
        for layer, selected in enumerate(ids):
            n_tokens, n_used = selected.shape
            if self.goes_through(layer, n_used, n_tokens):
                moves.append(self.ensure(layer, selected, phase)[1])
                self.fetch_early(layer, selected, phase)
            else:
                self.pass_by(layer, selected, phase)
                self._follow(layer, selected)
                moves.append([])
        for layer, selected in enumerate(ids):
            self.observe(layer, selected, phase)
        self.learn()
        self.end_step()
        return moves

    def reset_counts(self) -> None:
        """Start counting anew."""
        self._library.spark_slots_reset_counts(self._handle)

    def _refusal(self, layer: int, ids: NDArray[np.int32]) -> TierError:
        bad = ids[(ids < 0) | (ids >= self._sizes[layer])]
        if bad.size:
            return TierError(f"layer {layer}: expert {bad[0]}, expected 0 to {self._sizes[layer] - 1}")
        found = len(np.unique(ids))
        return TierError(f"layer {layer}: {found} experts at once, expected at most {self.capacity(layer)}")


def tier_pools(handle: int, blocks: Sequence[int]) -> list[tuple[PoolView, dict[int, int]]]:
    """Pools of the tier at an address, each with the places of its blocks.

    They are current after the tier's ``read`` and valid up to its next placement. Raises :class:`TierError` for a block
    that the tier does not hold.
    """
    found: dict[int, dict[int, int]] = {}
    for block in blocks:
        layer = _U32()
        address = _library().spark_slots_of_tier(handle, block, ctypes.byref(layer))
        if not address:
            raise TierError(f"block {block} is not placed")
        found.setdefault(address, {})[block] = layer.value
    return [(PoolView(address, len(places)), places) for address, places in found.items()]


def _ids(values: IntArray) -> NDArray[np.int32]:
    """As the library takes them; ids beyond 32 bits become ones that no layer has."""
    limits = np.iinfo(np.int32)
    return np.ascontiguousarray(np.clip(values, limits.min, limits.max), dtype=np.int32)


def _check_start(layer: LayerStart, order: NDArray[np.int32], prior: NDArray[np.float32]) -> None:
    if order.ndim != 1 or order.shape != prior.shape:
        raise TierError(f"block {layer.block}: an order {order.shape} and priors {prior.shape}, expected one an expert")
    if min(layer.top_k, layer.slots, layer.pinned) < 0:
        found = f"top_k {layer.top_k}, {layer.slots} slots, {layer.pinned} pinned"
        raise TierError(f"block {layer.block}: {found}, expected none below 0")
