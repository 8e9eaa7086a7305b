"""Addresses that an agent listens on, and how it is reached there from this machine."""

from __future__ import annotations

import ipaddress
import socket

from spark_agent.errors import UsageError

__all__ = ["EVERY", "base_url_of", "is_own_address", "listening_address", "reachable"]

EVERY = frozenset({"0.0.0.0", "::"})  # noqa: S104 - nothing is bound
"""Every address of this machine."""


def listening_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """What ``--host`` means; raise :class:`UsageError` for what is no address."""
    name = "127.0.0.1" if host == "localhost" else host
    try:
        return ipaddress.ip_address(name)
    except ValueError as error:
        raise UsageError(f"--host: found {host!r}, expected an IP address or localhost", "e.g. 127.0.0.1") from error


def reachable(host: str) -> str:
    """Where one who listens on an address is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - nothing is bound


def base_url_of(host: str, port: int, scheme: str = "http") -> str:
    """The URL of an agent that listens on an address, as this machine reaches it, without a slash at the end."""
    found = reachable(host)
    return f"{scheme}://[{found}]:{port}" if ":" in found else f"{scheme}://{found}:{port}"


def is_own_address(host: str) -> bool:
    """Whether an address is this machine's: nobody else is sent what goes there. A name is none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    if address.is_loopback:
        return True
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return not (address.is_multicast or address.is_unspecified)
