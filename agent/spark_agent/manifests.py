"""Manifests on this machine: pulled ones by model and workload, and any file a person names."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_agent.paths import manifests_dir
from spark_agent.workload_name import check_workload_name
from spark_schemas.manifest import PlacementManifest

__all__ = ["ManifestStore", "PullKey", "find_manifest", "load_manifest", "save_manifest"]

_OWN_MODE = 0o600
_SHARED_MODE = 0o644
"""Of a file that a person asked for by name, to pass on: a manifest says nothing about anybody's sessions."""


@dataclass(frozen=True, slots=True)
class PullKey:
    """What was asked of which service: an ETag is only good for the same question."""

    service_url: str
    vram_bytes: int
    n_ctx: int
    reserve_bytes: int


class _Pulled(BaseModel):
    """A stored manifest with the answer's ETag and the question."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    service_url: str
    vram_bytes: int
    n_ctx: int
    reserve_bytes: int
    etag: str | None
    manifest: PlacementManifest


def load_manifest(path: Path) -> PlacementManifest:
    """Read a manifest, as written by ``--output`` or as kept here; raise :class:`SparkError` naming the wrong field."""
    try:
        content = path.read_bytes()
        with contextlib.suppress(ValidationError):
            return _Pulled.model_validate_json(content).manifest
        return PlacementManifest.model_validate_json(content)
    except OSError as error:
        raise SparkError(f"cannot read the manifest {path}: {error.strerror}", "check the path") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise SparkError(
            f"{path} is not a valid placement manifest: {where}: {first['msg'].removeprefix('Value error, ')}",
            "pull it again: spark pull-profile NAME --output FILE",
        ) from error


def save_manifest(path: Path, manifest: PlacementManifest) -> None:
    """Write a manifest for people and other machines to read; raise :class:`SparkError` when it cannot be written."""
    _write(path, manifest.model_dump_json(indent=1), _SHARED_MODE)


def find_manifest(named: str, fingerprint: str) -> PlacementManifest:
    """The manifest in a file, or the one that was pulled under a workload's name for a model.

    Raises :class:`SparkError` when there is none, :class:`UsageError` for a name that no workload can have.
    """
    file = Path(named)
    if file.is_file() or file.suffix or file.name != named:
        return load_manifest(file)
    check_workload_name(named, option="--manifest")
    found = ManifestStore(manifests_dir()).get(fingerprint, named)
    if found is None:
        raise SparkError(f"no profile {named!r} was pulled for this model", f"spark pull-profile {named}")
    return found


class ManifestStore:
    """Pulled manifests, one per (model, workload): the latest question's answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, fingerprint: str, workload: str) -> Path:
        """Where a pulled manifest is kept."""
        return self._folder / fingerprint / f"{workload}.json"

    def get(self, fingerprint: str, workload: str) -> PlacementManifest | None:
        """The pulled manifest of a model and workload, if there is a readable one."""
        pulled = self._read(fingerprint, workload)
        return None if pulled is None else pulled.manifest

    def known(self, fingerprint: str, workload: str, key: PullKey) -> tuple[PlacementManifest, str] | None:
        """The stored answer to exactly this question, with its ETag."""
        pulled = self._read(fingerprint, workload)
        if pulled is None or pulled.etag is None:
            return None
        asked = PullKey(pulled.service_url, pulled.vram_bytes, pulled.n_ctx, pulled.reserve_bytes)
        return (pulled.manifest, pulled.etag) if asked == key else None

    def put(self, manifest: PlacementManifest, key: PullKey, etag: str | None) -> Path:
        """Keep an answer, replacing the previous one at once; returns its path."""
        path = self.path(manifest.fingerprint, manifest.workload)
        pulled = _Pulled(
            service_url=key.service_url,
            vram_bytes=key.vram_bytes,
            n_ctx=key.n_ctx,
            reserve_bytes=key.reserve_bytes,
            # A peer's header: what could not be sent back is not kept.
            etag=etag if etag is not None and etag.isascii() and etag.isprintable() else None,
            manifest=manifest,
        )
        _write(path, pulled.model_dump_json(), _OWN_MODE)
        return path

    def _read(self, fingerprint: str, workload: str) -> _Pulled | None:
        try:
            return _Pulled.model_validate_json(self.path(fingerprint, workload).read_bytes())
        except (OSError, ValidationError):
            # Never pulled; or damaged, or written by another version: it is only a copy of what the service has.
            return None


def _write(path: Path, text: str, mode: int) -> None:
    try:
        with replacing(path, mode) as file:
            file.write(text.encode())
    except OSError as error:
        raise SparkError(f"cannot write {path}: {error.strerror}", "check the folder and its space") from error
