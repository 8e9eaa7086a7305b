"""All predictors of all layers: learned from calibration sessions, judged on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import frequencies
from spark_runtime.predict.fitted import FittedLayer, LayerInputs, Trainer, fit
from spark_runtime.predict.judging import Recall, mean_recall, session_recalls
from spark_runtime.predict.kinds import PredictorKind
from spark_runtime.predict.mlp import Training, train
from spark_runtime.simulator.traces import Trace

__all__ = ["Judged", "Sessions", "judge", "learn", "recall_counts"]

HiddenOf = Callable[[str, int], NDArray[np.floating]]
"""From kind and layer to ``[token, value]`` of all tokens of a trace."""
_ALWAYS = (8, 16, 24)


@dataclass(frozen=True, slots=True)
class Sessions:
    """A trace with the hidden states of its tokens; ``tokens`` are their places in what ``hidden`` gives."""

    trace: Trace
    hidden: HiddenOf | None = None
    tokens: NDArray[np.int64] | None = None

    def inputs(self, layer: int, kinds: Sequence[str]) -> LayerInputs:
        """What predictors of a layer read."""
        found: dict[str, NDArray[np.floating]] = {}
        for kind in kinds:
            if self.hidden is None:
                raise ValueError(f"no {kind} hidden states")
            rows = self.hidden(kind, layer)
            found[kind] = rows if self.tokens is None else rows[self.tokens]
        return LayerInputs(self.trace, layer, found)


@dataclass(slots=True)
class Judged:
    """What a predictor was worth."""

    kind: PredictorKind
    recall: Recall
    """Over all layers but the first, which no layer precedes (over the only one, if there is one)."""
    first_layer: Recall
    layers: list[float] = field(default_factory=list)
    """Recall at top-k by layer, the first one's too."""
    cost_s: float = 0.0
    """Seconds that predicting all layers' selections of one token takes with NumPy."""


def recall_counts(trace: Trace) -> tuple[int, ...]:
    """What recall is asked at: 8, 16 and 24, and one, two and three times the most that a layer selects."""
    top_k = max(ids.shape[1] for ids in trace.ids)
    return tuple(sorted({*_ALWAYS, top_k, 2 * top_k, 3 * top_k}))


def learn(
    kinds: Sequence[PredictorKind],
    calibrating: Sessions,
    training: Training | None = None,
    trainer: Trainer = train,
) -> Iterator[tuple[int, PredictorKind, FittedLayer]]:
    """Layer after layer, every predictor of it as soon as it has learned; ``ValueError`` without tokens."""
    trace = calibrating.trace
    profile = frequencies([trace.counts(one) for one in range(trace.n_sessions)], trace.lengths.tolist())
    for layer in range(len(trace.ids)):
        inputs = calibrating.inputs(layer, _hidden_kinds(kinds))
        for kind in kinds:
            yield layer, kind, fit(kind, inputs, profile[layer].astype(np.float32), training, trainer)


def judge(
    fitted: Mapping[PredictorKind, Sequence[FittedLayer]],
    judging: Sessions,
    advance: Callable[[float], None] = lambda _: None,
) -> list[Judged]:
    """Recall and cost of every predictor; ``advance`` hears of each layer that is done.

    Raises ``ValueError`` without a session that has tokens.
    """
    trace = judging.trace
    counts = recall_counts(trace)
    recalls: dict[PredictorKind, list[NDArray[np.float64]]] = {kind: [] for kind in fitted}
    costs = dict.fromkeys(fitted, 0.0)
    for layer in range(len(trace.ids)):
        inputs = judging.inputs(layer, _hidden_kinds(list(fitted)))
        for kind, layers in fitted.items():
            recalls[kind].append(session_recalls(trace, layer, layers[layer].scores(inputs), counts))
            costs[kind] += layers[layer].cost_s(inputs)
            advance(1)
    result = []
    for kind, found in recalls.items():
        one = Judged(kind, mean_recall(found[1:] or found, counts), mean_recall(found[:1], counts))
        for ids, layer_recall in zip(trace.ids, found, strict=True):
            place = counts.index(ids.shape[1]) if ids.shape[1] in counts else 0
            one.layers.append(float(np.nanmean(layer_recall[:, place])))
        one.cost_s = costs[kind]
        result.append(one)
    return result


def _hidden_kinds(kinds: Sequence[PredictorKind]) -> list[str]:
    return sorted({kind.hidden for kind in kinds if kind.hidden is not None})
