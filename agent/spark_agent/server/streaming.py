"""A streamed answer on its way to a client, and clients that leave before its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spark_agent.dialogue.events import Event
from spark_agent.server.api_error import EXPECTED, ApiError, request_id_of
from spark_agent.server.exchange import Answering, Ended, Output
from spark_agent.server.generation import TokenLogprob

__all__ = ["NOT_KEPT", "Answer", "Leaving", "Stream"]

NOT_KEPT = {"Cache-Control": "no-cache"}
_HEADERS = [(b"cache-control", b"no-cache"), (b"content-type", b"text/event-stream; charset=utf-8")]
_WATCH_AFTER_S = 0.01


class Answer(Protocol):
    """An answer in a dialect's shape."""

    def whole(self, events: Sequence[Event], tokens: Sequence[TokenLogprob], ended: Ended) -> dict[str, Any]:
        """The object of a whole answer."""

    def chunks(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """The events of a streamed answer."""

    def failed(self, error: ApiError, request_id: str | None, /) -> bytes:
        """A failure after the status was sent."""


class Leaving:
    """Notices that a client has left, and tells with :class:`ClientDisconnect`.

    It begins to look a hundredth of a second after a request was ready: before, that would only delay an answer.
    """

    def __init__(self, receive: Receive, left: Callable[[Exception], None]) -> None:
        self._receive = receive
        self._left = left
        self._looking: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._look)

    def close(self) -> None:
        """Look no more; safe to call twice."""
        self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()

    def _look(self) -> None:
        self._looking = asyncio.ensure_future(self._gone())

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left(ClientDisconnect())


class Stream(Response):
    """Sends the events of an answer: what comes together goes out in one write, and nothing waits for more."""

    def __init__(self, answer: Answer, answering: Answering, leaving: Leaving, done: Callable[[], None]) -> None:
        """``done`` is called when all of it was given out."""
        self.status_code = 200
        self.background = None
        self.raw_headers = _HEADERS
        self._answer = answer
        self._answering = answering
        self._leaving = leaving
        self._done = done
        self._chunks = answer.chunks(answering.outputs(before_waiting=self._flush))
        self._held: list[bytes] = []
        self._waited = False
        self._send: Send | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. What goes wrong before anything of the answer has come is raised; a client that left is no error.

        What comes first decides between an error's status and a stream, if it comes soon: until then nothing is sent.
        """
        del receive  # who watches the client has it
        try:
            async for chunk in self._chunks:
                self._held.append(chunk)
                if self._waited and self._send is None:
                    await self._start(send)
            if self._send is None:
                await self._start(send)
            self._done()
        except Exception as error:
            if self._send is None:
                if isinstance(error, EXPECTED):
                    raise ApiError.of(error) from error
                raise
            if isinstance(error, ClientDisconnect):
                return
            # The status is sent; the error can only be the stream's last event.
            self._held.append(self._answer.failed(ApiError.of(error), request_id_of(scope)))
            if not isinstance(error, (*EXPECTED, ApiError)):
                await self._flush()
                raise  # the log gets the traceback
        finally:
            self._answering.cancel()
            self._leaving.close()
        await send({"type": "http.response.body", "body": b"".join(self._held), "more_body": False})

    async def _start(self, send: Send) -> None:
        self._send = send
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _flush(self) -> None:
        self._waited = True
        if self._held and self._send is not None:
            body = b"".join(self._held)
            self._held.clear()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
