"""The native library's tiers: its functions, and one model's experts on one device."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from spark_runtime.early_fetch import EarlyFetch
from spark_runtime.errors import ClosedError, InstallationError, TierError
from spark_runtime.ggml import share_registry, typed
from spark_runtime.native.nvrtc import kernels_path
from spark_runtime.native_tap import native_library
from spark_runtime.tier_start import LayerStart

__all__ = [
    "DeviceTier",
    "LayerCounts",
    "LayerGuesses",
    "TierMemory",
    "cuda_version",
    "kernel_fault",
    "proxy_devices",
    "set_tiering",
    "take_tiers",
    "tier_library",
]

IntArray = NDArray[np.int64]
_FAULT_BYTES = 512
_TOTALS = 6
"""Of a layer and phase, after what there is by expert."""
_INT32 = (-(2**31), 2**31 - 1)


class _StartLayer(ctypes.Structure):
    _fields_: ClassVar = [
        ("block", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("pinned", ctypes.c_int32),
        ("order", ctypes.c_void_p),
        ("prior", ctypes.c_void_p),
    ]


class _Memory(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_uint64) for name in ("slots", "scratch", "tables", "host", "host_pinned")]


@dataclass(frozen=True, slots=True)
class TierMemory:
    """What a tier takes, bytes."""

    slots: int
    """Video memory for experts, with what the kernels read past their ends."""
    scratch: int
    """Video memory for two whole layers, through which prompts go."""
    tables: int
    """Video memory for what is where and what was counted."""
    host: int
    """Host memory for all experts."""
    host_pinned: int
    """Of it, what the GPU reads by itself; with less, the host copies and every layer waits for it."""


@dataclass(frozen=True, slots=True)
class LayerGuesses:
    """What was learned of one layer's selections."""

    sources: tuple[int, ...]
    """Blocks whose selections it is guessed from, the nearest first."""
    weights: NDArray[np.int16]
    """``[row, expert]`` in units of ``1 / PREDICTED_ONE``: a row for each expert of each source, and one for all."""


class _GuessShape(NamedTuple):
    n_rows: int
    n_experts: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """What one layer selected in one phase since the counts were reset."""

    selections: IntArray
    """``[n_experts]``"""
    reuse: IntArray
    """Reuse distances in decode, ``[n_experts + 1]``, as in :mod:`spark_runtime.recency`."""
    tokens: int
    cold: int
    """Selections whose expert was not in video memory."""
    loads: int
    """Experts that a step needed and copied there or to the scratch layers, without what is fetched ahead."""
    early: int
    """Experts fetched early, by a guess."""
    early_used: int
    """Of those, selected while they were there."""
    early_wasted: int
    """Of those, gone before anything selected them."""

    @staticmethod
    def room(n_experts: int) -> NDArray[np.uint64]:
        """Where the native library writes them."""
        return np.empty(2 * n_experts + 1 + _TOTALS, dtype=np.uint64)

    @classmethod
    def read(cls, written: NDArray[np.uint64]) -> Self:
        """From what the native library wrote into :meth:`room`."""
        n_experts = (len(written) - 1 - _TOTALS) // 2
        tokens, cold, loads, early, used, wasted = written[-_TOTALS:].tolist()
        return cls(
            selections=written[:n_experts].astype(np.int64),
            reuse=written[n_experts:-_TOTALS].astype(np.int64),
            tokens=tokens,
            cold=cold,
            loads=loads,
            early=early,
            early_used=used,
            early_wasted=wasted,
        )


_ADDRESS, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "spark_last_error": (ctypes.c_char_p, []),
    "spark_devices": (_INT, [_INT]),
    "spark_device": (_ADDRESS, [_INT]),
    "spark_device_cuda": (_INT, [_INT, _ADDRESS]),
    "spark_device_set_kernels": (None, [_INT, ctypes.c_char_p]),
    "spark_device_set_tiering": (None, [_INT, ctypes.c_bool]),
    "spark_device_take_tier": (_ADDRESS, [_INT]),
    "spark_tier_place": (_INT, [_ADDRESS, _ADDRESS, _SIZE, ctypes.c_float]),
    "spark_tier_blocks": (_SIZE, [_ADDRESS, _ADDRESS, _SIZE]),
    "spark_tier_memory": (None, [_ADDRESS, _ADDRESS]),
    "spark_tier_engine": (ctypes.c_char_p, [_ADDRESS]),
    "spark_tier_set_phase": (_INT, [_ADDRESS, _INT]),
    "spark_tier_read": (_INT, [_ADDRESS]),
    "spark_tier_counts": (_INT, [_ADDRESS, ctypes.c_int32, _INT, _ADDRESS]),
    "spark_tier_slots": (_INT, [_ADDRESS, ctypes.c_int32, _ADDRESS]),
    "spark_tier_recency": (_INT, [_ADDRESS, ctypes.c_int32, _ADDRESS, _ADDRESS]),
    "spark_tier_write_recency": (_INT, [_ADDRESS]),
    "spark_tier_set_early": (_INT, [_ADDRESS, ctypes.c_uint32, ctypes.c_int32, ctypes.c_bool]),
    "spark_tier_sync_guesses": (_INT, [_ADDRESS, ctypes.c_bool]),
    "spark_tier_guesses": (_INT, [_ADDRESS, ctypes.c_int32, _ADDRESS, _ADDRESS, _ADDRESS]),
    "spark_tier_reset_counts": (_INT, [_ADDRESS]),
    "spark_tier_take_fault": (_SIZE, [_ADDRESS, ctypes.c_char_p, _SIZE]),
}


@functools.cache
def tier_library() -> ctypes.CDLL:
    """The native library, ready for tiers; raises :class:`InstallationError` when it cannot be built or used."""
    share_registry()
    return typed(native_library(), _SIGNATURES)


@functools.cache
def _make_proxies(cpu_devices: int) -> int:
    count: int = tier_library().spark_devices(cpu_devices)
    if count < 0:
        raise InstallationError(f"the proxy devices cannot be made: {_last_error()}", "run spark-agent doctor")
    for index in range(count):
        kernel_fault(index)
    return count


def cuda_version(index: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Compute capability of a device's GPU and the CUDA version of its driver, such as (9, 0) and (12, 4).

    Raises :class:`InstallationError` for a device that cannot decide and fetch by itself.
    """
    found = (ctypes.c_int * 2)()
    if tier_library().spark_device_cuda(index, found):
        raise InstallationError(f"the host fetches experts: {_last_error()}")
    capability, driver = found
    return divmod(capability, 10), (driver // 1000, driver % 1000 // 10)


@functools.cache
def kernel_fault(index: int) -> InstallationError | None:
    """Give a device its GPU's kernels; why it has none, ``None`` if it has.

    Without them, and over the CPU, the host decides and fetches, and waits for the device at every layer.
    """
    try:
        path = kernels_path(*cuda_version(index))
    except InstallationError as error:
        return error
    tier_library().spark_device_set_kernels(index, os.fsencode(path))
    return None


def proxy_devices(count: int = 1, *, cpu_devices: int = 2) -> list[int]:
    """Addresses of the first ``count`` proxy devices: one for each GPU, or ``cpu_devices`` over the CPU without one.

    They are known to who gets these addresses and to nobody else, so other models in the process load as ever. Raises
    :class:`TierError` for more devices than there are.
    """
    found = _make_proxies(cpu_devices)
    if not 1 <= count <= found:
        raise TierError(f"{count} devices, but this machine has {found} to tier on", f"use at most {found}")
    return [int(tier_library().spark_device(index)) for index in range(count)]


def set_tiering(count: int, *, on: bool) -> None:
    """Whether experts of models loaded on the first ``count`` devices from now on go to tiers."""
    for index in range(count):
        tier_library().spark_device_set_tiering(index, on)


def take_tiers(count: int) -> list[DeviceTier]:
    """Tiers of the model loaded last, one for each of the first ``count`` devices that got experts."""
    handles = [tier_library().spark_device_take_tier(index) for index in range(count)]
    return [DeviceTier(handle) for handle in handles if handle]


def _last_error() -> str:
    text: bytes = tier_library().spark_last_error()
    return text.decode(errors="replace")


class DeviceTier:
    """One model's experts on one device. Valid while the model is loaded."""

    def __init__(self, handle: int) -> None:
        self._library = tier_library()
        self._open_handle: int | None = handle
        count = self._library.spark_tier_blocks(handle, None, 0)
        blocks = (ctypes.c_int32 * count)()
        self._library.spark_tier_blocks(handle, blocks, count)
        self.blocks = tuple(blocks)
        """Blocks whose experts are on this device, in order."""
        self._n_experts: dict[int, int] = {}
        self._phase: int | None = None

    def close(self) -> None:
        """The model is about to go; every other call raises :class:`ClosedError` from now on."""
        self._open_handle = None

    @property
    def _handle(self) -> int:
        if self._open_handle is None:
            raise ClosedError("the model is closed, and its tiers with it", "load it again")
        return self._open_handle

    def place(self, layers: Sequence[LayerStart], decay: float) -> None:
        """Put experts into slots; raise :class:`TierError` for what makes no sense or finds no memory."""
        # The arrays live until the call returns.
        # An id beyond 32 bits must not become another one's.
        orders = [np.ascontiguousarray(np.clip(layer.order, *_INT32), dtype=np.int32) for layer in layers]
        priors = [np.ascontiguousarray(layer.prior, dtype=np.float32) for layer in layers]
        starts = (_StartLayer * len(layers))(
            *(
                _StartLayer(layer.block, layer.top_k, layer.slots, layer.pinned, order.ctypes.data, prior.ctypes.data)
                for layer, order, prior in zip(layers, orders, priors, strict=True)
            )
        )
        self._phase = None
        self._check(self._library.spark_tier_place(self._handle, starts, len(layers), decay))
        self._n_experts = {layer.block: len(layer.order) for layer in layers}

    @property
    def engine(self) -> str:
        """``cuda`` when the GPU decides and fetches by itself, ``host`` when the host does.

        ``none`` before the first placement, and after one that failed while the slots were filled.
        """
        name: bytes = self._library.spark_tier_engine(self._handle)
        return name.decode()

    def memory(self) -> TierMemory:
        """What it takes now."""
        memory = _Memory()
        self._library.spark_tier_memory(self._handle, ctypes.byref(memory))
        return TierMemory(memory.slots, memory.scratch, memory.tables, memory.host, memory.host_pinned)

    def set_phase(self, phase: int) -> None:
        """What the tokens to come are: 0 prefill, 1 decode."""
        if phase != self._phase:
            self._check(self._library.spark_tier_set_phase(self._handle, phase))
            self._phase = phase

    def read(self) -> None:
        """Bring what :meth:`counts`, :meth:`slots` and :meth:`recency` return up to date."""
        self._check(self._library.spark_tier_read(self._handle))

    def counts(self, block: int, phase: int) -> LayerCounts:
        """Counts of a block as of the last :meth:`read`."""
        n_experts = self._n_experts[block]
        values = LayerCounts.room(n_experts)
        self._check(self._library.spark_tier_counts(self._handle, block, phase, values.ctypes.data))
        return LayerCounts.read(values)

    def slots(self, block: int) -> NDArray[np.int32]:
        """Slot of every expert of a block as of the last :meth:`read`, -1 for those without."""
        slots = np.empty(self._n_experts[block], dtype=np.int32)
        self._check(self._library.spark_tier_slots(self._handle, block, slots.ctypes.data))
        return slots

    def recency(self, block: int) -> NDArray[np.uint32]:
        """How recently the counted session used each expert of a block, larger is later, 0 never."""
        stamps = np.empty(self._n_experts[block], dtype=np.uint32)
        self._check(self._library.spark_tier_recency(self._handle, block, stamps.ctypes.data, None))
        return stamps

    def set_recency(self, stamps: dict[int, NDArray[np.uint32]]) -> None:
        """Go on with another session's recency, by block; right after :meth:`read`."""
        for block, values in stamps.items():
            self._check(self._library.spark_tier_recency(self._handle, block, None, values.ctypes.data))
        self._check(self._library.spark_tier_write_recency(self._handle))

    def set_early(self, early: EarlyFetch) -> None:
        """How experts are fetched early from the next step on; nothing of it changes what is computed."""
        self._check(
            self._library.spark_tier_set_early(self._handle, early.experts, early.threshold_units, early.learning)
        )

    def guesses(self) -> dict[int, LayerGuesses]:
        """What has been learned for fetching early, by block; empty while nothing is. Waits for the device."""
        self._check(self._library.spark_tier_sync_guesses(self._handle, False))
        found = {}
        for block in self._n_experts:
            about = self._guess_shape(block)
            weights = np.empty((about.n_rows, about.n_experts), dtype=np.int16)
            if about.n_rows:
                self._exchange(block, weights.ctypes.data, None)
                found[block] = LayerGuesses(about.sources, weights)
        return found

    def set_guesses(self, guesses: Mapping[int, LayerGuesses]) -> None:
        """Go on with what :meth:`guesses` gave, of blocks that guess from the same blocks.

        Raises :class:`TierError` for others, and changes nothing then.
        """
        for block, layer in guesses.items():
            about = self._guess_shape(block)
            expected = (about.n_rows, about.n_experts)
            if layer.sources != about.sources or layer.weights.shape != expected or layer.weights.dtype != np.int16:
                found = f"weights {layer.weights.shape} of {layer.weights.dtype} from blocks {layer.sources}"
                raise TierError(f"block {block}: {found}, expected {expected} of int16 from blocks {about.sources}")
        self._check(self._library.spark_tier_sync_guesses(self._handle, False))
        for block, layer in guesses.items():
            self._exchange(block, None, np.ascontiguousarray(layer.weights).ctypes.data)
        self._check(self._library.spark_tier_sync_guesses(self._handle, True))

    def _guess_shape(self, block: int) -> _GuessShape:
        about = self._exchange(block, None, None)
        return _GuessShape(about[0], about[1], tuple(source for source in about[2:] if source >= 0))

    def _exchange(self, block: int, out: int | None, given: int | None) -> list[int]:
        about = (ctypes.c_int32 * 4)()
        self._check(self._library.spark_tier_guesses(self._handle, block, about, out, given))
        return list(about)

    def reset_counts(self) -> None:
        """Start counting anew."""
        self._check(self._library.spark_tier_reset_counts(self._handle))

    def take_fault(self) -> str:
        """Why the last step failed, once; empty if it did not."""
        text = ctypes.create_string_buffer(_FAULT_BYTES)
        self._library.spark_tier_take_fault(self._handle, text, _FAULT_BYTES)
        return text.value.decode(errors="replace")

    def _check(self, status: int) -> None:
        if status:
            raise TierError(_last_error())
