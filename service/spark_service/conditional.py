"""Strong entity tags and If-None-Match (RFC 9110): a pull that changed nothing costs a 304."""

from __future__ import annotations

import hashlib
import re

__all__ = ["etag_of", "none_match"]

_TAG = re.compile(r'(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")')


def etag_of(body: bytes) -> str:
    """Quoted SHA-256 of the bytes sent."""
    return f'"{hashlib.sha256(body).hexdigest()}"'


def none_match(header: str | None, etag: str) -> bool:
    """Whether If-None-Match allows the answer to be sent: no tag in it is this one, by weak comparison."""
    if header is None:
        return True
    return header.strip() != "*" and etag not in _TAG.findall(header)
