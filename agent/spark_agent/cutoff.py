"""Ending an exchange from outside: at a deadline, or because the process wants to leave.

A peer that sends one byte now and then never runs into a timeout of single reads. Shutting the socket down wakes
whoever waits on it, in any thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["CutOff"]

_CONNECTED = ("connect_tcp.complete", "start_tls.complete")
"""How httpcore's events end that bring a new stream."""


class CutOff:
    """Knows the socket in use through httpcore's trace events (``extensions={"trace": cut_off.trace}``)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._expired = False
        self._cut = False

    @property
    def expired(self) -> bool:
        """Whether the latest :meth:`within` ran out of time."""
        return self._expired

    @property
    def was_cut(self) -> bool:
        """Whether :meth:`cut` was called."""
        return self._cut

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Take note of a new connection."""
        if not event.endswith(_CONNECTED):
            return
        with self._lock:
            self._socket = info["return_value"].get_extra_info("socket")
            if self._expired or self._cut:
                self._shut()

    def cut(self) -> None:
        """End the exchange under way, if any, and every later one; from any thread."""
        with self._lock:
            self._cut = True
            self._shut()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """End the exchange of the block when it has lasted so long."""
        with self._lock:
            self._expired = False
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        with self._lock:
            self._expired = True
            self._shut()

    def _shut(self) -> None:
        if self._socket is None:
            return
        # Already gone is as good. Not the TLS socket's own method, which pulls the rug from under a reading thread.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
