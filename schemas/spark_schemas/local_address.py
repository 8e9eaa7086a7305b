"""Which addresses are this machine alone. Pure.

A web page cannot reach a program of this machine by such an address without telling: one that rebinds its own name to
127.0.0.1 still sends that name as ``Host``, one that posts across sites sends its ``Origin``. So whoever answers
without a token answers only those whose ``Host`` and ``Origin`` name this machine.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

__all__ = ["foreign_header", "is_loopback", "is_loopback_url"]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; names other than ``localhost`` may resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@functools.lru_cache(maxsize=16)
def is_loopback_url(url: str) -> bool:
    """Whether a URL, or what follows its scheme with ``//`` before it, names this machine alone, and nothing else.

    One with a user name does not, and neither does one that is malformed. Clients of this machine all say the same.
    """
    try:
        parts = urlsplit(url)
        return is_loopback(parts.hostname or "") and parts.username is None
    except ValueError:
        return False


def foreign_header(headers: Mapping[str, str]) -> str | None:
    """The first header of a request that shows that it comes from elsewhere: ``Host``, ``Origin``, or none.

    ``headers`` by name in lower case, or case-insensitive.
    """
    if not is_loopback_url(f"//{headers.get('host', '')}"):
        return "Host"
    origin = headers.get("origin")
    if origin is not None and not is_loopback_url(origin):
        return "Origin"
    return None
