"""Manifests as they are served: the newest, a pinned one, or one of the past; each signed, each new one recorded.

History and pins are of the service's own window. Whoever chooses another one asks another question: the answer is what
that window gives now, whatever is pinned, and is not recorded.
"""

from __future__ import annotations

import datetime as dt
import logging
from dataclasses import dataclass

import numpy as np

from spark_runtime.calibration.tally import Window
from spark_schemas.ids import Phase
from spark_schemas.manifest import PRIOR_SCALE, PlacementManifest
from spark_schemas.manifest_diff import ManifestDiff, diff_manifests
from spark_schemas.model import ModelShape
from spark_schemas.profile import LayerFrequencies, Profile
from spark_schemas.signature import PINNED_HEADER, PINNED_SIGNATURE_HEADER, SIGNATURE_HEADER, PinSignature, pin_message
from spark_service.answers import ENTRY_BYTES, Answer, ByteCache
from spark_service.catalog import Catalog
from spark_service.db.history import ManifestHistory, Question, Served
from spark_service.db.store import Store
from spark_service.errors import RequestError, StorageError
from spark_service.manifests import Budget, build_manifest
from spark_service.signing import Signer

__all__ = ["ServedManifests", "profile_of"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Body:
    content: bytes
    pinned: str | None = None


class ServedManifests:
    """Answers questions for manifests. All methods block and may be called from any thread."""

    def __init__(
        self, store: Store, catalog: Catalog, signer: Signer, history: ManifestHistory, *, cache_bytes: int
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._signer = signer
        self._history = history
        # By what they are made from: a write to another workload must not cost this one its bytes.
        self._built: ByteCache[tuple[str, Question], bytes] = ByteCache(cache_bytes)

    def answer(
        self,
        question: Question,
        *,
        sibling: str | None = None,
        revision: str | None = None,
        window: Window | None = None,
    ) -> Answer:
        """The signed manifest for a question: at a revision, or the pinned one, or the newest.

        A ``window`` is one that is not the service's own: it has a newest alone. Raises :class:`RequestError`: 404 for
        what is unknown, 422 for a budget that cannot work and for a revision in such a window, 429 for too many builds.
        """
        if revision is not None:
            if window is not None:
                raise _no_past(revision)
            body = self._at(question, revision)
        elif window is not None:
            body = _Body(self._newest(question, sibling, window))
        else:
            body = self._current(question, sibling)
        headers = {SIGNATURE_HEADER: self._signer.sign(body.content).header()}
        if body.pinned is not None:
            headers[PINNED_HEADER] = body.pinned
            headers[PINNED_SIGNATURE_HEADER] = self._pin_signature(question, body.pinned).header()
        return Answer.of(body.content, **headers)

    def _pin_signature(self, question: Question, revision: str) -> PinSignature:
        # An answer is kept ready for a minute; who reads it allows for a day.
        day = dt.datetime.now(dt.UTC).date()
        said = pin_message(question.fingerprint, question.workload, question.phase, revision, day)
        signature = self._signer.sign(said)
        return PinSignature(signature.key_id, day, signature.value)

    def served(self, question: Question) -> list[Served]:
        """What was served for a question, the latest first; raises :class:`RequestError` (404) where nothing was."""
        found = self._history.served(question)
        if not found:
            raise RequestError(
                404,
                "no_history",
                f"{question.workload}: found no manifest that was served for this phase and budget, "
                "expected at least one",
                field="query",
                hint="ask with the phase, vram_bytes, n_ctx and reserve_bytes of a manifest that was pulled",
            )
        return found

    def pinned(self, question: Question) -> str | None:
        """The revision that is served in place of the newest."""
        return self._history.pinned(question.fingerprint, question.workload, question.phase)

    def diff(self, question: Question, one: str, other: str) -> ManifestDiff:
        """What changed between two revisions of a manifest. Raises :class:`RequestError` (404)."""
        bodies = [self._at(question, revision, field).content for revision, field in ((one, "from"), (other, "to"))]
        return diff_manifests(*(PlacementManifest.model_validate_json(body) for body in bodies))

    def pin(self, fingerprint: str, workload: str, phase: Phase, revision: str) -> None:
        """Serve a revision until it is unpinned. Raises :class:`RequestError` (404) for one that was never served."""
        if not self._history.pin(fingerprint, workload, phase, revision):
            known = self._history.revisions(fingerprint, workload, phase)
            raise _unknown_revision(revision, known, "body.revision")

    def unpin(self, fingerprint: str, workload: str, phase: Phase) -> str | None:
        """Serve the newest again; return the revision that was pinned."""
        return self._history.unpin(fingerprint, workload, phase)

    def _at(self, question: Question, revision: str, name: str = "revision") -> _Body:
        body = self._history.body(question, revision)
        if body is None:
            raise _unknown_revision(revision, [one.revision for one in self._history.served(question)], f"query.{name}")
        return _Body(body)

    def _current(self, question: Question, sibling: str | None) -> _Body:
        pinned = self.pinned(question)
        if pinned is not None and (body := self._pinned_body(question, pinned)) is not None:
            return _Body(body, pinned)
        return _Body(self._newest(question, sibling))

    def _newest(self, question: Question, sibling: str | None, window: Window | None = None) -> bytes:
        """What is built now; recorded unless a reader chose the window."""
        name = (question.fingerprint, question.workload, question.phase)
        deletions = self._history.deletions()
        profile = self._catalog.profile(*name, sibling, window=window)
        held = self._built.get((profile.revision, question))
        if held is not None:
            return held
        budget = Budget(question.vram_bytes, question.n_ctx, question.reserve_bytes)
        manifest = self._catalog.manifest(*name, budget, sibling, window=window)
        if window is None:
            return self._keep(question, manifest, deletions)
        return self._hold(question, manifest.profile_revision, manifest.model_dump_json().encode())

    def _pinned_body(self, question: Question, revision: str) -> bytes | None:
        """The pinned revision for this budget: as it was served, or placed anew from the prior of another budget's.

        ``None`` when a deletion has just taken the revision away.
        """
        body = self._history.body(question, revision)
        if body is not None:
            return body
        deletions = self._history.deletions()
        other = self._history.body_of_any_budget(question.fingerprint, question.workload, question.phase, revision)
        shape = self._store.model(question.fingerprint)
        if other is None or shape is None:
            return None
        manifest = PlacementManifest.model_validate_json(other)
        budget = Budget(question.vram_bytes, question.n_ctx, question.reserve_bytes)
        # Today's held-out sessions are not those that judged this revision, so it promises nothing.
        return self._keep(question, build_manifest(profile_of(manifest, shape), shape, budget, ()), deletions)

    def _keep(self, question: Question, manifest: PlacementManifest, deletions: int) -> bytes:
        body = manifest.model_dump_json().encode()
        try:
            self._history.record(question, manifest.profile_revision, body, deletions=deletions)
        except StorageError as error:
            # A full disk must not keep anyone from reading; the next one that builds it tries again.
            log.warning("manifest of %s not recorded for rollback: %s", question.workload, error)
        else:
            self._hold(question, manifest.profile_revision, body)
        return body

    def _hold(self, question: Question, revision: str, body: bytes) -> bytes:
        self._built.put((revision, question), body, len(body) + ENTRY_BYTES)
        return body


def profile_of(manifest: PlacementManifest, shape: ModelShape) -> Profile:
    """The profile behind a manifest, as far as the manifest tells: frequencies in steps of its prior, no curves."""
    return Profile(
        fingerprint=manifest.fingerprint,
        workload=manifest.workload,
        phase=manifest.phase,
        revision=manifest.profile_revision,
        n_calibration=manifest.n_calibration,
        n_held_out=manifest.n_held_out,
        tokens_calibration=0,
        tokens_held_out=0,
        layers=tuple(
            LayerFrequencies(
                block=layer.block,
                shares=tuple((np.array(placed.prior) / (PRIOR_SCALE * placed.total_share)).clip(0.0, 1.0).tolist()),
                selections=(0,) * layer.n_experts,
            )
            for layer, placed in zip(shape.layers, manifest.layers, strict=True)
        ),
        curves=(),
        verdict=manifest.verdict,
        verdict_reason=manifest.verdict_reason,
    )


def _unknown_revision(revision: str, known: list[str], field: str) -> RequestError:
    shown = ", ".join(known[:5]) or "none"
    return RequestError(
        404,
        "unknown_revision",
        f"{field}: found {revision}, expected a profile revision that was served"
        + (f", the latest: {shown}" if known else "; none is kept"),
        field=field,
        found=revision,
        expected=shown,
        hint="list what is kept: GET …/history with the same phase and budget",
    )


def _no_past(revision: str) -> RequestError:
    return RequestError(
        422,
        "invalid_parameter",
        "query.revision: found one together with a window, expected a revision alone: what was served is kept for the "
        "service's own window",
        field="query.revision",
        found=revision,
        expected="no window_days and half_life_days beside it",
        hint="leave out window_days and half_life_days",
    )
