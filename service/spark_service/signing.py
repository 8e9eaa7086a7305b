"""The key that signs manifests: one file in the data folder, made when it is first needed, and its history.

``signing-key.pem`` holds the private key (PKCS #8, mode 0600); ``signing-key-rotations.json`` how it came from earlier
ones. A file that is damaged or open to others is refused and never replaced: with another key every agent that has
pinned this one would stop. The private half of an old key is destroyed by a rotation.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from spark_schemas.signature import (
    MAX_ROTATIONS,
    Rotation,
    Signature,
    SigningKeyInfo,
    key_id_of,
    key_text,
    rotation_message,
)
from spark_service.errors import SigningKeyError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["KEY_NAME", "ROTATIONS_NAME", "Signer"]

KEY_NAME = "signing-key.pem"
ROTATIONS_NAME = "signing-key-rotations.json"
_MAX_KEY_BYTES = 4096
_ROTATIONS = TypeAdapter(tuple[Rotation, ...])


@dataclass(frozen=True, slots=True)
class _Loaded:
    stamp: tuple[int, int, int]
    private: Ed25519PrivateKey
    info: SigningKeyInfo


class Signer:
    """Signs with the key of a data folder. Methods may be called from any thread.

    Nothing is read, and ``cryptography`` not imported, before the first use. A key that another process rotates is
    noticed at the next use. All methods raise :class:`SigningKeyError` for files that cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._key_path = folder / KEY_NAME
        self._rotations_path = folder / ROTATIONS_NAME
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    def info(self) -> SigningKeyInfo:
        """The public key, with the rotations that lead to it; the key is made if there is none."""
        return self._current().info

    def sign(self, body: bytes) -> Signature:
        """Sign the bytes of an answer."""
        loaded = self._current()
        return Signature(loaded.info.key_id, loaded.private.sign(body))

    def stamp(self) -> tuple[int, int, int] | None:
        """Changes whenever the key file does; ``None`` where there is none to be seen. Costs one ``stat``."""
        try:
            return _stamp(self._key_path)
        except SigningKeyError:
            # Whoever signs next hears why.
            return None

    def rotate(self) -> SigningKeyInfo:
        """Replace the key by a new one that the old one vouches for, and return what is public of it."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        with self._lock:
            old = self._load()
            new = Ed25519PrivateKey.generate()
            new_key = _public_text(new)
            word = Signature(old.info.key_id, old.private.sign(rotation_message(old.info.key, new_key)))
            rotation = Rotation(old_key=old.info.key, new_key=new_key, signature=word.header().rpartition("sig=")[2])
            # The statement first: interrupted here, it leads to a key that is not the current one and is left out.
            _replace(self._rotations_path, _ROTATIONS.dump_json((*old.info.rotations, rotation), indent=1))
            _replace(self._key_path, _pem(new))
            self._loaded = None
            return self._load().info

    def _current(self) -> _Loaded:
        loaded = self._loaded
        if loaded is not None and loaded.stamp == _stamp(self._key_path):
            return loaded
        with self._lock:
            return self._load()

    def _load(self) -> _Loaded:
        stamp = _stamp(self._key_path)
        if stamp is None:
            if self._loaded is not None or self._rotations_path.exists():
                raise SigningKeyError(
                    f"signing key {self._key_path} is gone, expected the key that agents have pinned",
                    f"restore it from a backup; or remove {ROTATIONS_NAME}, too, and restart for a new one: "
                    "every agent must then be told to trust it",
                )
            _create(self._key_path)
            stamp = _stamp(self._key_path)
        if stamp is None:
            raise SigningKeyError(f"signing key {self._key_path} disappeared", "restore it from a backup")
        private = _read_key(self._key_path)
        key = _public_text(private)
        rotations = _leading_to(key, _read_rotations(self._rotations_path))
        info = SigningKeyInfo(key=key, key_id=key_id_of(key), rotations=rotations)
        self._loaded = _Loaded(stamp, private, info)
        return self._loaded


def _leading_to(key: str, rotations: tuple[Rotation, ...]) -> tuple[Rotation, ...]:
    """The unbroken chain that ends at a key; a statement of an interrupted rotation falls away."""
    chain: list[Rotation] = []
    for rotation in reversed(rotations):
        if rotation.new_key == key:
            chain.append(rotation)
            key = rotation.old_key
    return tuple(reversed(chain[:MAX_ROTATIONS]))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), "correct the folder's permissions") from error
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), "correct its permissions") from error
    if os.name == "posix" and mode & 0o077:
        raise _unusable(path, f"found it open to others (mode {mode:04o}), expected 0600", f"chmod 600 {path}")
    restore = "restore it from a backup; it is never replaced, because agents have pinned it"
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _unusable(path, "found a damaged file, expected an Ed25519 key as PEM (PKCS #8)", restore) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _unusable(path, "found another kind of key, expected an Ed25519 key", restore)
    return key


def _read_rotations(path: Path) -> tuple[Rotation, ...]:
    try:
        return _ROTATIONS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), "correct its permissions") from error
    except ValidationError as error:
        raise _unusable(
            path,
            "found a damaged file, expected the list of key rotations",
            "restore it from a backup; or remove it: agents that pinned an earlier key must then be told of this one",
        ) from error


def _unusable(path: Path, reason: str, hint: str) -> SigningKeyError:
    return SigningKeyError(f"signing key file {path}: {reason}", hint)


def _create(path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    _write_through(path, _pem(Ed25519PrivateKey.generate()), replace=False)


def _replace(path: Path, content: bytes) -> None:
    _write_through(path, content, replace=True)


def _write_through(path: Path, content: bytes, *, replace: bool) -> None:
    """Make a file appear whole; without ``replace`` one that another process was faster to make stays."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                temporary.replace(path)
            else:
                path.hardlink_to(temporary)
        except FileExistsError:
            # Two starts at once: both go on with the one key.
            return
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), "make the data folder writable, or free space") from error


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pem(key: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _public_text(key: Ed25519PrivateKey) -> str:
    return key_text(key.public_key().public_bytes_raw())
