"""A network with one hidden layer that gives every expert of a layer a score, trained with NumPy.

The network, its start, the order of its batches and its optimiser are the same in
:mod:`spark_runtime.predict.mlp_torch`, which does this on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spark_runtime.predict.losses import LossName, derivative

__all__ = ["Network", "Training", "batches", "initial_network", "learning_rate", "train"]

FloatArray = NDArray[np.float32]
Features = Callable[[NDArray[np.int64]], tuple[FloatArray, FloatArray]]
"""From places of tokens to their ``[token, feature]`` and ``[token, expert]``."""
_C = np.float32(np.sqrt(2 / np.pi))
_CUBIC = np.float32(0.044715)
_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
_SMALLEST_SCALE = 1e-3


@dataclass(frozen=True, slots=True)
class Training:
    """How a network is trained."""

    width: int = 512
    """Of the hidden layer; 0 leaves it out."""
    epochs: int = 8
    batch: int = 512
    rate: float = 2e-3
    """Of Adam (Kingma and Ba 2014) at the start; it falls to 0 in a straight line."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Network:
    """Features to scores: centred and scaled, one hidden layer with GELU (Hendrycks and Gimpel 2016; tanh form).

    With a hidden layer of width 0 the scores are linear in the features.
    """

    center: FloatArray
    """``[feature]``"""
    scale: FloatArray
    """``[feature]``: what a centred feature is divided by."""
    hidden_weights: FloatArray
    """``[feature, hidden]``"""
    hidden_bias: FloatArray
    weights: FloatArray
    """``[hidden, expert]``, or ``[feature, expert]``"""
    bias: FloatArray

    def scores(self, features: FloatArray) -> FloatArray:
        """``[token, expert]`` of ``[token, feature]``."""
        after = self._scaled(features)
        if len(self.hidden_bias):
            before = np.matmul(after, self.hidden_weights) + self.hidden_bias
            after = before * _gate(before)[0]
        result: FloatArray = np.matmul(after, self.weights) + self.bias
        return result

    def derivatives(self, name: LossName, features: FloatArray, selected: FloatArray) -> tuple[FloatArray, ...]:
        """Of a batch's loss by the trained arrays, in the order of :attr:`trained`."""
        scaled = self._scaled(features)
        if not len(self.hidden_bias):
            by_scores = derivative(name, np.matmul(scaled, self.weights) + self.bias, selected)
            unused = np.zeros_like(self.hidden_weights), np.zeros_like(self.hidden_bias)
            return *unused, np.matmul(scaled.T, by_scores), by_scores.sum(axis=0)
        before: FloatArray = np.matmul(scaled, self.hidden_weights) + self.hidden_bias
        gate, slope = _gate(before)
        after: FloatArray = before * gate
        scores: FloatArray = np.matmul(after, self.weights) + self.bias
        by_scores = derivative(name, scores, selected)
        by_before: FloatArray = np.matmul(by_scores, self.weights.T) * (gate + before * slope)
        by_weights = np.matmul(scaled.T, by_before), np.matmul(after.T, by_scores)
        return by_weights[0], by_before.sum(axis=0), by_weights[1], by_scores.sum(axis=0)

    @property
    def trained(self) -> tuple[FloatArray, ...]:
        """What training changes."""
        return self.hidden_weights, self.hidden_bias, self.weights, self.bias

    def with_trained(self, arrays: Sequence[FloatArray]) -> Network:
        """The network after training."""
        return replace(self, hidden_weights=arrays[0], hidden_bias=arrays[1], weights=arrays[2], bias=arrays[3])

    def _scaled(self, features: FloatArray) -> FloatArray:
        return (features - self.center) / self.scale


def _gate(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """What GELU multiplies its argument with, and that one's derivative."""
    half, three = np.float32(0.5), np.float32(3)
    squares = values * values
    bent = np.tanh(_C * values * (1 + _CUBIC * squares))
    slope: FloatArray = half * (1 - bent * bent) * _C * (1 + three * _CUBIC * squares)
    return half * (1 + bent), slope


def initial_network(features: FloatArray, n_experts: int, training: Training) -> Network:
    """A network before training, for features like a sample of them; the same whatever it is then trained for."""
    random = np.random.default_rng(training.seed)
    n_features = features.shape[1]

    def drawn(rows: int, columns: int) -> FloatArray:
        bound = 1 / np.sqrt(max(1, rows))
        return random.uniform(-bound, bound, (rows, columns)).astype(np.float32)

    return Network(
        center=features.mean(axis=0, dtype=np.float64).astype(np.float32),
        scale=np.maximum(features.std(axis=0, dtype=np.float64), _SMALLEST_SCALE).astype(np.float32),
        hidden_weights=drawn(n_features, training.width),
        hidden_bias=np.zeros(training.width, np.float32),
        weights=drawn(training.width or n_features, n_experts),
        bias=np.zeros(n_experts, np.float32),
    )


def batches(n_tokens: int, training: Training) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Step and places of every batch, in an order that the seed alone decides."""
    random = np.random.default_rng([training.seed, 1])
    step = 0
    for _ in range(training.epochs):
        order = random.permutation(n_tokens)
        for start in range(0, n_tokens, training.batch):
            yield step, order[start : start + training.batch]
            step += 1


def learning_rate(step: int, n_tokens: int, training: Training) -> float:
    """Of a step, counted from 0."""
    steps = training.epochs * -(-n_tokens // training.batch)
    return training.rate * (1 - step / steps)


def train(network: Network, name: LossName, data: Features, n_tokens: int, training: Training) -> Network:
    """The network after training on tokens ``0`` to ``n_tokens``."""
    arrays = tuple(array.copy() for array in network.trained)
    means = [np.zeros_like(array) for array in arrays]
    squares = [np.zeros_like(array) for array in arrays]
    for step, places in batches(n_tokens, training):
        features, selected = data(places)
        gradients = network.with_trained(arrays).derivatives(name, features, selected)
        rate = learning_rate(step, n_tokens, training)
        first, second = (1 - beta ** (step + 1) for beta in _BETAS)
        for array, gradient, mean, square in zip(arrays, gradients, means, squares, strict=True):
            mean += np.float32(1 - _BETAS[0]) * (gradient - mean)
            square += np.float32(1 - _BETAS[1]) * (gradient * gradient - square)
            array -= np.float32(rate / first) * mean / (np.sqrt(square / np.float32(second)) + np.float32(_EPSILON))
    return network.with_trained(arrays)
