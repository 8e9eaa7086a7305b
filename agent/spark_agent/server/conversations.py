"""Which conversation a request belongs to.

Coding tools send the whole conversation with each request. Its root, found as in transcripts, names the lineage: a
conversation that is continued, forked or resumed has the same one, and so has its transcript when that is recorded
later. Beside it they send requests of their own, for a title or a summary, which quote the conversation: those have
its lineage too. The system prompt is no part of it: tools write the date and the state of the folder into it.

Where the root is short ("hi"), unrelated conversations meet in one lineage. Their sessions are kept apart by what the
person wrote first over several messages, as soon as that is enough: a session's name is the lineage and that.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from spark_agent.transcripts.lineage import RootFinder, as_typed

__all__ = ["ChatTurn", "Conversations", "lineage_in", "lineage_of"]

MAX_REMEMBERED = 1024
MAX_ROOTS = 16
"""Of one conversation, the newest: each time it is restarted it has another."""
_JOINT = "+"
SUMMARY_TIMEOUT_S = 30 * 60.0
"""How long after being asked for its summary a conversation may be restarted with it."""
_ASKED_SO_FAR = "What did we do so far?"
"""opencode restarts a conversation with this question; the answer to it is the summary."""
_QUOTING = re.compile(
    r"""\s*(?:
        \#\#\#\ Task:                                                          # Open WebUI: titles, tags, follow-ups
      | Please\ write\ a\ \d+-\d+\ word\ title | Summarize\ this\ coding\ conversation   # Claude Code
      | <session>\n(?=(?s:.)*</session>\s+Write\ the\ title)                          # Claude Code
      | Provide\ a\ concise,\ \d+-word-or-less\ title                          # LibreChat
      | Generate\ a\ (?:title|concise|short) | Create\ a\ (?:title|concise|short)
      | \#\ USER\n                                                             # aider, for a summary
    )""",
    re.VERBOSE,
)
_QUOTED = re.compile(r"(?:^|\n)[ \t]*(?:\#[ ]USER|USER:|User:|User prompt:|Human:|<session>)[ \t\n]*", re.ASCII)
_QUOTE_ENDS = re.compile(
    r"\n[ \t]*(?:\#[ ]ASSISTANT|ASSISTANT:|Assistant:|AI:|Claude:|</chat_history>|</conversation>|</session>)"
)
# What tools ask at the end of a conversation that they restart with the answer.
_ASKS_FOR_SUMMARY = re.compile(
    r"create a detailed summary of the conversation"
    r"|CONTEXT CHECKPOINT COMPACTION"
    r"|Provide a detailed (?:prompt|summary) for continuing our conversation"
    r"|Summarize our conversation"
    r"|\*Briefly\* summarize this partial conversation"
)
_OPENING_CHARS = 2_000


class ChatTurn(Protocol):
    """What is read of a message, whatever API it came through."""

    @property
    def role(self) -> str:
        """``system``, ``user``, ``assistant``, ``tool`` or another word for one of them."""

    @property
    def text(self) -> str:
        """Its text as one string."""

    @property
    def blocks(self) -> Sequence[str]:
        """The texts that it came in, where there were parts."""


def lineage_of(messages: Sequence[ChatTurn]) -> str:
    """The lineage of a conversation, by its messages alone; raises ``ValueError`` without any."""
    return _root(messages).lineage


def lineage_in(name: str) -> str:
    """The lineage in a session's name."""
    return name.partition(_JOINT)[0]


class Conversations:
    """Names conversations, and knows one again that its tool restarts with a summary (compaction).

    A restarted conversation shares no message with what it was. But its tool asked for the summary shortly before: if
    exactly one conversation was asked and not restarted yet, it is that one. Keeps digests only, a bounded number of
    them, and never on disk. Threads may share one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._began: OrderedDict[str, tuple[tuple[str, ...], float]] = OrderedDict()
        self._lock = threading.Lock()
        self._asked: OrderedDict[str, float] = OrderedDict()
        self._continued: OrderedDict[str, str] = OrderedDict()
        """Name by the name that the restarted conversation alone would have."""

    def name_of(self, messages: Sequence[ChatTurn]) -> str:
        """The name of a conversation's session; raises ``ValueError`` without messages."""
        return self.read(messages)()

    def read(self, messages: Sequence[ChatTurn]) -> Callable[[], str]:
        """What :meth:`name_of` does in two steps: reading, and what names the conversation and remembers it."""
        return partial(self._name, _root(messages), asked=_asks_for_summary(messages))

    def _name(self, root: _Root, *, asked: bool) -> str:
        name = root.name
        with self._lock:
            if root.is_summary or root.restarted:
                name = self._before(root)
            if asked:
                self._asked[name] = self._clock()
                self._asked.move_to_end(name)
                _limit(self._asked)
            roots, began_at = self._began.get(name) or ((), self._wall())
            self._began[name] = (tuple(dict.fromkeys((*roots, *root.told_by)))[-MAX_ROOTS:], began_at)
            self._began.move_to_end(name)
            _limit(self._began)
        return name

    def began(self, name: str) -> tuple[tuple[str, ...], float | None]:
        """What tells a conversation by its messages alone, before and after it was restarted: roots and openings.

        And when its first request came, seconds since the epoch; ``None`` where that was too long ago to be known.
        """
        with self._lock:
            return self._began.get(name) or (tuple(name.split(_JOINT)), None)

    def _before(self, root: _Root) -> str:
        if root.name in self._continued:
            self._continued.move_to_end(root.name)
            return self._continued[root.name]
        if not root.is_summary and self._asked.pop(root.name, None) is not None:
            return root.name  # it kept its beginning
        now = self._clock()
        while self._asked and now - next(iter(self._asked.values())) > SUMMARY_TIMEOUT_S:
            self._asked.popitem(last=False)
        if len(self._asked) != 1:
            # Several may be meant: a session of its own is better than one joined with a stranger's.
            return root.name
        name, _ = self._asked.popitem()
        self._continued[root.name] = name
        _limit(self._continued)
        return name


def _limit(remembered: OrderedDict[str, Any]) -> None:
    while len(remembered) > MAX_REMEMBERED:
        remembered.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Root:
    lineage: str
    opening: str | None
    """Where the lineage comes of a short root: what tells the conversation from others, if that was said."""
    is_summary: bool
    """The root is the summary of what went before."""
    restarted: bool
    """A summary stands among the person's messages: Codex keeps the latest of them, not always the first."""

    @property
    def told_by(self) -> tuple[str, ...]:
        return (self.lineage,) if self.opening is None else (self.lineage, self.opening)

    @property
    def name(self) -> str:
        return _JOINT.join(self.told_by)


def _root(messages: Sequence[ChatTurn]) -> _Root:
    if not messages:
        raise ValueError("found no messages, expected at least one")
    finder = RootFinder()
    for index, message in enumerate(messages):
        if message.role == "user":
            text = message.text
            answer = messages[index + 1] if index + 1 < len(messages) else None
            if text.strip() == _ASKED_SO_FAR and answer is not None and answer.role == "assistant":
                finder.note(answer.text, is_summary=True)
            else:
                for said in message.blocks or (text,):
                    finder.note(_quoted_opening(said) or said)
    opening = None if finder.opened is None else finder.opened.more
    return _Root(finder.lineage(messages[0].text), opening, finder.continues, bool(finder.summaries))


def _quoted_opening(text: str) -> str | None:
    """The first message of the conversation that a request for its title quotes."""
    if not _QUOTING.match(text):
        return None
    begin = _QUOTED.search(text)
    if begin is None:
        return None
    end = _QUOTE_ENDS.search(text, begin.end())
    return text[begin.end() : end.start() if end else None].strip() or None


def _asks_for_summary(messages: Sequence[ChatTurn]) -> bool:
    last = next((message for message in reversed(messages) if message.role == "user"), None)
    if last is None:
        return False
    first = messages[0]
    return bool(
        _ASKS_FOR_SUMMARY.search(as_typed(last.text)[:_OPENING_CHARS])
        or (first.role != "user" and _ASKS_FOR_SUMMARY.match(first.text[:_OPENING_CHARS]))
    )
