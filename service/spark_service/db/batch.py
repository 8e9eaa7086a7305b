"""What a batch of uploads does to the database, decided before anything is written. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from spark_schemas.api import UploadReceipt
from spark_schemas.model import ExpertLayer, ModelShape
from spark_service.errors import RequestError
from spark_service.packed import PackedSession, PackedUpload

__all__ = ["Batch", "KeyedUpload", "Known", "StoredReceipt", "plan_batch"]


@dataclass(frozen=True, slots=True)
class KeyedUpload:
    """An upload as it waits for its commit: under its key, with the checksum of its inflated body."""

    upload: PackedUpload
    idempotency_key: str
    body_sha256: str
    actor: str = "cli"
    """Who the audit log names."""


@dataclass(frozen=True, slots=True)
class StoredReceipt:
    """What a key was used for."""

    body_sha256: str
    receipt: UploadReceipt


@dataclass(frozen=True, slots=True)
class Known:
    """What the database holds of all that a batch mentions."""

    receipts: Mapping[str, StoredReceipt]
    """By idempotency key."""
    models: Mapping[str, ModelShape]
    """By fingerprint."""
    content_ids: AbstractSet[str]
    deleted_sessions: AbstractSet[str]


@dataclass(slots=True)
class Batch:
    """Rows to write, and each upload's outcome once they are committed."""

    models: dict[str, ModelShape] = field(default_factory=dict)
    sessions: dict[str, tuple[ModelShape, PackedSession]] = field(default_factory=dict)
    """By content id."""
    receipts: dict[str, StoredReceipt] = field(default_factory=dict)
    entries: list[tuple[str, str, UploadReceipt]] = field(default_factory=list)
    """Actor, fingerprint and receipt of each upload that is new."""
    agents: list[tuple[str, int]] = field(default_factory=list)
    """Version and accepted histograms of each upload that is new."""
    outcomes: list[UploadReceipt | RequestError] = field(default_factory=list)
    agreed: dict[int, ModelShape] = field(default_factory=dict)
    """Models found to be as stored, by identity: the uploads of a batch mostly share one object."""


def plan_batch(uploads: Iterable[KeyedUpload], known: Known) -> Batch:
    """Decide a batch: the result is that of its uploads one after the other, a refused one leaving no trace."""
    batch = Batch()
    for keyed in uploads:
        try:
            batch.outcomes.append(_plan(keyed, known, batch))
        except RequestError as error:
            batch.outcomes.append(error)
    return batch


def _plan(keyed: KeyedUpload, known: Known, batch: Batch) -> UploadReceipt:
    earlier = known.receipts.get(keyed.idempotency_key) or batch.receipts.get(keyed.idempotency_key)
    if earlier is not None:
        _require_same_body(earlier.body_sha256, keyed.body_sha256)
        return earlier.receipt
    model = keyed.upload.model
    stored = known.models.get(model.fingerprint) or batch.models.get(model.fingerprint)
    if stored is None:
        batch.models[model.fingerprint] = model
    elif id(model) not in batch.agreed:
        _require_same_model(stored, model)
    batch.agreed[id(model)] = model
    fresh = _fresh(keyed.upload.sessions, known, batch)
    batch.sessions.update((content_id, (model, session)) for content_id, session in fresh.items())
    receipt = UploadReceipt(accepted=len(fresh), duplicates=len(keyed.upload.sessions) - len(fresh))
    batch.receipts[keyed.idempotency_key] = StoredReceipt(keyed.body_sha256, receipt)
    batch.entries.append((keyed.actor, model.fingerprint, receipt))
    batch.agents.append((keyed.upload.agent_version, receipt.accepted))
    return receipt


def _fresh(sessions: Sequence[PackedSession], known: Known, batch: Batch) -> dict[str, PackedSession]:
    """Histograms by content id that are neither stored, nor about to be, nor of a deleted session."""
    return {
        session.content_id: session
        for session in sessions
        if session.content_id not in known.content_ids
        and session.content_id not in batch.sessions
        and session.session_hash not in known.deleted_sessions
    }


def _require_same_body(stored_sha256: str, body_sha256: str) -> None:
    if stored_sha256 != body_sha256:
        raise RequestError(
            422,
            "idempotency_key_reused",
            "Idempotency-Key: found one that was used with another body, expected a new key for new content",
            field="header.Idempotency-Key",
            hint="send each upload under a key of its own, and repeat the key only to repeat the same bytes",
        )


def _require_same_model(stored: ModelShape, sent: ModelShape) -> None:
    if difference := _difference(stored, sent):
        field, found, expected = difference
        raise RequestError(
            409,
            "model_mismatch",
            f"{field}: found {found}, expected {expected}, as stored with the first upload of {sent.fingerprint}",
            field=field,
            found=found,
            expected=expected,
            hint="two agents disagree about one fingerprint: bring both to the same version of spark-moe",
        )


def _difference(stored: ModelShape, sent: ModelShape) -> tuple[str, str, str] | None:
    """First difference as (field, found, expected). The name is a label, not a shape, and may differ."""
    if len(sent.layers) != len(stored.layers):
        return "model.layers", f"{len(sent.layers)} layers", f"{len(stored.layers)} layers"
    for name in ModelShape.model_fields:
        found, expected = getattr(sent, name), getattr(stored, name)
        if name not in ("name", "layers") and found != expected:
            return f"model.{name}", repr(found), repr(expected)
    for index, (found, expected) in enumerate(zip(sent.layers, stored.layers, strict=True)):
        if found == expected:
            continue
        for name in ExpertLayer.model_fields:
            one, other = getattr(found, name), getattr(expected, name)
            if one != other:
                return f"model.layers[{index}].{name}", repr(one), repr(other)
    return None
