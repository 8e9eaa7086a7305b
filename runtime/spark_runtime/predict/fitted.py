"""One layer's predictor after training: arrays, what they mean, and how a token is scored by them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spark_runtime.predict.features import blocks, earlier_layers, feature_matrix, normalised
from spark_runtime.predict.kinds import TRAINED, PredictorKind
from spark_runtime.predict.mlp import Network, Training, initial_network, train
from spark_runtime.predict.predictors import NaiveBayes, Ridge
from spark_runtime.predict.selections import indicators, last_selections, moving_averages
from spark_runtime.simulator.traces import Trace
from spark_runtime.tier_start import DECAY, PRIOR_TOKENS

__all__ = ["FittedLayer", "LayerInputs", "Trainer", "fit", "fitted_shapes"]

FloatArray = NDArray[np.float32]
Trainer = Callable[..., Network]
"""``mlp.train``, or ``mlp_torch.train`` with its device."""
_SAMPLE = 65536
"""Tokens that features are centred and scaled by."""
_TIMED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A trace, and the hidden states of one of its layers by kind, ``[token, value]``."""

    trace: Trace
    layer: int
    hidden: Mapping[str, NDArray[np.floating]]

    def average(self) -> FloatArray:
        """``[token, expert]``: the layer's moving average, as a rate."""
        return moving_averages(self.trace, self.layer, DECAY) * np.float32(1 - DECAY)

    def hidden_of(self, kind: PredictorKind) -> NDArray[np.floating] | None:
        """The hidden states that a predictor reads."""
        return None if kind.hidden is None else self.hidden[kind.hidden]


@dataclass(frozen=True, slots=True)
class FittedLayer:
    """A predictor of one layer."""

    kind: PredictorKind
    arrays: Mapping[str, FloatArray]
    """By name; see :func:`fitted_shapes`."""

    def scores(self, inputs: LayerInputs) -> FloatArray:
        """``[token, expert]``: the higher, the likelier."""
        trace, layer, kind, arrays = inputs.trace, inputs.layer, self.kind, self.arrays
        if kind.learner == "frequency":
            return np.broadcast_to(arrays["prior"], (trace.n_tokens, len(arrays["prior"])))
        if kind.learner == "temporal":
            # Of what the last token did not select the profile decides: its shares are below 1.
            return last_selections(trace, layer) + arrays["prior"]
        if kind.learner == "moving-average":
            return moving_averages(trace, layer, DECAY, arrays["prior"], PRIOR_TOKENS)
        average = inputs.average() if "average" in kind.features else None
        parts = [
            self._of_features(
                feature_matrix(
                    trace,
                    layer,
                    rows,
                    kind.n_earlier,
                    constant=kind.learner == "ridge",
                    average=average,
                    hidden=inputs.hidden_of(kind),
                )
            )
            for rows in blocks(trace.n_tokens)
        ]
        return np.concatenate(parts) if parts else np.empty((0, trace.n_experts[layer]), np.float32)

    def cost_s(self, inputs: LayerInputs) -> float:
        """Seconds that a prediction of one token takes with NumPy: the median over some tokens.

        What is sparse is read as rows; keeping the moving average is not counted, as the slot policy does that anyway.
        """
        average = inputs.average() if "average" in self.kind.features else None
        seconds = []
        for token in range(min(_TIMED_TOKENS, inputs.trace.n_tokens)):
            rows = [inputs.trace.ids[layer][token] for layer in earlier_layers(inputs.layer, self.kind.n_earlier)]
            hidden = inputs.hidden_of(self.kind)
            vector = None if hidden is None else hidden[token : token + 1]
            mean = None if average is None else average[token]
            last = inputs.trace.ids[inputs.layer][token]
            start = time.perf_counter()
            scores = self._of_token(inputs, rows, mean, vector, last)
            np.argpartition(scores, -inputs.trace.ids[inputs.layer].shape[1])
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds)) if seconds else 0.0

    def _of_features(self, features: FloatArray) -> FloatArray:
        if self.kind.learner in TRAINED:
            return self._network().scores(features)
        result: FloatArray = features @ self.arrays["weights"]
        if "base" in self.arrays:
            result += self.arrays["base"]
        return result

    def _network(self) -> Network:
        return Network(**self.arrays)

    def _of_token(
        self,
        inputs: LayerInputs,
        earlier: list[NDArray[np.integer]],
        average: FloatArray | None,
        hidden: NDArray[np.floating] | None,
        last: NDArray[np.integer],
    ) -> FloatArray:
        if self.kind.learner in {"frequency", "temporal", "moving-average"}:
            scores: FloatArray = self.arrays["prior"].copy()
            scores[last] += 1
            return scores
        if self.kind.learner in TRAINED:
            places = earlier_layers(inputs.layer, self.kind.n_earlier)
            # A first layer may have nothing to read.
            parts = [np.empty(0, np.float32)]
            parts += [
                indicators(ids[None], inputs.trace.n_experts[layer])[0]
                for layer, ids in zip(places, earlier, strict=True)
            ]
            parts += [] if average is None else [average]
            parts += [] if hidden is None else [normalised(hidden)[0]]
            of_one: FloatArray = self._network().scores(np.concatenate(parts)[None])[0]
            return of_one
        weights, start = self.arrays["weights"], 0
        result = self.arrays["base"].copy() if "base" in self.arrays else np.zeros(weights.shape[1], np.float32)
        for layer, ids in zip(earlier_layers(inputs.layer, self.kind.n_earlier), earlier, strict=True):
            result += weights[start + ids].sum(axis=0)
            start += inputs.trace.n_experts[layer]
        if self.kind.learner == "ridge":
            result += weights[start]
            start += 1
        if average is not None:
            result += average @ weights[start : start + len(average)]
            start += len(average)
        if hidden is not None:
            result += normalised(hidden)[0] @ weights[start:]
        return result


def fit(
    kind: PredictorKind,
    inputs: LayerInputs,
    prior: FloatArray,
    training: Training | None = None,
    trainer: Trainer = train,
) -> FittedLayer:
    """Learn a layer's predictor from calibration tokens; ``prior[expert]`` is the profile's frequency.

    Raises ``ValueError`` without tokens.
    """
    if not inputs.trace.n_tokens:
        raise ValueError("no tokens to learn from")
    layer = inputs.layer
    if kind.learner in {"frequency", "temporal", "moving-average"}:
        return FittedLayer(kind, {"prior": prior})
    if kind.learner == "naive-bayes":
        counted = NaiveBayes(layer)
        counted.learn(inputs.trace)
        weights, base = counted.weights
        return FittedLayer(kind, {"weights": weights, "base": base})
    if kind.learner == "ridge":
        ridge = Ridge(layer, n_earlier=kind.n_earlier, average_decay=DECAY if "average" in kind.features else None)
        ridge.learn(inputs.trace, inputs.hidden_of(kind))
        return FittedLayer(kind, {"weights": ridge.weights})
    return _fit_network(kind, inputs, training or Training(), trainer)


def _fit_network(kind: PredictorKind, inputs: LayerInputs, training: Training, trainer: Trainer) -> FittedLayer:
    trace, layer = inputs.trace, inputs.layer
    average = inputs.average() if "average" in kind.features else None
    whole = np.concatenate(
        [
            feature_matrix(trace, layer, rows, kind.n_earlier, average=average, hidden=inputs.hidden_of(kind))
            for rows in blocks(trace.n_tokens)
        ]
    )

    def data(places: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        return whole[places], indicators(trace.ids[layer][places], trace.n_experts[layer])

    if kind.loss is None:
        raise ValueError(f"{kind.name} without a loss")
    if kind.learner == "linear":
        training = replace(training, width=0)
    start = initial_network(whole[:_SAMPLE], trace.n_experts[layer], training)
    network = trainer(start, kind.loss, data, trace.n_tokens, training)
    names = ("center", "scale", "hidden_weights", "hidden_bias", "weights", "bias")
    return FittedLayer(kind, {name: getattr(network, name) for name in names})


def fitted_shapes(
    kind: PredictorKind, layer: int, n_experts: tuple[int, ...], width: int | None, hidden_width: int | None
) -> dict[str, tuple[int, ...]]:
    """Arrays of a predictor by name, with their shapes: ``width`` of a network, ``hidden_width`` of hidden states."""
    own = n_experts[layer]
    if kind.learner in {"frequency", "temporal", "moving-average"}:
        return {"prior": (own,)}
    n_features = sum(n_experts[place] for place in earlier_layers(layer, kind.n_earlier))
    if kind.learner == "naive-bayes":
        return {"weights": (n_features, own), "base": (own,)}
    n_features += own if "average" in kind.features else 0
    n_features += (hidden_width or 0) if kind.hidden is not None else 0
    if kind.learner == "ridge":
        return {"weights": (n_features + 1, own)}
    middle = (width or 0) if kind.learner == "mlp" else 0
    return {
        "center": (n_features,),
        "scale": (n_features,),
        "hidden_weights": (n_features, middle),
        "hidden_bias": (middle,),
        "weights": (middle or n_features, own),
        "bias": (own,),
    }
