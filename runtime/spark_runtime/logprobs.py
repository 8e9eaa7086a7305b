"""How likely the model itself found tokens: before any sampling parameter. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["likeliest", "log_probabilities"]


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural logarithms of the softmax over logits ``[n_vocab]``."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return values


def likeliest(logprobs: NDArray[np.float64], n: int) -> list[tuple[int, float]]:
    """The ``n`` likeliest tokens with their logarithms, likeliest first; of equal ones the lower id."""
    n = min(n, len(logprobs))
    if not n:
        return []
    least = np.partition(logprobs, len(logprobs) - n)[len(logprobs) - n]
    found = np.flatnonzero(logprobs >= least)
    order = found[np.lexsort((found, -logprobs[found]))][:n]
    return [(int(token), float(logprobs[token])) for token in order]
