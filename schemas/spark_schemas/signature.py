"""Signatures of manifests: Ed25519 over exactly the bytes of the answer's body, in a header beside it.

A detached signature leaves the body as it is: readers that verify nothing keep working, and readers that do need not
guess how a JSON value was written. ``Spark-Signature: ed25519;keyid=HEX;sig=BASE64``.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints

from spark_schemas.base import Schema

__all__ = [
    "MAX_ROTATIONS",
    "PINNED_HEADER",
    "PINNED_SIGNATURE_HEADER",
    "SIGNATURE_HEADER",
    "KeyId",
    "PinSignature",
    "PublicKey",
    "Rotation",
    "Signature",
    "SigningKeyInfo",
    "key_id_of",
    "key_text",
    "pin_message",
    "rotation_message",
]

SIGNATURE_HEADER = "Spark-Signature"
PINNED_HEADER = "Spark-Pinned"
"""Names the profile revision that an administrator has the service serve in place of the newest."""
PINNED_SIGNATURE_HEADER = "Spark-Pinned-Signature"
"""What proves that: a pin lets an older revision pass, which nobody who replays an old answer must be able to claim."""

MAX_ROTATIONS = 1000
"""Statements that are shown: agents further behind must be told the new key."""

KeyId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""First half of the SHA-256 of the 32 bytes of a public key: what people compare."""

PublicKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=$")]
"""An Ed25519 public key, 32 bytes in base64."""

_SignatureText = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{85}[AQgw]==$")]

_PIN_HEADER = re.compile(
    r"ed25519;keyid=([0-9a-f]{32});day=([0-9]{4}-[0-9]{2}-[0-9]{2});sig=([A-Za-z0-9+/]{85}[AQgw]==)", re.ASCII
)
_HEADER = re.compile(r"ed25519;keyid=([0-9a-f]{32});sig=([A-Za-z0-9+/]{85}[AQgw]==)", re.ASCII)


class Rotation(Schema):
    """The old key's word that the new one takes its place, so that whoever trusts the old one can follow."""

    old_key: PublicKey
    new_key: PublicKey
    signature: _SignatureText
    """By the old key, over :func:`rotation_message`."""


class SigningKeyInfo(Schema):
    """The key that a service signs manifests with now, and how it came from earlier ones, oldest first."""

    algorithm: Literal["ed25519"] = "ed25519"
    key: PublicKey
    key_id: KeyId
    rotations: Annotated[tuple[Rotation, ...], Field(max_length=MAX_ROTATIONS, fail_fast=True)] = ()


@dataclass(frozen=True, slots=True)
class Signature:
    """What the header says: who signed, and the 64 bytes of the signature."""

    key_id: str
    value: bytes

    def header(self) -> str:
        """The header's text."""
        return f"ed25519;keyid={self.key_id};sig={base64.b64encode(self.value).decode()}"

    @classmethod
    def parse(cls, header: str) -> Self:
        """Read a header's text. Raises ``ValueError`` saying what was expected."""
        found = _HEADER.fullmatch(header)
        if found is None:
            raise ValueError("expected ed25519;keyid=32 hex digits;sig=64 bytes in base64")
        return cls(found[1], base64.b64decode(found[2], validate=True))


@dataclass(frozen=True, slots=True)
class PinSignature:
    """Who says that a revision is pinned, on which UTC day, and the 64 bytes of the signature."""

    key_id: str
    day: dt.date
    value: bytes

    def header(self) -> str:
        """The header's text."""
        return f"ed25519;keyid={self.key_id};day={self.day.isoformat()};sig={base64.b64encode(self.value).decode()}"

    @classmethod
    def parse(cls, header: str) -> Self:
        """Read a header's text. Raises ``ValueError`` saying what was expected."""
        found = _PIN_HEADER.fullmatch(header)
        if found is None:
            raise ValueError("expected ed25519;keyid=32 hex digits;day=YYYY-MM-DD;sig=64 bytes in base64")
        return cls(found[1], dt.date.fromisoformat(found[2]), base64.b64decode(found[3], validate=True))


def key_text(public: bytes) -> str:
    """The 32 bytes of a public key as they travel."""
    return base64.b64encode(public).decode()


def key_id_of(key: str) -> str:
    """The id of a public key in base64. Raises ``ValueError`` for what is no base64."""
    return hashlib.sha256(base64.b64decode(key, validate=True)).hexdigest()[:32]


def rotation_message(old_key: str, new_key: str) -> bytes:
    """What a rotation's signature covers; no manifest begins like it."""
    return f"spark-key-rotation-v1\n{old_key}\n{new_key}\n".encode()


def pin_message(fingerprint: str, workload: str, phase: str, revision: str, day: dt.date) -> bytes:
    """What a pin's signature covers: which revision is served of what, on which day; no manifest begins like it."""
    return f"spark-pin-v1\n{fingerprint}\n{workload}\n{phase}\n{revision}\n{day.isoformat()}\n".encode()
