"""Signing keys of calibration services that this machine has pinned: one small file per service address.

The first key that a service shows is trusted and kept; another one later is refused, unless the pinned key itself
vouches for it (a rotation). A damaged file is an error and never counts as "no key yet".
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from spark_agent.errors import ConfigError
from spark_agent.files import replacing
from spark_agent.paths import ensure_private_dir
from spark_schemas.base import Schema
from spark_schemas.signature import PublicKey, key_id_of

__all__ = ["KeyRing", "PinnedKey"]


class PinnedKey(Schema):
    """What is trusted of one service."""

    service_url: str
    key: PublicKey
    earlier: tuple[PublicKey, ...] = ()
    """Keys that vouched for this one, oldest first: manifests they signed stay good."""

    @property
    def key_id(self) -> str:
        """What people compare."""
        return key_id_of(self.key)

    @property
    def all_keys(self) -> frozenset[str]:
        """The key and the earlier ones."""
        return frozenset((self.key, *self.earlier))


class KeyRing:
    """Pinned keys in a folder. Every method raises :class:`ConfigError` for a file that cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, service_url: str) -> Path:
        """Where the key of a service is kept."""
        return self._folder / f"{hashlib.sha256(service_url.encode()).hexdigest()[:32]}.json"

    def get(self, service_url: str) -> PinnedKey | None:
        """The pinned key of a service."""
        path = self.path(service_url)
        try:
            found = PinnedKey.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(
                f"cannot read the pinned key {path}: {error.strerror}", "check its permissions"
            ) from error
        except ValidationError as error:
            raise ConfigError(
                f"the pinned key of {service_url} is damaged: {path}",
                f"pin it again: spark service-key forget --service {service_url}, then pull",
            ) from error
        if found.service_url != service_url:
            raise ConfigError(
                f"{path} holds the key of {found.service_url}, expected that of {service_url}", "remove the file"
            )
        return found

    def all(self) -> list[PinnedKey]:
        """Every pinned key, by address."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(PinnedKey.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError) as error:
                raise ConfigError(f"cannot use the pinned key {path}", "remove the file, then pull again") from error
        return sorted(found, key=lambda pin: pin.service_url)

    def put(self, pin: PinnedKey) -> None:
        """Pin a key, in place of the service's earlier one."""
        path = self.path(pin.service_url)
        try:
            ensure_private_dir(self._folder)
            with replacing(path) as file:
                file.write(pin.model_dump_json().encode())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", "check the folder and its space") from error

    def forget(self, service_url: str) -> bool:
        """Trust no key of a service any more; return whether one was pinned, readable or not."""
        path = self.path(service_url)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"cannot remove {path}: {error.strerror}", "check the folder's permissions") from error
        return True
