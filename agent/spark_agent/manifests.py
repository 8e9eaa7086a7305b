"""Manifests on this machine: pulled ones by model and workload or mix, and any file a person names.

A manifest is kept as the bytes that were signed, with the signature: in one file where the agent keeps it, so that a
crash never parts them; beside each other (``FILE`` and ``FILE.sig``) where a person asked for a file to pass on.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from spark_agent.errors import RefusedError, SparkError
from spark_agent.files import replacing
from spark_agent.paths import manifests_dir
from spark_agent.signatures import SignedBy
from spark_agent.trust import ManifestTrust
from spark_agent.workload_name import check_profile_name
from spark_schemas.manifest import PlacementManifest

__all__ = ["Known", "ManifestStore", "PullKey", "check_known", "find_manifest", "load_manifest", "save_manifest"]

_OWN_MODE = 0o600
_SHARED_MODE = 0o644
"""Of a file that a person asked for by name, to pass on: a manifest says nothing about anybody's sessions."""
_REPLACED_KEPT = 100
_MAX_STEM = 200
"""Characters of a file's name before .json; file systems take 255 bytes, and those written beside it have more."""


@dataclass(frozen=True, slots=True)
class PullKey:
    """What was asked of which service: an ETag is only good for the same question."""

    service_url: str
    vram_bytes: int
    n_ctx: int
    reserve_bytes: int
    window_days: int | None = None
    half_life_days: float | None = None
    """``None``: the service's own setting, whatever it is."""

    def same_profile(self, other: PullKey) -> bool:
        """Whether both questions are about one profile, whatever the budget."""
        return (self.service_url, self.window_days, self.half_life_days) == (
            other.service_url,
            other.window_days,
            other.half_life_days,
        )


@dataclass(frozen=True, slots=True)
class Known:
    """A manifest that was pulled before."""

    manifest: PlacementManifest
    content: bytes
    """As it was sent and signed."""
    etag: str | None
    signed: SignedBy | None
    key: PullKey
    pulled_at: float | None = None
    """Seconds since the epoch when the service last said so; ``None`` in files of earlier versions."""
    replaced: tuple[str, ...] = ()
    """Profile revisions that later ones took the place of, oldest first."""

    @property
    def age_s(self) -> float | None:
        """Seconds since the service last said so; negative after the clock was set back."""
        return None if self.pulled_at is None else time.time() - self.pulled_at


class _Pulled(BaseModel):
    """A stored manifest with the answer's ETag and signature, and the question."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    service_url: str
    vram_bytes: int
    n_ctx: int
    reserve_bytes: int
    window_days: int | None = None
    half_life_days: float | None = None
    etag: str | None
    signed: SignedBy | None
    pulled_at: float | None = None
    replaced: tuple[str, ...] = ()
    content: str

    def known(self) -> Known:
        """Raises ``ValidationError`` when the content is no manifest."""
        content = self.content.encode()
        return Known(
            PlacementManifest.model_validate_json(content),
            content,
            self.etag,
            self.signed,
            PullKey(
                self.service_url,
                self.vram_bytes,
                self.n_ctx,
                self.reserve_bytes,
                self.window_days,
                self.half_life_days,
            ),
            self.pulled_at,
            self.replaced,
        )


def load_manifest(path: Path, trust: ManifestTrust | None = None) -> PlacementManifest:
    """Read a manifest, as written by ``--output`` or as kept here, and check the signature if there is one.

    Raises :class:`SparkError` naming the wrong field, :class:`RefusedError` for a signature that does not fit or whose
    key is not the one that is pinned for its service.
    """
    trust = ManifestTrust.of_this_machine() if trust is None else trust
    try:
        content = path.read_bytes()
        with contextlib.suppress(ValidationError):
            known = _Pulled.model_validate_json(content).known()
            check_known(known, trust)
            return known.manifest
        manifest = PlacementManifest.model_validate_json(content)
    except OSError as error:
        raise SparkError(f"cannot read the manifest {path}: {error.strerror}", "check the path") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise SparkError(
            f"{path} is not a valid placement manifest: {where}: {first['msg'].removeprefix('Value error, ')}",
            "pull it again: spark pull-profile NAME --output FILE",
        ) from error
    signed = _read_signature(_signature_path(path))
    if signed is not None:
        trust.check_stored(content, signed)
    return manifest


def save_manifest(path: Path, content: bytes, signed: SignedBy | None) -> None:
    """Write a manifest's bytes, and the signature beside it, for people and other machines to read.

    Raises :class:`SparkError` when they cannot be written. Interrupted, it leaves an unsigned file, never one beside
    another's signature.
    """
    beside = _signature_path(path)
    try:
        beside.unlink(missing_ok=True)
    except OSError as error:
        raise SparkError(f"cannot replace {beside}: {error.strerror}", "check the folder and its space") from error
    _write(path, content, _SHARED_MODE)
    if signed is not None:
        _write(beside, signed.model_dump_json(indent=1).encode(), _SHARED_MODE)


def find_manifest(named: str, fingerprint: str) -> PlacementManifest:
    """The manifest in a file, or the one pulled under the name of a workload or a mix; its signature is checked.

    Raises :class:`SparkError` when there is none, :class:`UsageError` for a name that neither can have,
    :class:`RefusedError` as :func:`load_manifest`.
    """
    file = Path(named)
    if file.is_file() or file.suffix or file.name != named:
        return load_manifest(file)
    name = check_profile_name(named, option="--manifest")
    found = ManifestStore(manifests_dir()).find(fingerprint, name)
    if found is None:
        raise SparkError(f"no profile {name!r} was pulled for this model", f"spark pull-profile {name}")
    check_known(found, ManifestTrust.of_this_machine())
    return found.manifest


class ManifestStore:
    """Pulled manifests, one per model and workload or mix (in its canonical spelling): the latest question's answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, fingerprint: str, workload: str) -> Path:
        """Where a pulled manifest is kept."""
        return self._folder / fingerprint / f"{_file_stem(workload)}.json"

    def find(self, fingerprint: str, workload: str) -> Known | None:
        """The pulled manifest of a model and workload, if there is a readable one; its signature is not checked."""
        try:
            return _Pulled.model_validate_json(self.path(fingerprint, workload).read_bytes()).known()
        except (OSError, ValidationError):
            # Never pulled; or damaged, or written by another version: it is only a copy of what the service has.
            return None

    def get(self, fingerprint: str, workload: str) -> PlacementManifest | None:
        """As :meth:`find`, the manifest alone."""
        found = self.find(fingerprint, workload)
        return None if found is None else found.manifest

    def known(self, fingerprint: str, workload: str, key: PullKey) -> Known | None:
        """The stored answer to exactly this question, if it has an ETag."""
        found = self.find(fingerprint, workload)
        return found if found is not None and found.etag is not None and found.key == key else None

    def put(
        self,
        manifest: PlacementManifest,
        key: PullKey,
        etag: str | None,
        *,
        content: bytes | None = None,
        signed: SignedBy | None = None,
        pulled_at: float | None = None,
        replaced: tuple[str, ...] = (),
    ) -> Path:
        """Keep an answer, replacing the previous one at once; returns its path.

        ``content`` are the bytes that ``signed`` is for, by default the manifest's canonical ones.
        """
        path = self.path(manifest.fingerprint, manifest.workload)
        pulled = _Pulled(
            service_url=key.service_url,
            vram_bytes=key.vram_bytes,
            n_ctx=key.n_ctx,
            reserve_bytes=key.reserve_bytes,
            window_days=key.window_days,
            half_life_days=key.half_life_days,
            # A peer's header: what could not be sent back is not kept.
            etag=etag if etag is not None and etag.isascii() and etag.isprintable() else None,
            signed=signed,
            pulled_at=pulled_at,
            replaced=replaced[-_REPLACED_KEPT:],
            content=manifest.model_dump_json() if content is None else content.decode(),
        )
        _write(path, pulled.model_dump_json().encode(), _OWN_MODE)
        return path


def _file_stem(workload: str) -> str:
    """A file's name for a workload or mix, different for each: not every system takes colons, none takes any length."""
    stem = workload.replace(":", "_")  # which no name has
    if len(stem) > _MAX_STEM:
        digest = hashlib.sha256(stem.encode()).hexdigest()
        stem = f"{stem[: _MAX_STEM - len(digest) - 1]}_{digest}"
    return stem


def check_known(known: Known, trust: ManifestTrust) -> None:
    """Refuse a pulled manifest that must not be believed. Raises :class:`RefusedError`."""
    if known.signed is None:
        trust.check_unsigned(known.key.service_url)
    else:
        trust.check_stored(known.content, known.signed)


def _signature_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def _read_signature(path: Path) -> SignedBy | None:
    try:
        return SignedBy.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SparkError(f"cannot read the signature {path}: {error.strerror}", "check the path") from error
    except ValidationError as error:
        raise RefusedError(
            f"{path} is not a manifest's signature, expected one as `spark pull-profile --output` writes",
            "pull both again, or remove it to use the manifest unsigned",
        ) from error


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        with replacing(path, mode) as file:
            file.write(content)
    except OSError as error:
        raise SparkError(f"cannot write {path}: {error.strerror}", "check the folder and its space") from error
