"""Ending the server: in order on the first signal, at once on the second, the process itself on the third."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

__all__ = ["StoppableServer"]

_GRACE_S = 5
"""How long running requests may go on after a signal, before they are answered with an error."""


class StoppableServer(uvicorn.Server):
    """Gives running requests a few seconds. A second signal cuts connections; the counts are kept even so."""

    def __init__(self, config: uvicorn.Config, give_up: Callable[[], None]) -> None:
        """``give_up`` ends running requests with an error."""
        super().__init__(config)
        self._give_up = give_up
        self._signals = 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, for a while."""
        ending = asyncio.get_running_loop().call_later(_GRACE_S, self._give_up)
        await super().shutdown(sockets)
        ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal; in place of uvicorn's, which forces only on SIGINT and raises it again at the end."""
        del frame
        self._signals += 1
        self.should_exit = True
        if self._signals == 2:
            self.force_exit = True
            self._give_up()
        elif self._signals > 2:
            # What is left could hang: a step that never ends, a disk that never answers.
            os._exit(128 + sig)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take signals also before and after :meth:`run`, so that stopping is no failure."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
