"""One request on its way through the worker, and what it hears back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from spark_agent.server.thought import ThoughtLimit
from spark_runtime.sampling import Sampling

__all__ = [
    "AbandonedError",
    "BusyError",
    "Events",
    "FellBehindError",
    "Finished",
    "Generation",
    "GenerationReport",
    "Piece",
    "TokenLogprob",
]

MAX_TOP_LOGPROBS = 20
MAX_UNREAD_BYTES = 16 * 2**20
"""What may wait in memory for a client that does not read, beyond what its connection holds; more ends its answer."""
_BYTES_A_PIECE = 200
_BYTES_A_LOGPROB = 250


class BusyError(Exception):
    """The line is full."""


class AbandonedError(Exception):
    """The generation was given up: its client has left, or the server is ending."""


class FellBehindError(AbandonedError):
    """The generation was given up: its client does not read."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token and how likely it was, by the model's own distribution: before any sampling parameter."""

    token: int
    piece: bytes
    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, bytes, float], ...]
    """The likeliest tokens, likeliest first: id, bytes, logarithm."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain, and the tokens that became certain with it, if log probabilities were asked for.

    Either may be empty: a token's text may be held back, or a token may have none.
    """

    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """How a generation ended."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    stop: str | None = None
    """The stop string that was met."""


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What one generation took, told after it ended, however it ended."""

    outcome: Literal["stop", "length", "cancelled", "error"]
    workload: str | None
    queued_s: float
    """From being submitted to its first step."""
    prompt_s: float
    """Spent computing the prompt, without what others took in between."""
    decode_s: float
    """Spent generating, without what others took in between."""
    first_token_s: float | None
    """From being submitted to the first token; ``None`` without one."""
    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int


class Events:
    """What a request hears of its generation, in order. Told by any thread, read on the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: deque[Piece | Finished | Exception] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._woken: asyncio.Future[None] | None = None

    def tell(self, event: Piece | Finished | Exception) -> None:
        """Add an event, and wake the reader if it waits: one that is busy sees by itself what has come meanwhile."""
        self._told.append(event)
        # Looked at after adding, as the reader looks for events after saying that it waits: one of the two sees.
        waiting = self._waiting
        if waiting is not None and waiting is not self._woken:
            self._woken = waiting
            # A loop that has been closed means that the server is ending and nobody waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_wake, waiting)

    @property
    def unread(self) -> int:
        """How many wait for the reader."""
        return len(self._told)

    def take(self) -> Piece | Finished | Exception | None:
        """The next one, if it has come."""
        return self._told.popleft() if self._told else None

    async def wait(self, limit_s: float) -> bool:
        """Until there is one, at most so long; whether there is. Others are served meanwhile in any case."""
        waiting = self._waiting = self._loop.create_future()
        if self._told:
            self._waiting = None
            await asyncio.sleep(0)
            return True
        timer = self._loop.call_later(limit_s, _wake, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            self._waiting = None
        return bool(self._told)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


@dataclass(slots=True)
class Generation:
    """One request on its way through the worker."""

    lineage: str
    tokens: Sequence[int]
    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]
    top_logprobs: int | None = None
    """``None``: no log probabilities; 0 to :data:`MAX_TOP_LOGPROBS`: each token's own, and so many of the likeliest."""
    workload: str | None = None
    """``None`` is the agent's default."""
    thought_limit: ThoughtLimit | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    events: Events = field(default_factory=Events)

    def check_read(self) -> None:
        """Raise :class:`FellBehindError` when too much waits for the client; from the computing thread."""
        each = _BYTES_A_PIECE
        if self.top_logprobs is not None:
            each += _BYTES_A_LOGPROB * (1 + self.top_logprobs)
        if self.events.unread * each > MAX_UNREAD_BYTES:
            raise FellBehindError
