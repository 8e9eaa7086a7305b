"""Which conversations were served here, and which recorded, so that none is counted a second time.

A transcript is not the tokens that were served: tools add a system prompt and what they know of the folder, which stand
in no transcript. So whole conversations are compared, by what both have: their root (:mod:`spark_agent.transcripts.
lineage`). Where that is too short to tell conversations apart, transcripts add its time; then a served conversation is
the same one if it began within two minutes of it, or if the person's first messages together are long enough and the
same. Kept are keyed digests alone, on this machine only: without the session key they say nothing, and no time can be
read from them.

Who counts a conversation first counts all of it. One that was served is left out when its transcript is recorded. One
that was recorded is left out when it goes on here: recording it again counts what is new. The spool decides, in the
transaction that keeps either's counts, so it does not matter how requests and recordings overlap. A conversation that
was recorded when all that the person had written was short cannot be told when it goes on here much later: then those
first words and the answers to them are counted twice, in the prompt of what follows.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from spark_agent.errors import SpoolError

if TYPE_CHECKING:
    from spark_agent.spool import Spool
    from spark_agent.transcripts.model import Transcript

__all__ = ["ServedSessions", "marks_of_served", "marks_of_transcript", "marks_to_record"]

_MARK_BYTES = 16
_MINUTE_S = 60.0
_MINUTES_OFF = 2
"""Between a message's time in a transcript and its arrival here."""
MAX_TOLD = 1024
"""Conversations remembered as told. Of one that was forgotten the spool is told again, and has it already."""
MAX_QUEUED = 4096
"""Conversations that wait to be told, while the disk does not answer."""


def marks_of_served(key: bytes, roots: Iterable[str], began_at: float | None) -> list[bytes]:
    """Digests of a served conversation: of what tells it by its messages alone, and of each with its first minute.

    ``began_at`` in seconds since the epoch, if it is known when its first request came.
    """
    found = []
    for root in roots:
        found.append(_mark(key, root))
        if began_at is not None:
            found.append(_mark(key, root, int(began_at // _MINUTE_S)))
    return found


def marks_to_record(key: bytes, transcript: Transcript) -> list[bytes]:
    """Digests by which a recorded conversation is known when it is served; of :func:`marks_of_transcript`.

    Without a short opening that nothing tells from others': all that are served would be taken for it.
    """
    marks = marks_of_transcript(key, transcript)
    opened = transcript.opened
    return marks[1:] if opened is not None and opened.at is None else marks


def marks_of_transcript(key: bytes, transcript: Transcript) -> list[bytes]:
    """Digests of a transcript: it was served here if any of them is known; a conversation was recorded likewise."""
    found = [_mark(key, transcript.lineage)]
    opened = transcript.opened
    if opened is not None and opened.more is not None:
        found.append(_mark(key, opened.more))
    if opened is not None and opened.at is not None:
        minute = int(datetime.fromisoformat(opened.at).timestamp() // _MINUTE_S)
        found += [_mark(key, opened.lineage, minute + off) for off in range(-_MINUTES_OFF, _MINUTES_OFF + 1)]
    return found


def _mark(key: bytes, lineage: str, minute: int | None = None) -> bytes:
    said = f"spark-served-v1\n{lineage}\n{'' if minute is None else minute}"
    return hmac.new(key, said.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()[:_MARK_BYTES]


class ServedSessions:
    """Tells the spool which conversations are being served, from their first request on, before they are counted.

    On a thread of its own: neither a request nor the thread that computes waits for a disk.
    """

    def __init__(self, spool: Spool, fingerprint: str, key: bytes, warn: Callable[[str], None]) -> None:
        self._spool = spool
        self._fingerprint = fingerprint
        self._key = key
        self._warn = warn
        self._told: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self.untold = 0
        """Conversations that the spool was not told of, because too many waited."""
        self._thread = threading.Thread(target=self._run, name="spark-served")

    def start(self) -> None:
        """Start telling."""
        self._thread.start()

    def stop(self) -> None:
        """Tell what is left, and return."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()

    def opened(self, roots: tuple[str, ...], began_at: float | None) -> None:
        """A request of a conversation came; any thread."""
        with self._lock:
            if roots in self._told:
                self._told.move_to_end(roots)
                return
            full = self._queue.qsize() >= MAX_QUEUED
            if not full:
                self._told[roots] = None
                # Requests that were given up in line are never counted, and so never closed.
                while len(self._told) > MAX_TOLD:
                    self._told.popitem(last=False)
            self.untold += full
            first = full and self.untold == 1
        if first:
            self._warn(
                f"{MAX_QUEUED} conversations wait for the spool: transcripts of further ones that are recorded before "
                "they end would be counted twice"
            )
        if not full:
            self._queue.put(marks_of_served(self._key, roots, began_at))

    def closed(self, roots: tuple[str, ...], began_at: float | None) -> list[bytes]:
        """The marks of a conversation whose counts are handed over; a later request opens it again."""
        with self._lock:
            self._told.pop(roots, None)
        return marks_of_served(self._key, roots, began_at)

    def _run(self) -> None:
        said = None
        while (marks := self._queue.get()) is not None:
            try:
                self._spool.note_open(self._fingerprint, marks)
            except SpoolError as error:
                if str(error) != said:
                    self._warn(f"recording this session's transcript now would count it twice: {error}")
                said = str(error)
