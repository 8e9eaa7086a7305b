"""What to offer in place of a workload that nobody has recorded: measured, and said with its number."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from spark_runtime.placement import layer_sizes
from spark_schemas.api import API_PREFIX
from spark_schemas.histogram import SessionHistogram
from spark_schemas.ids import Phase
from spark_schemas.manifest_api import NearestWorkloads, NearWorkload
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile
from spark_service.errors import RequestError
from spark_service.nearest import NEAREST_RESIDENCY, most_general, rank_profiles

__all__ = ["GeneralHints", "general_hint", "rank_workloads"]

MAX_HINTS = 256
RESTS_PER_MEASUREMENT = 20


class GeneralHints:
    """Hints by model and phase, measured anew when something was written since.

    Measuring takes at most a twentieth of the time: wrong names must not keep the service busy.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hints: OrderedDict[tuple[str, Phase], _Hint] = OrderedDict()
        self._lock = threading.Lock()

    def hint(
        self, shape: ModelShape, phase: Phase, generation: int, profiles: Callable[[], Mapping[str, Profile]]
    ) -> str:
        """The hint for a model, measured from its ``profiles`` unless the last one is still good."""
        key = (shape.fingerprint, phase)
        with self._lock:
            began_seconds = self._clock()
            found = self._hints.get(key)
            if found is not None and (found.generation == generation or began_seconds < found.good_until_seconds):
                return found.text
            text = general_hint(profiles())
            ended_seconds = self._clock()
            rest_seconds = RESTS_PER_MEASUREMENT * (ended_seconds - began_seconds)
            self._hints[key] = _Hint(generation, text, ended_seconds + rest_seconds)
            self._hints.move_to_end(key)
            while len(self._hints) > MAX_HINTS:
                self._hints.popitem(last=False)
            return text


@dataclass(frozen=True, slots=True)
class _Hint:
    generation: int
    text: str
    good_until_seconds: float


def general_hint(profiles: Mapping[str, Profile]) -> str:
    """Name the workload to use in the meantime, with what that rests on; empty without any."""
    if not profiles:
        return ""
    ask = f"POST {API_PREFIX}/workloads/nearest with a session's counts measures which fits it best"
    found = most_general(profiles)
    if found is None:
        return f"; until then one of {', '.join(sorted(profiles))} may do, though nothing measures which; {ask}"
    return (
        f"; until then use {found.workload}: with {NEAREST_RESIDENCY:.0%} of the experts its profile misses "
        f"{found.cold_hit_rate:.1%} on {found.n_sessions} held-out sessions of {found.n_workloads} other "
        f"workload{'' if found.n_workloads == 1 else 's'}, the least of all; {ask}"
    )


def rank_workloads(
    shape: ModelShape, phase: Phase, session: SessionHistogram, profiles: Mapping[str, Profile]
) -> NearestWorkloads:
    """Rank profiles by their cold-hit rate on one session.

    Raises :class:`RequestError`: 404 without profiles, 422 for a session without selections in the phase or of layers
    that the stored model does not have.
    """
    histogram = session.decode if phase == "decode" else session.prefill
    found = [] if histogram is None else [(layer.block, len(layer.counts)) for layer in histogram.layers]
    if histogram is None or not any(any(layer.counts) for layer in histogram.layers):
        raise _unusable(phase, "no selections", "at least one", "send the phase's counts, or ask for the other phase")
    expected = [(layer.block, layer.n_experts) for layer in shape.layers]
    if found != expected:
        raise _unusable(
            phase,
            f"{len(found)} layers of other blocks or experts",
            f"the {len(expected)} layers of {shape.fingerprint}",
            "two agents disagree about one fingerprint: bring both to the same version of spark-moe",
        )
    if not profiles:
        raise RequestError(
            404,
            "no_profiles",
            f"{shape.fingerprint}: found no workload with {phase} profiles, expected at least one",
            field="model.fingerprint",
            hint="record sessions with this model and upload them: spark-agent record MODEL --workload NAME",
        )
    frequencies = {name: [np.array(layer.shares) for layer in one.layers] for name, one in profiles.items()}
    counts = [np.array(layer.counts, dtype=np.int64) for layer in histogram.layers]
    ranked, oracle = rank_profiles(layer_sizes(shape), frequencies, counts)
    best = ranked[0][1]
    return NearestWorkloads(
        fingerprint=shape.fingerprint,
        phase=phase,
        residency=NEAREST_RESIDENCY,
        oracle_cold_hit_rate=_rate(oracle),
        workloads=tuple(
            NearWorkload(
                workload=name,
                cold_hit_rate=_rate(rate),
                mismatch=_rate(rate - best),
                n_calibration=profiles[name].n_calibration,
            )
            for name, rate in ranked
        ),
    )


def _rate(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _unusable(phase: Phase, found: str, expected: str, hint: str) -> RequestError:
    field = f"sessions[0].{phase}"
    return RequestError(
        422,
        "counts_unusable",
        f"{field}: found {found}, expected {expected}",
        field=field,
        found=found,
        expected=expected,
        hint=hint,
    )
