"""What a network of expert scores is trained for, with its derivative.

Each loss takes ``scores[token, expert]`` and ``selected[token, expert]`` (1 or 0, equally many in each row).
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = ["LOSSES", "LossName", "derivative", "loss"]

FloatArray = NDArray[np.float32]
LossName = Literal["bce", "listnet", "ranknet"]
"""``bce``, binary cross entropy: every expert by itself, is it selected or not (mean over experts). ``listnet``: cross
entropy of the chances to be ranked first, the same for each selected expert (Cao et al. 2007). ``ranknet``: every
selected expert above every other one (Burges et al. 2005), mean over these pairs."""
LOSSES: tuple[LossName, ...] = get_args(LossName)


def loss(name: LossName, scores: FloatArray, selected: FloatArray) -> float:
    """Mean over tokens."""
    if name == "bce":
        return float(np.mean(_softplus(scores) - selected * scores))
    if name == "listnet":
        return float(-np.sum(_wanted(selected) * _log_chances(scores)) / len(scores))
    above, others, _, pairs = _pairs(scores, selected)
    return float(np.sum(_softplus(above) * others) / pairs)


def derivative(name: LossName, scores: FloatArray, selected: FloatArray) -> FloatArray:
    """``[token, expert]``: of :func:`loss` by the scores."""
    if name == "bce":
        return (_sigmoid(scores) - selected) / np.float32(scores.size)
    if name == "listnet":
        return (np.exp(_log_chances(scores)) - _wanted(selected)) / np.float32(len(scores))
    above, others, places, pairs = _pairs(scores, selected)
    pushed = _sigmoid(above) * others
    gradient: FloatArray = pushed.sum(axis=1)
    np.put_along_axis(gradient, places, -pushed.sum(axis=2), axis=1)
    return gradient / pairs


def _wanted(selected: FloatArray) -> FloatArray:
    result: FloatArray = selected / selected.sum(axis=1, keepdims=True)
    return result


def _log_chances(scores: FloatArray) -> FloatArray:
    shifted = scores - scores.max(axis=1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _pairs(scores: FloatArray, selected: FloatArray) -> tuple[FloatArray, FloatArray, NDArray[np.int64], np.float32]:
    """How far each expert is above the k-th selected one, ``[token, k, expert]``; which of them are not selected.

    Then where the selected ones are, ``[token, k]``, and how many pairs that makes.
    """
    top_k = int(selected[0].sum())
    places = np.argsort(-selected, axis=1, kind="stable")[:, :top_k]
    above = scores[:, None, :] - np.take_along_axis(scores, places, axis=1)[:, :, None]
    n_pairs = np.float32(max(1, top_k * (scores.shape[1] - top_k) * len(scores)))
    return above, (1 - selected)[:, None, :], places, n_pairs


def _sigmoid(values: FloatArray) -> FloatArray:
    half = np.float32(0.5)
    result: FloatArray = half * np.tanh(half * values) + half
    return result


def _softplus(values: FloatArray) -> FloatArray:
    result: FloatArray = np.maximum(values, 0) + np.log1p(np.exp(-np.abs(values)))
    return result
