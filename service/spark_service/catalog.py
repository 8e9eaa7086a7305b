"""Profiles and manifests on demand, from what is stored now, remembered by revision."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from spark_schemas.histogram import SessionHistogram
from spark_schemas.ids import Phase
from spark_schemas.manifest import PlacementManifest
from spark_schemas.manifest_api import NearestWorkloads
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile, ProfileSummary
from spark_service.builders import BuiltProfile, Inputs, build_profile, revision_of
from spark_service.db.store import Store
from spark_service.db.tallies import Counted, TallyKey
from spark_service.errors import RequestError, StorageError
from spark_service.executors import Executor, LocalExecutor
from spark_service.manifests import Budget, build_manifest
from spark_service.nearest_workloads import GeneralHints, rank_workloads
from spark_service.tallies import Tallies
from spark_service.tally import Tally, Window

__all__ = ["Catalog"]


QUICK_SECONDS = 1.0
"""Builds that take no longer are made whenever something is new."""
RESTS_PER_BUILD = 20
"""A longer one is followed by so many times its own time in which its profile is given as it is."""


@dataclass(frozen=True, slots=True)
class _Latest:
    """The profile built last for a question, and until when it will do, unless something was deleted."""

    built: BuiltProfile
    deletions: int
    good_until_seconds: float


class Catalog:
    """Builds what is asked for. A revision names the inputs of a profile.

    What is given is of all sessions stored, or where building takes long, of those stored a while ago: uploads that
    never pause must not keep the service building.
    """

    def __init__(
        self,
        store: Store,
        *,
        executor: Executor | None = None,
        window: Callable[[], Window] = Window,
        min_sessions: int = 1,
        remembered: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build from the sessions in ``window``, by default all, with ``executor``, by default threads.

        A profile of fewer calibration sessions than ``min_sessions`` is given to nobody: it would show theirs.
        """
        self._store = store
        self._min_sessions = min_sessions
        self._window = window
        self._executor = executor or LocalExecutor()
        self._tallies = Tallies(store, self._executor)
        self._remembered = remembered
        self._built: OrderedDict[str, BuiltProfile | None] = OrderedDict()
        self._latest: OrderedDict[tuple[str, str, str, Phase, Window], _Latest] = OrderedDict()
        self._clock = clock
        # One build at a time: a second request for the same profile finds it done.
        self._building = threading.Lock()
        self._general = GeneralHints()

    def profile(self, fingerprint: str, workload: str, phase: Phase, sibling: str | None = None) -> Profile:
        """Return a profile. Raises :class:`RequestError` (404) when there is nothing to build it from."""
        shape = self._require_model(fingerprint, sibling, workload)
        return self._require_built(shape, workload, phase).profile

    def manifest(
        self, fingerprint: str, workload: str, phase: Phase, budget: Budget, sibling: str | None = None
    ) -> PlacementManifest:
        """Return a manifest. Raises :class:`RequestError`: 404 as for profiles, 422 for a budget that cannot work."""
        shape = self._require_model(fingerprint, sibling, workload)
        built = self._require_built(shape, workload, phase)
        return build_manifest(built.profile, shape, budget, built.held_out())

    def summaries(self, fingerprint: str | None, phase: Phase) -> tuple[ProfileSummary, ...]:
        """List every profile that can be pulled; each is built if it is not remembered."""
        return tuple(
            ProfileSummary(
                fingerprint=shape.fingerprint,
                model_name=shape.name,
                workload=workload,
                phase=phase,
                revision=built.profile.revision,
                n_calibration=built.profile.n_calibration,
                n_held_out=built.profile.n_held_out,
                verdict=built.profile.verdict,
            )
            for shape in self._store.models()
            if fingerprint in (None, shape.fingerprint)
            for workload in self._store.workloads(shape.fingerprint)
            if (built := self._build(shape, shape.fingerprint, workload, phase)) is not None
        )

    def nearest(self, fingerprint: str, phase: Phase, session: SessionHistogram) -> NearestWorkloads:
        """Rank a model's workloads by the cold-hit rate of their profiles on one session, which is not kept.

        Raises :class:`RequestError`: 404 for an unknown model or one without profiles, 422 without counts in the phase.
        """
        shape = self._require_model(fingerprint, None, session.workload)
        return rank_workloads(shape, phase, session, self._known_profiles(shape, phase))

    def _known_profiles(self, shape: ModelShape, phase: Phase) -> dict[str, Profile]:
        names = self._store.workloads(shape.fingerprint)
        built = {name: self._build(shape, shape.fingerprint, name, phase) for name in names}
        return {name: one.profile for name, one in built.items() if one is not None}

    def _build(
        self,
        shape: ModelShape,
        source: str,
        workload: str,
        phase: Phase,
        warnings: Sequence[str] = (),
    ) -> BuiltProfile | None:
        """Build or remember a profile from the sessions of ``source``; ``None`` without calibration sessions."""
        with self._building:
            question = (shape.fingerprint, source, workload, phase, self._window())
            latest = self._latest.get(question)
            began_seconds = self._clock()
            rests = latest is not None and began_seconds < latest.good_until_seconds
            if latest is not None and rests and latest.deletions == self._store.deletions:
                return latest.built
            while True:
                deletions = self._store.deletions
                counted = self._tallies.of(shape if source == shape.fingerprint else self._shape(source), phase)
                inputs = self._inputs(TallyKey(source, workload, phase), counted, shape)
                revision = revision_of(shape.fingerprint, workload, phase, inputs)
                if revision not in self._built:
                    try:
                        built = build_profile(
                            shape, workload, phase, revision, inputs, self._executor, warnings=warnings
                        )
                    except StorageError:
                        if self._store.deletions == deletions:
                            raise
                        continue  # A file of histograms goes when something in it is deleted.
                    if self._store.deletions != deletions:
                        continue  # Some of what was counted may have been gone when it was to judge.
                    few = built is not None and built.profile.n_calibration < self._min_sessions
                    self._built[revision] = None if few else built
                self._built.move_to_end(revision)
                found = self._built[revision]
                if found is not None:
                    self._latest[question] = _Latest(found, deletions, self._rested(began_seconds))
                    self._latest.move_to_end(question)
                for remembered in (self._built, self._latest):
                    while len(remembered) > self._remembered:
                        remembered.popitem(last=False)
                return found

    def _rested(self, began_seconds: float) -> float:
        """Until when the service may rest from a build that ends now."""
        ended_seconds = self._clock()
        took_seconds = ended_seconds - began_seconds
        return ended_seconds + (RESTS_PER_BUILD * took_seconds if took_seconds > QUICK_SECONDS else 0.0)

    def _inputs(self, key: TallyKey, counted: dict[str, Counted], shape: ModelShape) -> Inputs:
        nothing = Counted(Tally(tuple(layer.n_experts for layer in shape.layers)), 0)
        own = counted.get(key.workload, nothing)
        others = {name: other.tally for name, other in counted.items() if name != key.workload}
        return Inputs(own.tally, others, partial(self._tallies.held_out, key, own.number), self._window())

    def _shape(self, fingerprint: str) -> ModelShape:
        shape = self._store.model(fingerprint)
        assert shape is not None  # noqa: S101  it has sessions
        return shape

    def _require_model(self, fingerprint: str, sibling: str | None, workload: str) -> ModelShape:
        shape = self._store.model(fingerprint)
        if shape is not None:
            return shape
        hint = f"record sessions with this model and upload them: spark-agent record MODEL --workload {workload}"
        if sibling is not None and (others := self._store.siblings(sibling)):
            hint += f"; other quantisations of it are known, but placement does not carry over: {', '.join(others)}"
        raise RequestError(
            404,
            "unknown_model",
            f"fingerprint: found {fingerprint}, expected a model with uploaded sessions",
            field="path.fingerprint",
            found=fingerprint,
            hint=hint,
        )

    def _require_built(self, shape: ModelShape, workload: str, phase: Phase) -> BuiltProfile:
        built = self._build(shape, shape.fingerprint, workload, phase)
        built = built or self._from_sibling(shape, workload, phase)
        if built is not None:
            return built
        known = self._store.workloads(shape.fingerprint)
        if workload not in known:
            raise self._unknown_workload(shape, workload, known, phase)
        counted = self._tallies.of(shape, phase).get(workload)
        found = counted.tally.votes("calibration", self._window()).n_sessions if counted is not None else 0
        if found:
            raise RequestError(
                404,
                "too_few_sessions",
                f"{workload}: found {found} calibration sessions, expected at least {self._min_sessions}",
                field="path.workload",
                found=str(found),
                expected=f"at least {self._min_sessions}",
                hint="upload more sessions of this workload: a profile of so few would show what is in each",
            )
        held_out = counted.tally.votes("held_out").n_sessions if counted is not None else 0
        raise RequestError(
            404,
            "no_calibration_sessions",
            f"{workload}: found 0 calibration sessions and {held_out} held-out ones with {phase} counts, "
            "expected at least 1 calibration session",
            field="path.workload",
            found="0 calibration sessions",
            expected="at least 1",
            hint="upload more sessions of this workload: about four of five calibrate, the rest judge",
        )

    def _from_sibling(self, shape: ModelShape, workload: str, phase: Phase) -> BuiltProfile | None:
        """A profile from the sessions of another quantisation of the same model: its experts are the same ones."""
        for other in self._store.siblings(shape.sibling, workload):
            if other == shape.fingerprint or not _same_experts(shape, self._shape(other)):
                continue
            warning = (
                f"no sessions of this file: the profile is from sessions of {other}, another quantisation of the same "
                "model; its experts are the same, but it may choose a little differently"
            )
            built = self._build(shape, other, workload, phase, [warning])
            if built is not None:
                return built
        return None

    def _unknown_workload(self, shape: ModelShape, workload: str, known: list[str], phase: Phase) -> RequestError:
        hint = f"record sessions of it and upload them: spark-agent record MODEL --workload {workload}"
        hint += self._general.hint(shape, phase, self._store.generation, lambda: self._known_profiles(shape, phase))
        siblings = [other for other in self._store.siblings(shape.sibling, workload) if other != shape.fingerprint]
        if siblings:
            hint += f"; other quantisations of this model have it: {', '.join(siblings)}"
        return RequestError(
            404,
            "unknown_workload",
            f"workload: found {workload}, expected one of this model's: {', '.join(known) or 'none yet'}",
            field="path.workload",
            found=workload,
            expected=", ".join(known) or "none yet",
            hint=hint,
        )


def _same_experts(one: ModelShape, other: ModelShape) -> bool:
    return [(layer.block, layer.n_experts, layer.top_k) for layer in one.layers] == [
        (layer.block, layer.n_experts, layer.top_k) for layer in other.layers
    ]
