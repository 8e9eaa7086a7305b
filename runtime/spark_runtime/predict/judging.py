"""How much of what a layer selected was among the highest scores: by session, with an interval over sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.placement import Interval, bootstrap_intervals
from spark_runtime.predict.features import blocks
from spark_runtime.simulator.traces import Trace

__all__ = ["Recall", "mean_recall", "session_recalls"]


@dataclass(frozen=True, slots=True)
class Recall:
    """A predictor's recall at every count that was asked for, over some layers."""

    counts: tuple[int, ...]
    at: tuple[Interval, ...]
    """Mean over sessions of the share of selections that were predicted, with its 95% bootstrap interval."""

    def of(self, count: int) -> Interval:
        """At a count."""
        return self.at[self.counts.index(count)]


def session_recalls(
    trace: Trace, layer: int, scores: NDArray[np.floating], counts: Sequence[int]
) -> NDArray[np.float64]:
    """``[session, count]``: share of a layer's selections among the ``count`` highest scores, NaN without tokens.

    Equal scores go to the lower expert. More than there are experts is all of them.
    """
    found = np.zeros((trace.n_tokens, len(counts)))
    ids = trace.ids[layer].astype(np.int64)
    most = min(max(counts), scores.shape[1])
    for part in blocks(trace.n_tokens):
        best = np.argsort(-scores[part], axis=1, kind="stable")[:, :most]
        rank = np.full(scores[part].shape, most, dtype=np.int64)
        np.put_along_axis(rank, best, np.broadcast_to(np.arange(most), best.shape), axis=1)
        ranks = np.take_along_axis(rank, ids[part], axis=1)
        # Beyond the last one asked for nobody ranks: of as many as there are experts, all are found.
        found[part] = np.stack([(ranks < count).mean(axis=1) for count in counts], axis=1)
    sums = np.concatenate([np.zeros((1, len(counts))), np.cumsum(found, axis=0)])
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = np.diff(sums[trace.offsets], axis=0) / trace.lengths[:, None]
    return means


def mean_recall(layers: Sequence[NDArray[np.float64]], counts: Sequence[int]) -> Recall:
    """Mean over layers of :func:`session_recalls`; ``ValueError`` without a session that has tokens."""
    sessions = np.mean(layers, axis=0)
    sessions = sessions[~np.isnan(sessions).any(axis=1)]
    return Recall(tuple(counts), tuple(bootstrap_intervals(sessions)))
