"""Answers that a later request may continue by id: the newest, in memory only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from spark_agent.dialogue.messages import Message

__all__ = ["ResponsesStore"]

MAX_RESPONSES = 64
MAX_CHARS = 16 * 1024 * 1024


class ResponsesStore:
    """Conversations by the id of their last answer, without instructions, as the API means them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[tuple[Message, ...], int]] = OrderedDict()
        self._chars = 0

    def put(self, identifier: str, messages: Sequence[Message]) -> None:
        """Keep a conversation, and let go of the oldest beyond the bounds."""
        chars = sum(
            len(each.text) + len(each.reasoning) + sum(len(c.arguments) for c in each.calls) for each in messages
        )
        self._kept[identifier] = (tuple(messages), chars)
        self._chars += chars
        while self._kept and (len(self._kept) > MAX_RESPONSES or self._chars > MAX_CHARS):
            _, (_, freed) = self._kept.popitem(last=False)
            self._chars -= freed

    def get(self, identifier: str) -> tuple[Message, ...] | None:
        """The conversation, if it is still kept."""
        found = self._kept.get(identifier)
        return None if found is None else found[0]
