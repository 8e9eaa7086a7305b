"""Server-sent events."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["KEEP_ALIVE", "event", "named_event"]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def event(value: dict[str, Any]) -> bytes:
    """One event without a name, as OpenAI's chat sends them."""
    return b"data: " + _ENCODER.encode(value).encode() + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One event named by its ``type``, as the other dialects send them."""
    return f"event: {value['type']}\n".encode() + event(value)
