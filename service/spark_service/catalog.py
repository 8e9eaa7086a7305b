"""Profiles and manifests on demand, from what is stored now, remembered by revision."""

from __future__ import annotations

import threading
from collections import OrderedDict

from spark_schemas.histogram import SessionHistogram
from spark_schemas.ids import Phase
from spark_schemas.manifest import PlacementManifest
from spark_schemas.manifest_api import NearestWorkloads
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile, ProfileSummary
from spark_schemas.split import split_of
from spark_service.builders import BuiltProfile, build_profile, revision_of
from spark_service.db.store import Store
from spark_service.errors import RequestError
from spark_service.manifests import Budget, build_manifest
from spark_service.nearest_workloads import GeneralHints, rank_workloads
from spark_service.sessions import SessionPart

__all__ = ["Catalog"]


class Catalog:
    """Builds what is asked for. A revision names the inputs, so a remembered profile is never stale."""

    def __init__(self, store: Store, *, remembered: int = 32) -> None:
        self._store = store
        self._remembered = remembered
        self._built: OrderedDict[str, BuiltProfile | None] = OrderedDict()
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
        return build_manifest(built.profile, shape, budget, built.held_out)

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
            if (built := self._build(shape, workload, phase)) is not None
        )

    def nearest(self, fingerprint: str, phase: Phase, session: SessionHistogram) -> NearestWorkloads:
        """Rank a model's workloads by the cold-hit rate of their profiles on one session, which is not kept.

        Raises :class:`RequestError`: 404 for an unknown model or one without profiles, 422 without counts in the phase.
        """
        shape = self._require_model(fingerprint, None, session.workload)
        return rank_workloads(shape, phase, session, self._known_profiles(shape, phase))

    def _known_profiles(self, shape: ModelShape, phase: Phase) -> dict[str, BuiltProfile]:
        names = self._store.workloads(shape.fingerprint)
        return {name: built for name in names if (built := self._build(shape, name, phase)) is not None}

    def _build(self, shape: ModelShape, workload: str, phase: Phase) -> BuiltProfile | None:
        """Build or remember a profile; ``None`` without calibration sessions."""
        with self._building:
            while True:
                ids = self._inputs(shape.fingerprint, workload, phase)
                revision = revision_of(shape.fingerprint, workload, phase, ids)
                if revision not in self._built:
                    wanted = [content_id for name in ids for content_id in ids[name]]
                    parts = self._store.parts(wanted, phase)
                    if len(parts) != len(wanted):
                        continue  # A session was deleted between the two reads: the revision has changed.
                    by_workload: dict[str, list[SessionPart]] = {}
                    for part in parts:
                        by_workload.setdefault(part.workload, []).append(part)
                    self._built[revision] = build_profile(shape, workload, phase, revision, by_workload)
                self._built.move_to_end(revision)
                while len(self._built) > self._remembered:
                    self._built.popitem(last=False)
                return self._built[revision]

    def _inputs(self, fingerprint: str, workload: str, phase: Phase) -> dict[str, list[str]]:
        """Content ids by workload that a profile is built from: its own, and what calibrates the others."""
        ids: dict[str, list[str]] = {}
        for key in self._store.part_keys(fingerprint, phase):
            if key.workload == workload or split_of(key.session_hash) == "calibration":
                ids.setdefault(key.workload, []).append(key.content_id)
        return ids

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
        built = self._build(shape, workload, phase)
        if built is not None:
            return built
        known = self._store.workloads(shape.fingerprint)
        if workload not in known:
            raise self._unknown_workload(shape, workload, known, phase)
        keys = self._store.part_keys(shape.fingerprint, phase)
        held_out = len({key.session_hash for key in keys if key.workload == workload})
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
