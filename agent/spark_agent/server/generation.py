"""One request on its way through the worker, and what it hears back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spark_agent.server.thought import ThoughtLimit
from spark_runtime.sampling import Sampling

__all__ = [
    "AbandonedError",
    "BusyError",
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
    events: asyncio.Queue[Piece | Finished | Exception] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def check_read(self) -> None:
        """Raise :class:`FellBehindError` when too much waits for the client; from the computing thread."""
        each = _BYTES_A_PIECE
        if self.top_logprobs is not None:
            each += _BYTES_A_LOGPROB * (1 + self.top_logprobs)
        if self.events.qsize() * each > MAX_UNREAD_BYTES:
            raise FellBehindError

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
