"""Checking Ed25519 signatures and the chain of rotations from one key to another. Pure; nothing here signs."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator

from spark_schemas.base import Schema
from spark_schemas.manifest import PlacementManifest
from spark_schemas.signature import (
    PinSignature,
    PublicKey,
    Signature,
    SigningKeyInfo,
    key_id_of,
    pin_message,
    rotation_message,
)

__all__ = ["MOST_DAYS_OFF", "SignedBy", "doubt_of_pin", "keys_leading_to", "parse_public_key", "verifies"]


MOST_DAYS_OFF = 1
"""Between the UTC day that a pin is of and this machine's: whoever replays it has that long, and clocks differ."""


def _checked_header(text: str) -> str:
    Signature.parse(text)
    return text


class SignedBy(Schema):
    """A signature as it is kept beside a manifest: whose key made it, and for which service it was checked."""

    service_url: str
    key: PublicKey
    signature: Annotated[str, AfterValidator(_checked_header)]
    """The header's text."""

    def covers(self, content: bytes) -> bool:
        """Whether the signature is this key's over exactly these bytes."""
        return verifies(self.key, content, Signature.parse(self.signature))


def parse_public_key(text: str) -> str:
    """Return a public key in base64 as it was given; raise :class:`ValueError` for what is no key."""
    expected = "expected an Ed25519 public key, 32 bytes in base64 (44 characters), as `spark-service key show` prints"
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(expected) from None
    if len(raw) != 32 or base64.b64encode(raw).decode() != text:
        raise ValueError(expected)
    return text


def verifies(key: str, content: bytes, signature: Signature) -> bool:
    """Whether the key, in base64, made this signature over exactly these bytes."""
    return signature.key_id == key_id_of(key) and _verifies(key, content, signature.value)


def doubt_of_pin(key: str, manifest: PlacementManifest, header: str | None, today: dt.date) -> str | None:
    """Why it is not proven that a manifest is of a revision that is pinned now; ``None`` where the key says so."""
    if header is None:
        return "it does not sign that"
    try:
        found = PinSignature.parse(header)
    except ValueError as error:
        return f"its signature cannot be read: {error}"
    if abs((found.day - today).days) > MOST_DAYS_OFF:
        return f"it was said on {found.day}, and today is {today}"
    said = pin_message(manifest.fingerprint, manifest.workload, manifest.phase, manifest.profile_revision, found.day)
    if not verifies(key, said, Signature(found.key_id, found.value)):
        return "its signature does not fit"
    return None


def keys_leading_to(pinned: str, info: SigningKeyInfo) -> tuple[str, ...] | None:
    """The keys between a pinned one and the service's present one, the pinned one first; ``None`` without a way.

    Every step must be vouched for by the key before it. What leads elsewhere is passed over, not believed.
    """
    way = list(_follow(pinned, info))
    return tuple(way[:-1]) if way[-1] == info.key and len(way) > 1 else None


def _follow(key: str, info: SigningKeyInfo) -> Iterator[str]:
    yield key
    for rotation in info.rotations:
        if rotation.old_key != key:
            continue
        message = rotation_message(rotation.old_key, rotation.new_key)
        if not _verifies(key, message, base64.b64decode(rotation.signature)):
            return
        key = rotation.new_key
        yield key


def _verifies(key: str, content: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(base64.b64decode(key)).verify(signature, content)
    except InvalidSignature:
        return False
    return True
