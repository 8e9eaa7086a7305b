"""What a later request may continue: the newest, and never more bytes than its bound."""

from __future__ import annotations

import tracemalloc

import pytest

from spark_agent.dialogue.messages import Message, ToolCall
from spark_agent.server import responses_store
from spark_agent.server.responses_store import MAX_BYTES, MAX_RESPONSES, ResponsesStore


def test_the_newest_are_kept():
    store = ResponsesStore()
    for number in range(MAX_RESPONSES + 1):
        store.put(str(number), [Message("user", f"say {number}")])
    assert store.get("0") is None
    assert store.get("1") == (Message("user", "say 1"),)
    assert store.get(str(MAX_RESPONSES)) is not None


def test_one_that_is_over_the_bound_takes_nothing_with_it_for_good():
    store = ResponsesStore()
    store.put("large", [Message("user", "x" * (MAX_BYTES + 1))])
    assert store.get("large") is None
    store.put("small", [Message("user", "x")])
    assert store.get("small") is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: [Message("user", f"{seed}" + "x" * 2**16)],
        lambda seed: [Message("user", f"{seed}" + "\N{WINKING FACE}" * 2**14)],
        lambda seed: [Message("user", f"{seed} {number}") for number in range(500)],
        lambda seed: [
            Message("assistant", "", calls=tuple(ToolCall(f"{seed} {n}", "read", f"{n} {seed}") for n in range(250)))
        ],
        lambda seed: [Message("user", "", blocks=tuple(f"{seed} {number}" for number in range(500)))],
        lambda seed: [Message("tool", "", call_id=f"{seed}" + "x" * 2**15, name=f"{seed}" + "x" * 2**15)],
    ],
    ids=["long", "wide", "many", "calls", "parts", "names"],
)
def test_it_is_bounded_in_bytes_whatever_is_sent(make, monkeypatch):
    limit = 2**21
    monkeypatch.setattr(responses_store, "MAX_BYTES", limit)
    store = ResponsesStore()
    tracemalloc.start()
    try:
        for number in range(MAX_RESPONSES):
            store.put(f"resp_{number}", make(number))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert limit / 2 < taken < limit * 1.1
    assert store.get(f"resp_{MAX_RESPONSES - 1}") is not None
