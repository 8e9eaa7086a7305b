"""What a layer's predictor reads, as one matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spark_runtime.predict.selections import indicators
from spark_runtime.simulator.traces import Trace

__all__ = ["blocks", "earlier_layers", "feature_matrix", "normalised"]

FloatArray = NDArray[np.float32]
_TOKENS_AT_ONCE = 8192
_SMALLEST_SQUARE = 1e-6


def earlier_layers(layer: int, n_earlier: int) -> range:
    """The layers whose selections predict ``layer``: up to ``n_earlier`` before it, fewer at the start."""
    return range(max(0, layer - n_earlier), layer)


def blocks(n_tokens: int) -> list[slice]:
    """So many tokens in parts that fit in memory whatever is computed of them."""
    return [slice(start, min(start + _TOKENS_AT_ONCE, n_tokens)) for start in range(0, n_tokens, _TOKENS_AT_ONCE)]


def normalised(hidden: NDArray[np.floating]) -> FloatArray:
    """``[token, value]`` at a mean square of 1, as a model's own norms do: how far a residual has grown says little."""
    values = hidden.astype(np.float32)
    scale = np.sqrt(np.mean(np.square(values), axis=1, keepdims=True) + np.float32(_SMALLEST_SQUARE))
    values /= scale
    return values


def feature_matrix(
    trace: Trace,
    layer: int,
    rows: slice,
    n_earlier: int,
    *,
    constant: bool = False,
    average: FloatArray | None = None,
    hidden: NDArray[np.floating] | None = None,
) -> FloatArray:
    """``[token, feature]`` of some rows of a trace.

    In this order: the earlier layers' experts (1 where selected), a constant, the moving average of the layer's own
    selections, and the hidden states, normalised. ``average`` and ``hidden`` are ``[token, value]`` of the whole trace.
    """
    parts = [indicators(trace.ids[place][rows], trace.n_experts[place]) for place in earlier_layers(layer, n_earlier)]
    if constant:
        parts.append(np.ones((rows.stop - rows.start, 1), np.float32))
    if average is not None:
        parts.append(average[rows])
    if hidden is not None:
        parts.append(normalised(hidden[rows]))
    return np.concatenate(parts, axis=1) if parts else np.empty((rows.stop - rows.start, 0), np.float32)
