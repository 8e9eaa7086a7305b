"""Answers that a later request may continue by id: the newest, in memory only."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

from spark_agent.dialogue.messages import Message

__all__ = ["ResponsesStore"]

MAX_RESPONSES = 64
MAX_BYTES = 32 * 2**20


class ResponsesStore:
    """Conversations by the id of their last answer, without instructions, as the API means them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[tuple[Message, ...], int]] = OrderedDict()
        self._bytes = 0

    def put(self, identifier: str, messages: Sequence[Message]) -> None:
        """Keep a conversation, and let go of the oldest beyond the bounds."""
        size = sum(map(_size_bytes, messages))
        self._kept[identifier] = (tuple(messages), size)
        self._bytes += size
        while self._kept and (len(self._kept) > MAX_RESPONSES or self._bytes > MAX_BYTES):
            _, (_, freed) = self._kept.popitem(last=False)
            self._bytes -= freed

    def get(self, identifier: str) -> tuple[Message, ...] | None:
        """The conversation, if it is still kept."""
        found = self._kept.get(identifier)
        return None if found is None else found[0]


def _size_bytes(message: Message) -> int:
    """What a message takes in memory: of many short ones, and of texts in scripts that take four bytes a character.

    Strings that others hold as well count each time.
    """
    texts = [message.text, message.reasoning, message.call_id, message.name, *message.blocks]
    size = sys.getsizeof(message) + sys.getsizeof(message.calls) + sys.getsizeof(message.blocks)
    for call in message.calls:
        size += sys.getsizeof(call)
        texts += [call.id, call.name, call.arguments]
    return size + sum(sys.getsizeof(text) for text in texts if text)
