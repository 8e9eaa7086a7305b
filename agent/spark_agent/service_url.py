"""Addresses of calibration services."""

from __future__ import annotations

from urllib.parse import urlsplit

from spark_schemas.local_address import is_loopback_url

__all__ = ["DEFAULT_SERVICE_URL", "normalise_service_url", "protects_secrets"]

DEFAULT_SERVICE_URL = "http://127.0.0.1:8710"


def normalise_service_url(text: str) -> str:
    """Return the address without a trailing slash; raise :class:`ValueError` saying what was expected.

    Only scheme, host, port and path: credentials in an address end up in logs, and a query has no meaning here.
    """
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("expected http://HOST[:PORT] or https://HOST[:PORT]")
    if parts.username is not None or parts.password is not None:
        raise ValueError("expected no user name or password in the address")
    if parts.query or parts.fragment:
        raise ValueError("expected no query or fragment in the address")
    if any(not 33 <= ord(letter) < 127 for letter in text):
        raise ValueError("expected printable ASCII without spaces")
    _ = parts.port  # Raises ValueError when it is not a port.
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def protects_secrets(url: str) -> bool:
    """Whether a token may be sent there: encrypted, or never leaving the machine."""
    return urlsplit(url).scheme == "https" or is_loopback_url(url)
