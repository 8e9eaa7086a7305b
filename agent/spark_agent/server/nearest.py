"""Which known workload unlabelled traffic looks like. Pure but for :class:`WorkloadsHere`.

Near is what is measured: the cold-hit rate that a profile's hot set has on counts it was not made from, with one share
of the experts' bytes, placed once and never changed. The calibration service measures the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from spark_agent.manifests import ManifestStore
from spark_agent.paths import manifests_dir
from spark_runtime.placement import cold_hit_rates, greedy_slots, hot_set, layer_sizes, residency_budget, shares
from spark_schemas.ids import WORKLOAD_PATTERN
from spark_schemas.manifest import PlacementManifest
from spark_schemas.model import ModelShape

if TYPE_CHECKING:
    from spark_agent.own_sessions import OwnSessions

__all__ = ["MINIMUM_DECODE_TOKENS", "NEAREST_RESIDENCY", "KnownWorkloads", "Suggestion", "WorkloadsHere"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

NEAREST_RESIDENCY = 0.6
"""Share of the experts' bytes at which profiles are compared."""
Source = Literal["service", "local"]
"""Whose profile: a team's, that was pulled, or that of this machine's own sessions."""
MINIMUM_DECODE_TOKENS = 256
"""Of a session, before anything is said of it."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The nearest workload and what that rests on."""

    workload: str
    cold_hit_rate: float
    """Of its profile on these counts, at :data:`NEAREST_RESIDENCY`."""
    best_cold_hit_rate: float
    """Of the best placement for exactly these counts: no profile can do better."""
    decode_tokens: int
    others: tuple[tuple[str, float], ...]
    """The other workloads' rates, nearest first."""
    source: Source = "service"


class KnownWorkloads:
    """The hot sets of the workloads that have a profile of one model."""

    def __init__(
        self,
        shape: ModelShape,
        frequencies: Mapping[str, Sequence[FloatArray]],
        own: Mapping[str, Sequence[FloatArray]] | None = None,
    ) -> None:
        """``frequencies[workload][layer][expert]`` are the pulled profiles', ``own`` those of this machine's sessions.

        A workload may have both.
        """
        self._layers = layer_sizes(shape)
        self._budget = residency_budget(self._layers, NEAREST_RESIDENCY)
        found: dict[tuple[str, Source], Sequence[FloatArray]] = {
            (name, "service"): frequencies[name] for name in frequencies
        }
        found |= {(name, "local"): frequency for name, frequency in (own or {}).items()}
        self._hot = {of: self._placed(frequency) for of, frequency in found.items()}

    def __len__(self) -> int:
        return len({name for name, _ in self._hot})

    def nearest(self, counts: Sequence[IntArray], decode_tokens: int) -> Suggestion | None:
        """The workload whose profile misses least on a session's decode ``counts[layer][expert]``; ties by name.

        ``None`` where no profile is known, or the session is too short to tell.
        """
        if not self._hot or decode_tokens < MINIMUM_DECODE_TOKENS or not any(layer.any() for layer in counts):
            return None
        stacked = [layer[np.newaxis, :] for layer in counts]

        def rate(hot: list[IntArray]) -> float:
            return float(cold_hit_rates(stacked, hot)[0])

        # Where both profiles of a workload miss equally little, the team's rests on more.
        rates = sorted((rate(hot), name, source != "service") for (name, source), hot in self._hot.items())
        lowest, nearest, is_own = rates[0]
        others: dict[str, float] = {}
        for missed, name, _ in rates:
            if name != nearest:
                others.setdefault(name, missed)
        return Suggestion(
            nearest,
            lowest,
            rate(self._placed(shares(counts))),
            decode_tokens,
            tuple(others.items()),
            "local" if is_own else "service",
        )

    def _placed(self, frequency: Sequence[FloatArray]) -> list[IntArray]:
        return hot_set(frequency, greedy_slots(frequency, self._layers, self._budget))


class WorkloadsHere:
    """The workloads (no mixes) of one model that a manifest was pulled of, or that enough was served of here.

    Read again when another one is pulled, or a session closed. Not for the thread that computes: it takes a while.
    """

    def __init__(self, shape: ModelShape, own: OwnSessions | None = None) -> None:
        self._shape = shape
        self._own = own
        self._folder = manifests_dir() / shape.fingerprint
        self._seen: tuple[int | None, int] | None = None
        self._known = KnownWorkloads(shape, {})

    def __call__(self) -> KnownWorkloads:
        """What is there now; damaged ones are left out."""
        try:
            pulled = self._folder.stat().st_mtime_ns
        except OSError:
            pulled = None
        changed = (pulled, 0 if self._own is None else self._own.kept)
        if changed != self._seen:
            self._seen = changed
            own = {} if self._own is None else self._own.frequencies()
            self._known = KnownWorkloads(self._shape, self._read(), own)
        return self._known

    def _read(self) -> dict[str, Sequence[FloatArray]]:
        store = ManifestStore(manifests_dir())
        found: dict[str, Sequence[FloatArray]] = {}
        for path in sorted(self._folder.glob("*.json")):
            manifest = None
            if re.fullmatch(WORKLOAD_PATTERN, path.stem):
                manifest = store.get(self._shape.fingerprint, path.stem)
            if manifest is not None and manifest.workload == path.stem and _fits(manifest, self._shape):
                found[path.stem] = [
                    np.asarray(layer.prior, dtype=np.float64) / max(sum(layer.prior), 1) for layer in manifest.layers
                ]
        return found


def _fits(manifest: PlacementManifest, shape: ModelShape) -> bool:
    return manifest.fingerprint == shape.fingerprint and [
        (layer.block, layer.n_experts) for layer in manifest.layers
    ] == [(layer.block, layer.n_experts) for layer in shape.layers]
