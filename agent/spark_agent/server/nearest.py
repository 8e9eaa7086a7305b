"""Which known workload unlabelled traffic looks like. Pure but for :class:`PulledWorkloads`.

Near is what is measured: the cold-hit rate that a profile's hot set has on counts it was not made from, with one share
of the experts' bytes, placed once and never changed. The calibration service measures the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_agent.manifests import ManifestStore
from spark_agent.paths import manifests_dir
from spark_runtime.placement import cold_hit_rates, greedy_slots, hot_set, layer_sizes, residency_budget, shares
from spark_schemas.ids import WORKLOAD_PATTERN
from spark_schemas.manifest import PlacementManifest
from spark_schemas.model import ModelShape

__all__ = ["MINIMUM_DECODE_TOKENS", "NEAREST_RESIDENCY", "KnownWorkloads", "PulledWorkloads", "Suggestion"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

NEAREST_RESIDENCY = 0.6
"""Share of the experts' bytes at which profiles are compared."""
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


class KnownWorkloads:
    """The hot sets of the workloads that have a profile of one model."""

    def __init__(self, shape: ModelShape, frequencies: Mapping[str, Sequence[FloatArray]]) -> None:
        """``frequencies[workload][layer][expert]`` are the profiles'."""
        self._layers = layer_sizes(shape)
        self._budget = residency_budget(self._layers, NEAREST_RESIDENCY)
        self._hot = {name: self._placed(frequency) for name, frequency in sorted(frequencies.items())}

    def __len__(self) -> int:
        return len(self._hot)

    def nearest(self, counts: Sequence[IntArray], decode_tokens: int) -> Suggestion | None:
        """The workload whose profile misses least on a session's decode ``counts[layer][expert]``; ties by name.

        ``None`` where no profile is known, or the session is too short to tell.
        """
        if not self._hot or decode_tokens < MINIMUM_DECODE_TOKENS or not any(layer.any() for layer in counts):
            return None
        stacked = [layer[np.newaxis, :] for layer in counts]

        def rate(hot: list[IntArray]) -> float:
            return float(cold_hit_rates(stacked, hot)[0])

        rates = sorted(((name, rate(hot)) for name, hot in self._hot.items()), key=lambda one: one[::-1])
        (name, lowest), *others = rates
        return Suggestion(name, lowest, rate(self._placed(shares(counts))), decode_tokens, tuple(others))

    def _placed(self, frequency: Sequence[FloatArray]) -> list[IntArray]:
        return hot_set(frequency, greedy_slots(frequency, self._layers, self._budget))


class PulledWorkloads:
    """The workloads (no mixes) that a manifest was pulled of for one model, read again when another one is."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._folder = manifests_dir() / shape.fingerprint
        self._seen: int | None = None
        self._known = KnownWorkloads(shape, {})

    def __call__(self) -> KnownWorkloads:
        """What is there now; damaged ones are left out."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except OSError:
            changed = None
        if changed != self._seen:
            self._seen = changed
            self._known = KnownWorkloads(self._shape, self._read())
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
