"""Answers that are ready to be sent: encoded, tagged and signed once, and served again while nothing was written.

The middleware answers a known question before the framework parses it. It must stand inside whatever decides who may
ask: it looks at the path and the query alone.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from spark_service.conditional import etag_of, none_match

__all__ = ["Answer", "AnswerCache", "ByteCache", "ReadyAnswers", "State"]

MAX_AGE_SECONDS = 60.0
"""A profile whose weights follow the calendar changes without a write."""
ENTRY_BYTES = 1024
"""What an entry costs besides its body, at most: keys, headers, bookkeeping."""
MAKING_LOCKS = 64

State = tuple[int, Hashable]
"""What an answer depends on besides its question: the store's generation and the stamp of the signing key."""

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Answer:
    """A JSON body with its entity tag and whatever other headers belong to these bytes."""

    body: bytes
    etag: str
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, body: bytes, **headers: str) -> Answer:
        """Tag a body; ``headers`` are spelt with underscores."""
        return cls(body, etag_of(body), tuple((name.replace("_", "-"), text) for name, text in headers.items()))

    def raw_headers(self, *, with_body: bool) -> list[tuple[bytes, bytes]]:
        """All headers as ASGI wants them; those that describe a body only with one."""
        named = [("etag", self.etag), ("cache-control", "private, no-cache"), *self.headers]
        if with_body:
            named += [("content-length", str(len(self.body))), ("content-type", "application/json")]
        return [(name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in named]

    def response(self, if_none_match: str | None) -> Response:
        """The whole answer, or 304 when the client has these bytes already."""
        send_body = none_match(if_none_match, self.etag)
        response = Response(self.body if send_body else None, 200 if send_body else 304)
        response.raw_headers = self.raw_headers(with_body=send_body)
        return response


class ByteCache(Generic[_K, _V]):
    """The values used last, as many as fit into a number of bytes. Safe in all threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[_K, tuple[int, _V]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """What the entries cost together."""
        return self._bytes

    def get(self, key: _K) -> _V | None:
        """Return a value and count it as used."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[1]

    def put(self, key: _K, value: _V, cost_bytes: int) -> None:
        """Hold a value, in place of an earlier one; one that is larger than everything is not held."""
        with self._lock:
            earlier = self._entries.pop(key, None)
            if earlier is not None:
                self._bytes -= earlier[0]
            self._entries[key] = (cost_bytes, value)
            self._bytes += cost_bytes
            while self._bytes > self._max_bytes:
                _, (dropped_bytes, _) = self._entries.popitem(last=False)
                self._bytes -= dropped_bytes


@dataclass(frozen=True, slots=True)
class _Ready:
    state: State
    until_seconds: float
    answer: Answer
    start: dict[str, object]
    start_unchanged: dict[str, object]


class AnswerCache:
    """Answers by path and query, each good for one state and :data:`MAX_AGE_SECONDS`."""

    def __init__(
        self, state: Callable[[], State], *, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``state`` tells what answers depend on now; it is called at every read and must be quick."""
        self.state = state
        self._clock = clock
        self._ready: ByteCache[tuple[str, bytes], _Ready] = ByteCache(max_bytes)
        self._making = [threading.Lock() for _ in range(MAKING_LOCKS)]

    def answer(self, path: str, query: bytes, make: Callable[[], Answer]) -> Answer:
        """Return the answer that is held, or make it: of all who ask at once after a write, one does the work."""
        with self._making[hash((path, query)) % MAKING_LOCKS]:
            ready = self.get(path, query)
            if ready is not None:
                return ready.answer
            # Before anything is read: what is written meanwhile makes the answer one of the past at once.
            state = self.state()
            made = make()
            self.put(path, query, state, made)
            return made

    def get(self, path: str, query: bytes) -> _Ready | None:
        """Return an answer that still holds."""
        found = self._ready.get((path, query))
        if found is None or found.state != self.state() or self._clock() > found.until_seconds:
            return None
        return found

    def put(self, path: str, query: bytes, state: State, answer: Answer) -> None:
        """Hold an answer that was made from what was read after ``state``."""
        ready = _Ready(
            state,
            self._clock() + MAX_AGE_SECONDS,
            answer,
            {"type": "http.response.start", "status": 200, "headers": answer.raw_headers(with_body=True)},
            {"type": "http.response.start", "status": 304, "headers": answer.raw_headers(with_body=False)},
        )
        self._ready.put((path, query), ready, len(answer.body) + len(query) + ENTRY_BYTES)


class ReadyAnswers:
    """ASGI middleware: send what the cache has; everything else goes on to the app."""

    def __init__(self, app: ASGIApp, cache: AnswerCache, prefix: str) -> None:
        self._app = app
        self._cache = cache
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on."""
        ready = None
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"].startswith(self._prefix):
            ready = self._cache.get(scope["path"], scope["query_string"])
        if ready is None:
            await self._app(scope, receive, send)
        elif none_match(_if_none_match(scope), ready.answer.etag):
            await send({**ready.start})
            await send({"type": "http.response.body", "body": ready.answer.body})
        else:
            await send({**ready.start_unchanged})
            await send({"type": "http.response.body", "body": b""})


def _if_none_match(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"if-none-match":
            text: str = value.decode("latin-1")
            return text
    return None
