"""Which sessions calibrate a profile and which ones judge it."""

from __future__ import annotations

import hashlib

from spark_schemas.ids import Split

__all__ = ["HELD_OUT_SHARE", "split_of"]

HELD_OUT_SHARE = 0.2
_DOMAIN = b"spark-split-v1"


def split_of(session_hash: str) -> Split:
    """Return the side of the split for a session hash (64 hex digits, hashed as its 32 bytes).

    A pure function of the hash: the same session, its forks and its re-uploads always fall on one side, and the
    service recomputes what an agent claims.
    """
    digest = hashlib.sha256(_DOMAIN + bytes.fromhex(session_hash)).digest()
    # Integer comparison: exact where the fraction as a float would round.
    return "held_out" if int.from_bytes(digest[:8]) * 5 < 2**64 else "calibration"
