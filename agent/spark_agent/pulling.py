"""Pulling a manifest: asked for with what is known, checked, kept; from what was kept while the service is away.

A service that goes back to a profile revision which it had replaced is not followed unasked: whoever replays an old
answer, signature and all, looks the same. One that is pinned is followed, where the service's key says so
of this very day.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spark_agent.errors import RefusedError, ServiceError, SparkError
from spark_agent.http import ManifestAnswer, ServiceClient, is_away
from spark_agent.manifests import Known, ManifestStore, PullKey
from spark_agent.signatures import SignedBy, doubt_of_pin
from spark_agent.sizes import format_size
from spark_agent.trust import ManifestTrust
from spark_schemas.manifest import PlacementManifest
from spark_schemas.model import ModelShape

__all__ = ["Pulled", "Question", "age_text", "pull"]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a service."""

    shape: ModelShape
    name: str
    """A workload, or a mix in its canonical spelling."""
    key: PullKey
    budget_is_given: bool
    """A person named the budget; otherwise any that was pulled before will do while the service is away."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came of it; its signature was checked, and it is kept unless that was not wanted."""

    manifest: PlacementManifest
    content: bytes
    """As it was signed."""
    signed: SignedBy | None
    key: PullKey
    """Of the answer: its budget is another one's where only that was kept."""
    path: Path | None
    """Where it is kept; ``None`` where nothing was to be."""
    is_new: bool
    """The service sent it now, and it is not the one that was kept."""
    age_s: float | None
    """Seconds since the service last said so, of one that comes from what was kept."""


def pull(
    client: ServiceClient,
    question: Question,
    store: ManifestStore,
    trust: ManifestTrust,
    say: Callable[[str], None],
    *,
    keep: bool = True,
    accept_older: bool = False,
) -> Pulled:
    """Ask, check and keep; ``say`` gets what a person should know.

    Raises what :class:`ServiceClient` and :class:`ManifestTrust` raise, :class:`RefusedError` for a revision that was
    replaced before, and what ``check_manifest`` raises for a manifest of another model; then what was kept stays.
    """
    shape, key = question.shape, question.key
    kept = store.find(shape.fingerprint, question.name)
    known = kept if kept is not None and kept.etag is not None and kept.key == key else None
    if known is not None and known.signed is not None and not known.signed.covers(known.content):
        say("what was pulled before was altered since: pulling it again")
        kept = known = None
    try:
        answer = client.manifest(
            shape.fingerprint,
            question.name,
            vram_bytes=key.vram_bytes,
            n_ctx=key.n_ctx,
            reserve_bytes=key.reserve_bytes,
            phase="decode",
            sibling=shape.sibling,
            window_days=key.window_days,
            half_life_days=key.half_life_days,
            etag=known.etag if known else None,
        )
    except (ServiceError, RefusedError) as error:
        if kept is None or not is_away(error):
            raise
        return _from_store(question, kept, store, trust, say, error)
    manifest, content, signature = answer.manifest, answer.content, answer.signature
    if manifest is None:
        if known is None:
            raise AssertionError("the client takes 'not modified' only when it sent an ETag")
        manifest, content = known.manifest, known.content
        # An answer without a body may leave out what has not changed.
        signature = signature or (known.signed.signature if known.signed else None)
    signed = trust.check_answer(client, content, signature, say, pin=keep)
    _check_shape(manifest, shape)
    pinned = _is_pinned(answer, manifest, signed, say)
    replaced = _replaced(kept, key, manifest, pinned=pinned, accept_older=accept_older)
    path = None
    if keep:
        path = store.put(
            manifest, key, answer.etag, content=content, signed=signed, pulled_at=time.time(), replaced=replaced
        )
    return Pulled(manifest, content, signed, key, path, answer.manifest is not None, None)


def _from_store(
    question: Question,
    kept: Known,
    store: ManifestStore,
    trust: ManifestTrust,
    say: Callable[[str], None],
    error: SparkError,
) -> Pulled:
    asked = question.key
    if not question.budget_is_given:
        asked = dataclasses.replace(asked, vram_bytes=kept.key.vram_bytes)
    if kept.key != asked:
        differs = [
            f"{field.name} {getattr(kept.key, field.name)}, not {getattr(asked, field.name)}"
            for field in dataclasses.fields(PullKey)
            if getattr(kept.key, field.name) != getattr(asked, field.name)
        ]
        error.args = (f"{error}; what was pulled before answers another question: {'; '.join(differs)}",)
        raise error
    if kept.signed is None:
        trust.check_unsigned(kept.key.service_url)
    else:
        trust.check_stored(kept.content, kept.signed)
    _check_shape(kept.manifest, question.shape)
    say(f"{error}")
    say(f"using what was pulled {age_text(kept.age_s)}, for {format_size(kept.key.vram_bytes)}")
    path = store.path(question.shape.fingerprint, question.name)
    return Pulled(kept.manifest, kept.content, kept.signed, kept.key, path, is_new=False, age_s=kept.age_s)


def age_text(age_s: float | None) -> str:
    """How long ago, in words."""
    if age_s is None:
        return "at a time that was not kept"
    if age_s < 0:
        return "at a time that is still to come (was the clock set back?)"
    for unit, seconds in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if age_s >= seconds:
            count = int(age_s // seconds)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "less than a minute ago"


def _check_shape(manifest: PlacementManifest, shape: ModelShape) -> None:
    from spark_runtime.manifest_check import check_manifest

    check_manifest(manifest, shape)


def _is_pinned(
    answer: ManifestAnswer, manifest: PlacementManifest, signed: SignedBy | None, say: Callable[[str], None]
) -> bool:
    """Whether it is proven that the service has this revision pinned; a word alone is said, and proves nothing."""
    if answer.pinned is None:
        return False
    shown = "".join(letter for letter in answer.pinned[:12] if letter.isalnum())
    if signed is None:
        doubt: str | None = "it signs nothing"
    else:
        doubt = doubt_of_pin(signed.key, manifest, answer.pin_signature, dt.datetime.now(dt.UTC).date())
    if doubt is None:
        say(f"the service has revision {shown} pinned: there may be a newer one")
    else:
        say(f"the service says that it has revision {shown} pinned, which is not proven: {doubt}")
    return doubt is None


def _replaced(
    kept: Known | None, key: PullKey, manifest: PlacementManifest, *, pinned: bool, accept_older: bool
) -> tuple[str, ...]:
    """The revisions that this answer and earlier ones replaced, oldest first."""
    if kept is None or not kept.key.same_profile(key):
        return ()
    revision, last = manifest.profile_revision, kept.manifest.profile_revision
    if revision in kept.replaced and revision != last and not (pinned or accept_older):
        raise RefusedError(
            f"the manifest is of profile revision {revision[:12]}, which {last[:12]} had replaced: either the service "
            "went back (a session was deleted, a backup restored), or somebody replays an old answer",
            "ask who runs the service; to take it all the same: --accept-older. What was pulled before stays",
        )
    left = [one for one in kept.replaced if one != revision]
    # One that is only pinned for a while replaces nothing.
    return tuple(left) if pinned or accept_older or last == revision else (*left, last)
