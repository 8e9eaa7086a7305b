"""Transcripts through the real demo model, whose template is ChatML."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_agent.recording import Segment, record, segments_of
from spark_agent.transcripts import Transcript, Turn
from spark_runtime.chat import ChatFormat
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import ChatTemplateError
from spark_runtime.models import demo_model_path
from spark_schemas.invariants import check_session

HASH = "ab" * 32


@pytest.fixture(scope="module")
def engine():
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def chat(engine) -> ChatFormat:
    return ChatFormat(engine)


def transcript(*turns: tuple[str, str]) -> Transcript:
    return Transcript("lineage", tuple(Turn(role, text) for role, text in turns), Path("x"))


def spelled(engine, segments: list[Segment]) -> list[tuple[str, str]]:
    return [(segment.phase, b"".join(engine.piece(token) for token in segment.tokens).decode()) for segment in segments]


def marked(engine, text: str) -> list[int]:
    return engine.tokenize(text, add_special=False, parse_special=True)


def test_what_was_given_is_prefill_and_what_was_said_is_decode(engine, chat):
    turns = [
        ("system", "Be short."),
        ("user", "What is it?"),
        ("assistant", "A table."),
        ("user", "Of?"),
        ("assistant", "Keys."),
    ]
    segments = segments_of(engine, chat, transcript(*turns))
    start, end = "<|im_start|>", "<|im_end|>\n"
    assert segments == [
        Segment(
            "prefill",
            marked(engine, f"{start}system\nBe short.{end}{start}user\nWhat is it?{end}{start}assistant\n"),
        ),
        Segment("decode", engine.tokenize("A table.", add_special=False)),
        Segment("prefill", marked(engine, f"{end}{start}user\nOf?{end}{start}assistant\n")),
        Segment("decode", engine.tokenize("Keys.", add_special=False)),
    ]


def test_a_question_nobody_answered_was_still_given(engine, chat):
    answered = [("user", "a"), ("assistant", "b")]
    segments = segments_of(engine, chat, transcript(*answered, ("user", "c")))
    assert segments[:-1] == segments_of(engine, chat, transcript(*answered))
    assert segments[-1] == Segment(
        "prefill", marked(engine, "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n")
    )


def test_tools_speak_to_the_assistant(engine, chat):
    as_tool = segments_of(
        engine, chat, transcript(("user", "a"), ("assistant", "b"), ("tool", "c"), ("assistant", "d"))
    )
    as_user = segments_of(
        engine, chat, transcript(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    )
    assert as_tool == as_user


class Refusing:
    """A template that takes nothing but one user's message, in front of the real tokenizer."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat

    def prompt(self, messages):
        if len(messages) > 1:
            raise ChatTemplateError("one message only")
        return self.chat.prompt(messages)

    def tokenize(self, prompt, *, starts=True):
        return self.chat.tokenize(prompt, starts=starts)


def test_where_a_template_refuses_the_texts_stand_in(engine, chat):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("tool", "d"), ("assistant", "e"), ("user", "f")]
    segments = segments_of(engine, Refusing(chat), transcript(*turns))
    assert spelled(engine, segments)[1:] == [("decode", "b"), ("prefill", "c\nd"), ("decode", "e"), ("prefill", "f")]


def test_plain_text_is_a_quarter_prompt_in_every_window(engine, chat):
    tokens = engine.tokenize("alpha beta gamma " * 200)
    segments = segments_of(engine, chat, transcript(("text", "alpha beta gamma " * 200)))
    assert [token for segment in segments for token in segment.tokens] == tokens
    assert [segment.phase for segment in segments] == ["prefill", "decode"] * (len(segments) // 2)
    assert [len(segment.tokens) for segment in segments[:2]] == [64, 192]


@pytest.mark.parametrize("limit", [1, 5, 17, 10_000])
def test_a_limit_cuts_the_end(engine, chat, limit):
    for turns in ([("user", "a b c"), ("assistant", "d e f"), ("user", "g")], [("text", "a b c d e f g h i")]):
        whole = [token for segment in segments_of(engine, chat, transcript(*turns)) for token in segment.tokens]
        cut = segments_of(engine, chat, transcript(*turns), limit)
        assert [token for segment in cut for token in segment.tokens] == whole[:limit]
        assert all(segment.tokens for segment in cut)


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(turns=st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=8), keep_trace=st.booleans())
def test_every_recorded_session_adds_up(engine, chat, turns, keep_trace):
    segments = segments_of(engine, chat, transcript(*turns))
    counts = record(engine, segments, keep_trace=keep_trace)
    for phase in ("prefill", "decode"):
        assert counts.tokens[phase] == sum(len(item.tokens) for item in segments if item.phase == phase)
    histogram = counts.to_histogram(HASH, "chat")
    assert histogram is not None
    check_session(histogram, engine.shape)
    if keep_trace:
        assert {len(ids) for ids in counts.trace()} == {counts.tokens["decode"]}


def test_a_session_longer_than_the_context_goes_on_in_an_emptied_one(engine, chat):
    segments = segments_of(engine, chat, transcript(("user", "a " * 300), ("assistant", "b " * 400), ("user", "c")))
    counts = record(engine, segments)
    assert counts.tokens_total == sum(len(segment.tokens) for segment in segments) > 2 * engine.n_ctx
    check_session(counts.to_histogram(HASH, "chat"), engine.shape)


def test_counts_do_not_depend_on_what_was_recorded_before(engine, chat):
    segments = segments_of(engine, chat, transcript(("user", "What is a hash table?"), ("assistant", "A table.")))
    first = record(engine, segments).to_histogram(HASH, "chat")
    record(engine, segments_of(engine, chat, transcript(("text", "something else " * 20))))
    assert record(engine, segments).to_histogram(HASH, "chat") == first


def test_a_recording_can_be_ended_between_steps(engine):
    looks: list[int] = []

    def look() -> None:
        looks.append(engine.n_past)
        if len(looks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(engine, [Segment("prefill", [5] * 4 * 512)], before_step=look)
    assert len(looks) == 3
    record(engine, [Segment("decode", [5, 6, 7])])
