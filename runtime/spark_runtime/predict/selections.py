"""What selections say at the time of a prediction: the layers before, the tokens before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spark_runtime.simulator.traces import Trace

__all__ = ["indicators", "last_selections", "moving_averages", "recall_at"]

FloatArray = NDArray[np.float32]


def indicators(ids: NDArray[np.integer], n_experts: int) -> FloatArray:
    """``[token, expert]``: 1 where ``ids[token, k]`` names the expert, else 0."""
    result = np.zeros((len(ids), n_experts), dtype=np.float32)
    np.put_along_axis(result, ids.astype(np.int64), np.float32(1), axis=1)
    return result


def last_selections(trace: Trace, layer: int) -> FloatArray:
    """``[token, expert]``: 1 for what the layer selected for the token before; a session's first has none."""
    result = np.zeros((trace.n_tokens, trace.n_experts[layer]), dtype=np.float32)
    result[1:] = indicators(trace.ids[layer][:-1], trace.n_experts[layer])
    result[trace.offsets[:-1][trace.lengths > 0]] = 0
    return result


def moving_averages(
    trace: Trace, layer: int, decay: float, prior: NDArray[np.floating] | None = None, prior_tokens: float = 0.0
) -> FloatArray:
    """``[token, expert]``: selections of the tokens before, decayed by each token, plus the prior of a profile.

    The score of the slot policy (``native/slots.cpp``) at the time of each token, every session from a fresh start.
    ``prior`` holds the layer's frequencies, which sum to 1 and are worth ``prior_tokens`` tokens. Raises ``ValueError``
    for a decay outside 0 to 1.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay {decay}, expected 0 to 1")
    n_experts, top_k = trace.n_experts[layer], trace.ids[layer].shape[1]
    result = np.zeros((trace.n_tokens, n_experts), dtype=np.float32)
    # Sessions by length, most first: those with another token are neighbours, and all of them take it together.
    by_length = np.argsort(-trace.lengths, kind="stable")
    first, lengths = trace.offsets[:-1][by_length], trace.lengths[by_length]
    score = np.zeros((len(first), n_experts), dtype=np.float32)
    for position in range(int(lengths.max(initial=0))):
        active = int(np.searchsorted(-lengths, -position, side="left"))
        rows = first[:active] + position
        result[rows] = score[:active]
        score[:active] *= np.float32(decay)
        places = trace.ids[layer][rows].astype(np.int64)
        values = np.take_along_axis(score[:active], places, axis=1)
        np.put_along_axis(score[:active], places, values + np.float32(1), axis=1)
    if prior is not None and prior_tokens:
        result += (prior * (top_k * prior_tokens)).astype(np.float32)
    return result


def recall_at(scores: NDArray[np.floating], ids: NDArray[np.integer], counts: tuple[int, ...]) -> tuple[float, ...]:
    """Share of ``ids[token, k]`` among the ``n`` highest of ``scores[token, expert]``, for each ``n`` of ``counts``.

    Equal scores go to the lower id. Raises ``ValueError`` without tokens or for more experts than there are.
    """
    if not len(ids):
        raise ValueError("no tokens, expected at least one")
    if not all(1 <= count <= scores.shape[1] for count in counts):
        raise ValueError(f"the best {max(counts)} of {scores.shape[1]} experts, expected 1 to all")
    ranked = np.argsort(-scores, axis=1, kind="stable")
    rank = np.empty(ranked.shape, dtype=np.int64)
    np.put_along_axis(rank, ranked, np.broadcast_to(np.arange(scores.shape[1]), ranked.shape), axis=1)
    found = np.take_along_axis(rank, ids.astype(np.int64), axis=1)
    return tuple(float((found < count).mean()) for count in counts)
