"""Six Ed25519 keys, the same every time, and what a service shows of them."""

from __future__ import annotations

import base64

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spark_schemas.signature import Rotation, Signature, SigningKeyInfo, key_id_of, key_text, rotation_message

PRIVATE = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(6)]
KEYS = [key_text(private.public_key().public_bytes_raw()) for private in PRIVATE]


def sign(number: int, content: bytes) -> Signature:
    return Signature(key_id_of(KEYS[number]), PRIVATE[number].sign(content))


def rotation(old: int, new: int, by: int | None = None) -> Rotation:
    signature = PRIVATE[old if by is None else by].sign(rotation_message(KEYS[old], KEYS[new]))
    return Rotation(old_key=KEYS[old], new_key=KEYS[new], signature=base64.b64encode(signature).decode())


def info(number: int, *rotations: Rotation) -> SigningKeyInfo:
    return SigningKeyInfo(key=KEYS[number], key_id=key_id_of(KEYS[number]), rotations=rotations)
