"""Which transcripts are of conversations that were served here: by their root, and its time where that is short."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.dialogue.messages import Message
from spark_agent.errors import SpoolFullError
from spark_agent.served import MAX_TOLD, ServedSessions, marks_of_served, marks_of_transcript, marks_to_record
from spark_agent.server.conversations import Conversations, lineage_in
from spark_agent.spool import Spool
from spark_agent.transcripts import Transcript, read_transcripts

KEY = b"k" * 16
NOON = 1_783_944_000.0
"""2026-07-13T12:00:00Z"""
LONG = "Write a function that reads a file of numbers, one a line, and gives their median."
SUMMARY = "This session is being continued from a previous conversation that ran out of context. We built a boat."


def transcript(folder: Path, *messages: tuple[str, str], at: str = "2026-07-13T12:00") -> Transcript:
    path = folder / "session.jsonl"
    lines = [
        {
            "type": role,
            "uuid": f"u{number}",
            "sessionId": "s",
            "timestamp": f"{at}:{number:02}.250Z",
            "message": {"role": role, "content": text},
        }
        for number, (role, text) in enumerate(messages)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (found,) = read_transcripts(path)
    assert isinstance(found, Transcript)
    return found


def served(*requests: list[tuple[str, str]], at: float = NOON) -> set[bytes]:
    """Marks of the conversation that requests belong to."""
    conversations = Conversations(wall=lambda: at)
    lineages = {conversations.name_of([Message(role, text) for role, text in request]) for request in requests}
    (lineage,) = lineages
    return set(marks_of_served(KEY, *conversations.began(lineage)))


def is_same(marks: set[bytes], found: Transcript) -> bool:
    return not marks.isdisjoint(marks_of_transcript(KEY, found))


def test_a_short_opening_is_told_apart_by_its_time_in_every_format_that_keeps_it(tmp_path):
    said = [{"type": "text", "text": "hi"}]
    created = int(NOON * 1000) + 4000
    info = {"role": "user", "time": {"created": created}}
    opencode = json.dumps({"info": {"id": "s"}, "messages": [{"info": info, "parts": said}]})
    line = {"type": "user", "sessionId": "s", "timestamp": "2026-07-13T12:00:04.250Z"}
    qwen = json.dumps({**line, "message": {"role": "user", "parts": [{"text": "hi"}]}}) + "\n"
    for name, text in (("session.json", opencode), ("session.jsonl", qwen)):
        path = tmp_path / name
        path.write_text(text)
        (found,) = read_transcripts(path)
        assert isinstance(found, Transcript)
        assert is_same(served([("user", "hi")]), found), name
        assert not is_same(served([("user", "hi")], at=NOON + 600), found), name


def test_a_conversation_with_an_opening_of_its_own(tmp_path):
    marks = served(
        [("system", "It is Monday."), ("user", LONG)], [("user", LONG), ("assistant", "Yes."), ("user", "On")]
    )
    for at in ("2026-07-13T12:00", "2020-01-01T00:00"):
        assert is_same(marks, transcript(tmp_path, ("user", LONG), ("assistant", "Yes."), at=at))
    assert not is_same(marks, transcript(tmp_path, ("user", LONG + " And the mean."), ("assistant", "Yes.")))


@pytest.mark.parametrize(
    ("at", "same"),
    [("2026-07-13T12:00", True), ("2026-07-13T12:02", True), ("2026-07-13T11:58", True), ("2026-07-13T12:03", False)],
)
def test_short_openings_are_told_apart_by_their_time(tmp_path, at, same):
    assert is_same(served([("user", "hi")]), transcript(tmp_path, ("user", "hi"), ("assistant", "Hi."), at=at)) == same


def test_a_short_opening_without_a_time_is_taken_for_the_same(tmp_path):
    """Rather one conversation too few: those of this format never say when they began."""
    lines = [
        {"type": "session_meta", "payload": {"id": "c", "timestamp": "2020-01-01T00:00:00Z"}},
        *(
            {
                "type": "response_item",
                "payload": {"type": "message", "role": role, "content": [{"type": f"{kind}_text", "text": "hi"}]},
            }
            for role, kind in (("user", "input"), ("assistant", "output"))
        ),
    ]
    path = tmp_path / "rollout.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (found,) = read_transcripts(path)
    assert isinstance(found, Transcript)
    assert is_same(served([("user", "hi")]), found)


def test_a_conversation_that_its_tool_restarted_with_a_summary(tmp_path):
    """Its second transcript, read alone, begins with the summary."""
    asking = [
        ("user", LONG),
        ("assistant", "Yes."),
        ("user", "Create a detailed summary of the conversation so far".lower()),
    ]
    marks = served([("user", LONG)], asking, [("user", SUMMARY), ("assistant", "Good."), ("user", "Go on.")])
    assert is_same(marks, transcript(tmp_path, ("user", LONG), ("assistant", "Yes.")))
    assert is_same(marks, transcript(tmp_path, ("user", SUMMARY), ("assistant", "Good.")))


def test_another_key_says_nothing(tmp_path):
    found = transcript(tmp_path, ("user", LONG), ("assistant", "Yes."))
    assert set(marks_of_transcript(b"other" * 4, found)).isdisjoint(served([("user", LONG)]))


@given(st.text(), st.text(), st.floats(0, 4e9), st.floats(0, 4e9))
def test_marks_differ_where_what_they_are_of_does(one: str, other: str, at: float, later: float) -> None:
    marks = [marks_of_served(KEY, [root], began) for root in (one, other) for began in (at, later)]
    assert (marks[0][0] == marks[2][0]) == (one == other)
    assert (marks[0][1] == marks[1][1]) == (at // 60 == later // 60)
    assert all(len(mark) == 16 for pair in marks for mark in pair)


def test_what_the_spool_knows_while_it_is_open_and_after(spool: Spool, make_model, make_session):
    model = make_model()
    of = model.fingerprint
    spool.note_open(of, [b"a", b"b"])
    assert spool.was_served(of, [b"x", b"b"])
    assert not spool.was_served(of, [b"x"])
    assert not spool.was_served("mf1-other", [b"a"])
    assert spool.add(model, make_session(model, 1), served=[b"a", b"b"])
    spool.forget_open(of)
    assert spool.was_served(of, [b"a"]), "its counts are here"
    spool.note_open(of, [b"a"])
    spool.note_open(of, [b"c"])
    spool.forget_open(of)
    assert [spool.was_served(of, [mark]) for mark in (b"a", b"b", b"c")] == [True, True, False]
    spool.mark_uploaded([row.id for row in spool.pending()])
    assert spool.was_served(of, [b"a"])


def test_what_leaves_the_spool_unsent_may_be_recorded(tmp_path, make_model, make_session):
    model = make_model()
    sessions = [make_session(model, seed) for seed in range(3)]
    room = 2 * max(len(session.model_dump_json()) for session in sessions)
    with Spool.open(tmp_path / "spool.db", max_bytes=room) as spool:
        for number, session in enumerate(sessions):
            assert spool.add(model, session, served=[bytes([number])])
        assert [spool.was_served(model.fingerprint, [bytes([number])]) for number in range(3)] == [False, True, True]
        spool.purge()
        assert not spool.was_served(model.fingerprint, [b"\x02"])


def test_parts_of_one_conversation_are_known_until_none_is_left(tmp_path, make_model, make_session):
    model = make_model()
    parts = [make_session(model, 1, part=part) for part in range(2)]
    room = 5 * max(len(part.model_dump_json()) for part in parts) // 2
    with Spool.open(tmp_path / "spool.db", max_bytes=room) as spool:
        for part in parts:
            spool.add(model, part, served=[b"a"])
        spool.add(model, make_session(model, 2))
        assert spool.was_served(model.fingerprint, [b"a"]), "its second part is still here"


def test_a_request_is_told_once_and_waits_for_no_disk(spool: Spool):
    said: list[str] = []
    sessions = ServedSessions(spool, "mf1-a", KEY, said.append)
    sessions.opened(("root",), NOON)
    sessions.opened(("root",), NOON)
    sessions.start()
    sessions.stop()
    assert spool.was_served("mf1-a", marks_of_served(KEY, ["root"], None))
    assert sessions.closed(("root",), NOON) == marks_of_served(KEY, ["root"], NOON)
    assert said == []


def test_a_full_disk_is_said_once_and_ends_nothing(spool: Spool, monkeypatch):
    said: list[str] = []

    def full(*_: object) -> None:
        raise SpoolFullError("no room")

    monkeypatch.setattr(spool, "note_open", full)
    sessions = ServedSessions(spool, "mf1-a", KEY, said.append)
    sessions.start()
    for number in range(3):
        sessions.opened((str(number),), None)
    sessions.stop()
    (warning,) = said
    assert "would count it twice" in warning


def test_conversations_that_are_never_counted_are_forgotten(spool: Spool):
    """As those of requests that were given up in line: nothing ever closes them."""
    sessions = ServedSessions(spool, "mf1-a", KEY, pytest.fail)
    sessions.opened(("used",), None)
    for number in range(MAX_TOLD - 1):
        sessions.opened((str(number),), None)
    sessions.opened(("used",), None)
    sessions.opened(("another",), None)
    assert len(sessions._told) == MAX_TOLD
    assert {("used",), ("another",)} <= sessions._told.keys(), "the ones longest unused leave"
    assert ("0",) not in sessions._told


def test_a_disk_that_does_not_answer_costs_no_memory(spool: Spool, monkeypatch):
    monkeypatch.setattr("spark_agent.served.MAX_QUEUED", 8)
    said: list[str] = []
    sessions = ServedSessions(spool, "mf1-a", KEY, said.append)
    for number in range(10):
        sessions.opened((str(number),), None)
    (warning,) = said
    assert "would be counted twice" in warning
    assert (sessions.untold, sessions._queue.qsize()) == (2, 8)
    sessions.start()
    sessions.stop()
    assert spool.was_served("mf1-a", marks_of_served(KEY, ["0"], None))
    assert not spool.was_served("mf1-a", marks_of_served(KEY, ["8"], None))


MORE = "Then write the tests for it, and say in the README how to run them with coverage."


@pytest.mark.parametrize("at", ["2026-07-13T12:00", "2020-01-01T00:00"])
def test_a_short_opening_is_told_by_what_follows_it(tmp_path, at):
    """Resumed on another day: the history that its tool sends is enough."""
    said = [("user", "hi"), ("assistant", "Hello."), ("user", MORE)]
    marks = served(said)
    assert is_same(marks, transcript(tmp_path, *said, ("assistant", "Done."), at=at))
    assert is_same(marks, transcript(tmp_path, *said, ("assistant", "Done."), ("user", "Thanks."), at=at))
    other = [*said[:2], ("user", f"In Rust: {MORE}")]
    assert not is_same(marks, transcript(tmp_path, *other, at="2020-01-01T00:00"))


def test_conversations_that_meet_in_a_short_opening_are_sessions_of_their_own():
    conversations = Conversations()
    first = [Message("user", "hi"), Message("assistant", "Hello."), Message("user", MORE)]
    second = [*first[:2], Message("user", f"In Rust: {MORE}")]
    names = [conversations.name_of(messages) for messages in (first[:1], first, second)]
    assert len(set(names)) == 3
    assert len({lineage_in(name) for name in names}) == 1
    assert conversations.name_of([*first, Message("assistant", "Done."), Message("user", "Thanks.")]) == names[1]
    # Which of the two was summarised is known, too.
    asking = Message("user", "create a detailed summary of the conversation")
    conversations.name_of([*second, Message("assistant", "Done."), asking])
    assert conversations.name_of([Message("user", SUMMARY)]) == names[2]


def test_who_counts_a_conversation_first_counts_all_of_it(spool: Spool, make_model, make_session):
    model = make_model()
    of = model.fingerprint
    assert spool.add(model, make_session(model, 1), transcribed=[b"a", b"b"])
    spool.note_open(of, [b"b", b"c"])
    assert not spool.was_served(of, [b"b", b"c"]), "recordings count it"
    assert not spool.add(model, make_session(model, 2), served=[b"b", b"c"])
    assert spool.add(model, make_session(model, 3), transcribed=[b"a"])
    spool.note_open(of, [b"d"])
    assert not spool.add(model, make_session(model, 4), transcribed=[b"d"]), "it came to be served in the meantime"
    assert spool.add(model, make_session(model, 4), transcribed=[b"d"], even_if_served=True)
    assert spool.add(model, make_session(model, 5), served=[b"d"]), "and goes on to be"
    spool.purge()
    assert spool.add(model, make_session(model, 2), served=[b"b"]), "nothing counts it any more"


def test_a_short_opening_speaks_for_no_other_conversation(spool: Spool, make_model, make_session):
    """Neither a recorded one without a time for those that are served, nor a served one for those that are recorded."""
    model = make_model()
    of = model.fingerprint
    assert spool.add(model, make_session(model, 1), transcribed=[b"short", b"distinctive"])
    spool.note_open(of, [b"short", b"elsewhere"])
    assert not spool.was_served(of, [b"elsewhere"]), "what is recorded as short is taken for it"
    spool.purge()
    assert spool.add(model, make_session(model, 2), served=[b"short"])
    assert spool.add(model, make_session(model, 3), transcribed=[b"short", b"distinctive"], even_if_served=True)
    assert not spool.add(model, make_session(model, 4), served=[b"short", b"distinctive"]), "recordings count it"


def test_a_recorded_short_opening_without_a_time_is_not_kept_for_those_that_are_served(tmp_path):
    timeless = transcript(tmp_path, ("user", "hi"), ("assistant", "Hi."), at="2026-07-13T12:00")
    assert timeless.opened is not None
    assert marks_to_record(KEY, timeless) == marks_of_transcript(KEY, timeless)
    timeless = replace(timeless, opened=replace(timeless.opened, at=None))
    assert marks_to_record(KEY, timeless) == marks_of_transcript(KEY, timeless)[1:]
    told = transcript(tmp_path, ("user", LONG), ("assistant", "Yes."), at="2026-07-13T12:00")
    assert marks_to_record(KEY, told) == marks_of_transcript(KEY, told)
