"""Text that streams: never half a character, never past a stop string, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_runtime.text_stream import TextStream

TEXTS = st.text(alphabet="ab<|é数🙂\n", max_size=40)


@given(TEXTS, st.lists(st.text(alphabet="ab<|", min_size=1, max_size=4), max_size=3), st.data())
def test_pieces_add_up_to_the_text_before_the_first_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    stream = TextStream(stops)
    shown = "".join(stream.push(raw[a:b]) for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True))
    shown += stream.push(b"", final=True)
    # What a stream of single characters would have seen first: the stop that is complete first, the longest of those.
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    starts = [ends[0] - len(stop) for stop in stops if text[: ends[0]].endswith(stop)] if ends else [len(text)]
    assert shown == text[: min(starts)]
    assert stream.stopped == bool(ends)


def test_what_cannot_become_a_stop_is_shown_at_once() -> None:
    stream = TextStream(["END"])
    assert stream.push(b"the E") == "the "
    assert stream.push(b"dge") == "Edge"


def test_half_a_character_waits() -> None:
    stream = TextStream()
    assert stream.push("é".encode()[:1]) == ""
    assert stream.push("é".encode()[1:]) == "é"
    assert stream.push(b"\xff", final=True) == "\ufffd"
