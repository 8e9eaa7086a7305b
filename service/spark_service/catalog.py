"""Profiles and manifests on demand, from what is stored now, remembered by revision."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from spark_runtime.calibration.tally import Tally, Window
from spark_schemas.drift import Drift
from spark_schemas.histogram import SessionHistogram
from spark_schemas.ids import Phase
from spark_schemas.manifest import PlacementManifest
from spark_schemas.manifest_api import NearestWorkloads
from spark_schemas.mix import Mix
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile, ProfileSummary
from spark_service.build_budget import BuildBudget
from spark_service.build_inputs import BuildInputs
from spark_service.build_memory import Asked, BuildMemory, Latest
from spark_service.builders import BuiltProfile, Inputs, build_profile, revision_of
from spark_service.db.drift import load_states
from spark_service.db.store import Store
from spark_service.drift_watch import drift_of
from spark_service.errors import RequestError, StorageError
from spark_service.executors import Executor, LocalExecutor
from spark_service.manifests import Budget, build_manifest
from spark_service.moved import moved_warnings
from spark_service.nearest_workloads import GeneralHints, rank_workloads
from spark_service.windows import Windows

__all__ = ["Catalog"]


QUICK_SECONDS = 1.0
"""Builds that take no longer are made whenever something is new."""
RESTS_PER_BUILD = 20
"""A longer one is followed by so many times its own time in which its profile is given as it is."""


class Catalog:
    """Builds what is asked for. A revision names the inputs of a profile.

    What is given is of all sessions stored, or where building takes long, of those stored a while ago: uploads that
    never pause must not keep the service building. Nor must readers: mixes, and windows other than the service's own,
    are built within a budget, and never push out of memory what is not theirs.
    """

    def __init__(
        self,
        store: Store,
        *,
        executor: Executor | None = None,
        windows: Windows | None = None,
        min_sessions: int = 1,
        remembered: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build from the sessions in a window, by default all, with ``executor``, by default threads.

        A profile of fewer calibration sessions than ``min_sessions`` is given to nobody: it would show theirs.
        """
        self._store = store
        self._min_sessions = max(1, min_sessions)
        self._windows = windows or Windows()
        self._executor = executor or LocalExecutor()
        self._inputs = BuildInputs(store, self._executor, min_sessions=self._min_sessions)
        self._usual, self._chosen = BuildMemory(remembered), BuildMemory(remembered)
        self._clock = clock
        self._budget = BuildBudget(clock)
        # One build at a time: a second request for the same profile finds it done.
        self._building = threading.Lock()
        self._general = GeneralHints()

    @property
    def windows(self) -> Windows:
        """The service's own window, and those that readers may choose."""
        return self._windows

    @property
    def min_sessions(self) -> int:
        """Fewest calibration sessions of a profile that is given to anybody."""
        return self._min_sessions

    def profile(
        self,
        fingerprint: str,
        workload: str,
        phase: Phase,
        sibling: str | None = None,
        *,
        window: Window | None = None,
    ) -> Profile:
        """Return the profile of a workload or a mix, in a window that is not the service's own if one is given.

        Raises :class:`RequestError`: 404 when there is nothing to build it from, 429 when it is a mix or in such a
        window, and too many of those were built lately.
        """
        shape = self._require_model(fingerprint, sibling, workload)
        profile = self._require_built(shape, workload, phase, window).profile
        drift = self._drift(fingerprint).get(workload)
        return profile if drift is None else profile.model_copy(update={"drift": drift})

    def profile_as_of(self, fingerprint: str, workload: str, phase: Phase, until_day: int) -> Profile:
        """The profile of a workload or a mix as if nothing had come after a day (since 1970), by what is stored now.

        Raises :class:`RequestError`: as :meth:`profile`, and 404 where what came since is so little that beside today's
        profile it could be told what it was.
        """
        shape = self._require_model(fingerprint, None, workload)
        mix, own = Mix.parse(workload), self._windows.own()
        window = replace(own, today=until_day) if own.today else own
        for name in mix.names:
            tally = self._inputs.tally(shape, name, phase)
            before = tally.until(until_day).n_sessions("calibration", window)
            since = tally.since(until_day + 1).n_sessions("calibration", own)
            if before < self._min_sessions:
                raise self._too_few(name, before, "came until then: choose a later day")
            if 0 < since < self._min_sessions:
                raise self._too_few(name, since, "came since: with fewer, what is in each could be told")
        asked = Asked(fingerprint, mix, phase, window, of_a_reader=True, until_day=until_day)
        built = self._build(shape, asked)
        if built is None:  # deleted meanwhile
            raise self._too_few(workload, 0, "are left")
        return built.profile

    def _too_few(self, name: str, found: int, hint: str) -> RequestError:
        return RequestError(
            404,
            "too_few_sessions",
            f"{name}: found {found} calibration sessions, expected at least {self._min_sessions}",
            field="path.workload",
            found=str(found),
            expected=f"at least {self._min_sessions}",
            hint=f"so few {hint}",
        )

    def manifest(
        self,
        fingerprint: str,
        workload: str,
        phase: Phase,
        budget: Budget,
        sibling: str | None = None,
        *,
        window: Window | None = None,
    ) -> PlacementManifest:
        """Return a manifest. Raises :class:`RequestError`: as for profiles, and 422 for a budget that cannot work."""
        shape = self._require_model(fingerprint, sibling, workload)
        built = self._require_built(shape, workload, phase, window)
        return build_manifest(built.profile, shape, budget, built.judges)

    def summaries(self, fingerprint: str | None, phase: Phase) -> tuple[ProfileSummary, ...]:
        """List every profile that can be pulled; each is built if it is not remembered."""
        models = [shape for shape in self._store.models() if fingerprint in (None, shape.fingerprint)]
        drift = {shape.fingerprint: self._drift(shape.fingerprint) for shape in models}
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
                drift=drift[shape.fingerprint].get(workload),
            )
            for shape in models
            for workload in self._store.workloads(shape.fingerprint)
            if (built := self._usual_profile(shape, workload, phase)) is not None
        )

    def tallies(self, shape: ModelShape, phase: Phase) -> dict[str, Tally]:
        """All sessions of a model by workload, for whoever tells how many there are."""
        return self._inputs.tallies(shape, phase)

    def nearest(self, fingerprint: str, phase: Phase, session: SessionHistogram) -> NearestWorkloads:
        """Rank a model's workloads by the cold-hit rate of their profiles on one session, which is not kept.

        Raises :class:`RequestError`: 404 for an unknown model or one without profiles, 422 without counts in the phase.
        """
        shape = self._require_model(fingerprint, None, session.workload)
        return rank_workloads(shape, phase, session, self._known_profiles(shape, phase))

    def profiles(self, fingerprint: str, phase: Phase) -> dict[str, Profile]:
        """Every profile of a model by workload, in the service's own window; those of too few sessions are absent."""
        shape = self._shape(fingerprint)
        drift = self._drift(fingerprint)
        return {
            name: profile.model_copy(update={"drift": drift[name]}) if name in drift else profile
            for name, profile in self._known_profiles(shape, phase).items()
        }

    def tally(self, fingerprint: str, workload: str, phase: Phase) -> Tally:
        """The sessions of one workload of a known model that count now, by side of the split and day."""
        return self._inputs.tally(self._shape(fingerprint), workload, phase)

    def _known_profiles(self, shape: ModelShape, phase: Phase) -> dict[str, Profile]:
        names = self._store.workloads(shape.fingerprint)
        built = {name: self._usual_profile(shape, name, phase) for name in names}
        return {name: one.profile for name, one in built.items() if one is not None}

    def _usual_profile(self, shape: ModelShape, workload: str, phase: Phase) -> BuiltProfile | None:
        asked = Asked(shape.fingerprint, Mix.parse(workload), phase, self._windows.own(), of_a_reader=False)
        return self._build(shape, asked)

    def _build(self, shape: ModelShape, asked: Asked, warnings: Sequence[str] = ()) -> BuiltProfile | None:
        """Build or remember a profile; ``None`` with too few calibration sessions of any of its workloads.

        Raises :class:`RequestError` (429) as :meth:`profile`.
        """
        memory = self._chosen if asked.of_a_reader else self._usual
        with self._building:
            question = (shape.fingerprint, asked)
            latest = memory.latest.get(question)
            began_seconds = self._clock()
            if latest is not None and latest.deletions != self._store.deletions:
                latest = None
            if latest is not None and began_seconds < latest.good_until_seconds:
                return latest.built
            while True:
                deletions = self._store.deletions
                source = shape if asked.source == shape.fingerprint else self._shape(asked.source)
                inputs = self._inputs.of(shape, source, asked)
                if not all(self._is_enough(member.tally, asked.window) for member in inputs.members):
                    return None
                revision = revision_of(shape.fingerprint, str(asked.mix), asked.phase, inputs)
                found = memory.built.get(revision)
                if found is None:
                    if asked.of_a_reader and latest is not None and self._budget.missing_seconds():
                        return latest.built
                    try:
                        found = self._built(shape, asked, revision, inputs, warnings)
                    except StorageError:
                        if self._store.deletions == deletions:
                            raise
                        continue  # A file of histograms goes when something in it is deleted.
                    if self._store.deletions != deletions:
                        continue  # Some of what was counted may have been gone when it was to judge.
                if found is None:
                    return None
                memory.keep(revision, question, Latest(found, deletions, self._rested(began_seconds)))
                return found

    def _rested(self, began_seconds: float) -> float:
        """Until when the service may rest from a build that ends now."""
        ended_seconds = self._clock()
        took_seconds = ended_seconds - began_seconds
        return ended_seconds + (RESTS_PER_BUILD * took_seconds if took_seconds > QUICK_SECONDS else 0.0)

    def _built(
        self,
        shape: ModelShape,
        asked: Asked,
        revision: str,
        inputs: Inputs,
        warnings: Sequence[str],
    ) -> BuiltProfile | None:
        told = [*warnings, *moved_warnings(inputs.members)]
        build = partial(
            build_profile, shape, str(asked.mix), asked.phase, revision, inputs, self._executor, warnings=told
        )
        if not asked.of_a_reader:
            return build()
        self._budget.require()
        began_seconds = self._clock()
        try:
            return build()
        finally:
            self._budget.spend(self._clock() - began_seconds)

    def _drift(self, fingerprint: str) -> dict[str, Drift]:
        with self._store.reading() as cursor:
            return {name: drift_of(state) for (_, name), state in load_states(cursor, fingerprint).items()}

    def _is_enough(self, tally: Tally, window: Window) -> bool:
        return tally.n_sessions("calibration", window) >= self._min_sessions

    def _shape(self, fingerprint: str) -> ModelShape:
        shape = self._store.model(fingerprint)
        assert shape is not None  # noqa: S101  it has sessions
        return shape

    def _require_model(self, fingerprint: str, sibling: str | None, workload: str) -> ModelShape:
        shape = self._store.model(fingerprint)
        if shape is not None:
            return shape
        name = Mix.parse(workload).names[0]
        hint = f"record sessions with this model and upload them: spark-agent record MODEL --workload {name}"
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

    def _require_built(self, shape: ModelShape, workload: str, phase: Phase, window: Window | None) -> BuiltProfile:
        mix, of_window = Mix.parse(workload), window is not None
        window = self._windows.own() if window is None else window
        asked = Asked(shape.fingerprint, mix, phase, window, of_a_reader=of_window or len(mix.names) > 1)
        while (built := self._build(shape, asked) or self._from_sibling(shape, asked)) is None:
            # Each in turn; where none is at fault any more, what was missing has just come.
            for name in mix.names:
                self._require_sessions(shape, name, phase, window)
        return built

    def _require_sessions(self, shape: ModelShape, workload: str, phase: Phase, window: Window) -> None:
        """Raise :class:`RequestError` (404) where one workload is why there is no profile."""
        known = self._store.workloads(shape.fingerprint)
        if workload not in known:
            raise self._unknown_workload(shape, workload, known, phase)
        tally = self._inputs.tally(shape, workload, phase)
        found = tally.n_sessions("calibration", window)
        longer = "" if found == tally.n_sessions("calibration", Window()) else "; or ask for a longer window_days"
        if 0 < found < self._min_sessions:
            raise RequestError(
                404,
                "too_few_sessions",
                f"{workload}: found {found} calibration sessions, expected at least {self._min_sessions}",
                field="path.workload",
                found=str(found),
                expected=f"at least {self._min_sessions}",
                hint=f"upload more sessions of this workload: a profile of so few would show what is in each{longer}",
            )
        if not found:
            held_out = tally.n_sessions("held_out", window)
            raise RequestError(
                404,
                "no_calibration_sessions",
                f"{workload}: found 0 calibration sessions and {held_out} held-out ones with {phase} counts, "
                "expected at least 1 calibration session",
                field="path.workload",
                found="0 calibration sessions",
                expected="at least 1",
                hint=f"upload more sessions of this workload: about four of five calibrate, the rest judge{longer}",
            )

    def _from_sibling(self, shape: ModelShape, asked: Asked) -> BuiltProfile | None:
        """A profile from the sessions of another quantisation of the same model: its experts are the same ones."""
        known = [self._store.siblings(shape.sibling, name) for name in asked.mix.names]
        for other in known[0]:
            if not all(other in siblings for siblings in known):
                continue
            if other == shape.fingerprint or not _same_experts(shape, self._shape(other)):
                continue
            warning = (
                f"no sessions of this file: the profile is from sessions of {other}, another quantisation of the same "
                "model; its experts are the same, but it may choose a little differently"
            )
            built = self._build(shape, replace(asked, source=other), [warning])
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
