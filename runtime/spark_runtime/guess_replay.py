"""The native predictor by itself: what it would have guessed of a trace's tokens, and what it would have learned."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spark_runtime.errors import TierError
from spark_runtime.ggml import typed
from spark_runtime.native_tap import native_library
from spark_runtime.simulator.guesses import Guesses, Weights
from spark_runtime.simulator.traces import LayerClass, Trace

__all__ = ["NativeGuesser"]

IntArray = NDArray[np.int64]
_NEVER = 2**31 - 1
_MOST_EXPERTS = 1024
"""Of a layer (``native/device_tables.h``); more are not guessed by anything that runs."""
_FOUND_AT_ONCE = 2**18
"""Guesses for which there is room in one call."""
_ADDRESS, _SIZE, _I32, _U32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_uint32
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "spark_predictor_new": (_ADDRESS, [_ADDRESS, _SIZE]),
    "spark_predictor_free": (None, [_ADDRESS]),
    "spark_predictor_weights": (_U32, [_ADDRESS, _U32, _ADDRESS, _ADDRESS]),
    "spark_predictor_replay": (
        ctypes.c_int64,
        [_ADDRESS, _ADDRESS, _SIZE, _U32, _I32, ctypes.c_bool, _ADDRESS, _ADDRESS, _SIZE],
    ),
}


@functools.cache
def _library() -> ctypes.CDLL:
    return typed(native_library(), _SIGNATURES)


class NativeGuesser:
    """A :class:`spark_runtime.simulator.guesses.Guesser`: the same bits as a tier's guesses.

    Raises :class:`InstallationError` without the native library, :class:`TierError` for weights of other layers.
    """

    def __init__(self) -> None:
        """Load the native library, or build it."""
        _library()

    def guess(
        self,
        trace: Trace,
        of: LayerClass,
        calls: Sequence[IntArray],
        threshold_units: int,
        start: Weights | None,
        *,
        learning: bool,
    ) -> Guesses:
        """Of every session, each from ``start``; only single tokens are guessed for."""
        predictor = _Predictor(of)
        beginning = predictor.weights() if start is None else start
        counts = np.zeros((trace.n_tokens, len(of.layers)), dtype=np.uint16)
        found = []
        for session in range(trace.n_sessions):
            predictor.set_weights(beginning)
            rows = _single_tokens(trace, calls, session)
            counts[rows], experts = predictor.replay(_ids(trace, of, rows), threshold_units, learning=learning)
            found.append(experts)
        return Guesses(counts, np.concatenate(found) if found else np.empty(0, np.uint16))

    def learn(self, trace: Trace, of: LayerClass, calls: Sequence[IntArray], start: Weights | None) -> Weights:
        """What the sessions teach, one after the other."""
        predictor = _Predictor(of)
        if start is not None:
            predictor.set_weights(start)
        for session in range(trace.n_sessions):
            predictor.replay(_ids(trace, of, _single_tokens(trace, calls, session)), _NEVER, learning=True)
        return predictor.weights()


class _Predictor:
    """Of a class's layers. Not thread-safe."""

    def __init__(self, of: LayerClass) -> None:
        self._library = _library()
        if of.n_experts > _MOST_EXPERTS:
            raise TierError(f"{of.n_experts} experts of a layer, expected at most {_MOST_EXPERTS}")
        self._n_experts, self._n_layers = of.n_experts, len(of.layers)
        sizes = np.full(self._n_layers, of.n_experts, dtype=np.uint32)
        handle: int = self._library.spark_predictor_new(sizes.ctypes.data, len(sizes))
        if not handle:
            raise MemoryError("no memory for a predictor")
        weakref.finalize(self, self._library.spark_predictor_free, handle)
        self._handle = handle

    def weights(self) -> list[NDArray[np.int16]]:
        found = [np.empty(shape, dtype=np.int16) for shape in self._shapes()]
        for layer, weights in enumerate(found):
            self._library.spark_predictor_weights(self._handle, layer, weights.ctypes.data, None)
        return found

    def set_weights(self, weights: Weights) -> None:
        expected = self._shapes()
        found = [layer.shape for layer in weights]
        if found != expected or any(layer.dtype != np.int16 for layer in weights):
            raise TierError(f"guesses of layers {found}, expected {expected} of int16")
        for layer, values in enumerate(weights):
            kept = np.ascontiguousarray(values)  # until the call has returned
            self._library.spark_predictor_weights(self._handle, layer, None, kept.ctypes.data)

    def replay(
        self, ids: NDArray[np.int32], threshold_units: int, *, learning: bool
    ) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        """Counts ``[token, layer]`` and experts of what is guessed of ``ids[token, layer, k]``."""
        n_tokens, _, top_k = ids.shape
        counts = np.zeros((n_tokens, self._n_layers), dtype=np.uint16)
        room = np.empty(max(_FOUND_AT_ONCE, self._n_layers * self._n_experts), dtype=np.uint16)
        found, done = [], 0
        while done < n_tokens:
            made = self._library.spark_predictor_replay(
                self._handle,
                ids[done:].ctypes.data,
                n_tokens - done,
                top_k,
                threshold_units,
                learning,
                counts[done:].ctypes.data,
                room.ctypes.data,
                len(room),
            )
            if made < 0:
                raise MemoryError("no memory for guesses")
            found.append(room[: int(counts[done : done + made].sum(dtype=np.int64))].copy())
            done += made
        return counts, np.concatenate(found) if found else np.empty(0, np.uint16)

    def _shapes(self) -> list[tuple[int, ...]]:
        layers = range(self._n_layers)
        rows = [self._library.spark_predictor_weights(self._handle, layer, None, None) for layer in layers]
        return [(n_rows, self._n_experts) for n_rows in rows]


def _single_tokens(trace: Trace, calls: Sequence[IntArray], session: int) -> IntArray:
    """Rows of a session's tokens that were computed alone."""
    sizes = calls[session]
    first = int(trace.offsets[session]) + np.cumsum(sizes) - sizes
    rows: IntArray = first[sizes == 1]
    return rows


def _ids(trace: Trace, of: LayerClass, rows: IntArray) -> NDArray[np.int32]:
    """As the library takes them, ``[token, layer, k]``."""
    return np.ascontiguousarray(np.stack([trace.ids[layer][rows] for layer in of.layers], axis=1), dtype=np.int32)
