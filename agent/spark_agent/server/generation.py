"""One request on its way through the worker, and what it hears back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from spark_runtime.sampling import Sampling

__all__ = ["AbandonedError", "BusyError", "Finished", "Generation", "Piece"]


class BusyError(Exception):
    """The line is full."""


class AbandonedError(Exception):
    """The generation was given up: its client has left, or the server is ending."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """How a generation ended."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Generation:
    """One request on its way through the worker."""

    lineage: str
    tokens: list[int]
    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]
    cancelled: threading.Event = field(default_factory=threading.Event)
    events: asyncio.Queue[Piece | Finished | Exception] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def emit(self, event: Piece | Finished | Exception) -> None:
        """Hand an event to the waiting request, from the computing thread."""
        # A loop that has been closed means that the server is ending and nobody waits.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    async def results(self) -> AsyncIterator[Piece | Finished]:
        """Events until the generation is finished; raises what the engine raised. Leaving early cancels it."""
        try:
            while True:
                event = await self.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self.cancelled.set()
