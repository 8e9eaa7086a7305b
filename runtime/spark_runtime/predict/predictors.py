"""Predictors of a layer's selection that are learned from traces: naive Bayes and ridge regression.

Both read what the one or two layers before selected for the same token; ridge regression may read the moving average of
the layer's own selections as well. What they learn are sums over tokens, so they can be learned on the way, session by
session, and forgotten with the sums. They are far more revealing than frequencies and stay on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spark_runtime.predict.features import blocks, earlier_layers, feature_matrix
from spark_runtime.predict.selections import indicators, moving_averages
from spark_runtime.simulator.traces import Trace

__all__ = ["NaiveBayes", "Predictor", "Ridge", "earlier_layers"]

FloatArray = NDArray[np.float32]
_SumArray = NDArray[np.float64]


@dataclass(slots=True)
class NaiveBayes:
    """Experts as classes, the selections of the layer before as independent evidence (Maron 1961)."""

    layer: int
    smoothing: float = 1.0
    """Added to every count."""
    n_earlier: int = 1
    _selected: _SumArray | None = None
    """``[expert]``: how often selected."""
    _together: _SumArray | None = None
    """``[evidence, expert]``: how often both were."""

    def learn(self, trace: Trace) -> None:
        """Add a trace's tokens."""
        for rows in blocks(trace.n_tokens):
            evidence = feature_matrix(trace, self.layer, rows, self.n_earlier)
            target = indicators(trace.ids[self.layer][rows], trace.n_experts[self.layer])
            together, selected = (evidence.T @ target).astype(np.float64), target.sum(axis=0, dtype=np.float64)
            self._together = together if self._together is None else self._together + together
            self._selected = selected if self._selected is None else self._selected + selected

    @property
    def weights(self) -> tuple[FloatArray, FloatArray]:
        """``[evidence, expert]`` and ``[expert]``, logarithms; ``ValueError`` before anything was learned."""
        if self._selected is None or self._together is None:
            raise ValueError("nothing was learned")
        chance = (self._together + self.smoothing) / (self._selected + 2 * self.smoothing)
        base = np.log(self._selected + self.smoothing)
        return np.log(chance).astype(np.float32), base.astype(np.float32)

    def scores(self, trace: Trace) -> FloatArray:
        """``[token, expert]``: logarithms of what is proportional to the chance of a selection.

        Raises ``ValueError`` before anything was learned.
        """
        weights, base = self.weights
        parts = [feature_matrix(trace, self.layer, rows, self.n_earlier) @ weights for rows in blocks(trace.n_tokens)]
        result = np.concatenate(parts) if parts else np.empty((0, len(base)), np.float32)
        return result + base


@dataclass(slots=True)
class Ridge:
    """Linear regression of the selection with an L2 penalty (Hoerl and Kennard 1970), from its normal equations.

    Reading two sparse rows of a matrix makes a prediction: a few hundred additions. Hidden states, ``[token, value]``
    of the trace's tokens, may be read as well, which makes it a product with a dense vector.
    """

    layer: int
    penalty: float = 10.0
    n_earlier: int = 2
    average_decay: float | None = None
    """Of the moving average that is read as well; ``None`` reads none."""
    _squares: _SumArray | None = None
    """``[feature, feature]``"""
    _products: _SumArray | None = None
    """``[feature, expert]``"""
    _weights: FloatArray | None = field(default=None, repr=False)

    def learn(self, trace: Trace, hidden: NDArray[np.floating] | None = None) -> None:
        """Add a trace's tokens."""
        average = self._average(trace)
        for rows in blocks(trace.n_tokens):
            features = self._features(trace, rows, average, hidden)
            target = indicators(trace.ids[self.layer][rows], trace.n_experts[self.layer])
            squares, products = (features.T @ features).astype(np.float64), (features.T @ target).astype(np.float64)
            self._squares = squares if self._squares is None else self._squares + squares
            self._products = products if self._products is None else self._products + products
        self._weights = None

    @property
    def weights(self) -> FloatArray:
        """``[feature, expert]``: the earlier layers' experts, a constant, the moving average's, the hidden states'.

        Raises ``ValueError`` before anything was learned.
        """
        if self._weights is None:
            if self._squares is None or self._products is None:
                raise ValueError("nothing was learned")
            damped = self._squares + self.penalty * np.eye(len(self._squares))
            self._weights = np.linalg.solve(damped, self._products).astype(np.float32)
        return self._weights

    def scores(self, trace: Trace, hidden: NDArray[np.floating] | None = None) -> FloatArray:
        """``[token, expert]``: about the chance of a selection, not cut to 0 and 1."""
        average = self._average(trace)
        parts = [self._features(trace, rows, average, hidden) @ self.weights for rows in blocks(trace.n_tokens)]
        return np.concatenate(parts) if parts else np.empty((0, trace.n_experts[self.layer]), np.float32)

    def _average(self, trace: Trace) -> FloatArray | None:
        if self.average_decay is None:
            return None
        # As a rate, so that one penalty suits both kinds of features.
        return moving_averages(trace, self.layer, self.average_decay) * np.float32(1 - self.average_decay)

    def _features(
        self, trace: Trace, rows: slice, average: FloatArray | None, hidden: NDArray[np.floating] | None
    ) -> FloatArray:
        return feature_matrix(trace, self.layer, rows, self.n_earlier, constant=True, average=average, hidden=hidden)


Predictor = NaiveBayes | Ridge
