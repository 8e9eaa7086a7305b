from __future__ import annotations

import numpy as np
import pytest

from spark_agent.dialogue.messages import Message
from spark_agent.errors import SpoolFullError
from spark_agent.identity import session_hash
from spark_agent.server.sessions import IDLE_S, MAX_OPEN, LiveSessions, lineage_of
from spark_agent.spool import Spool
from spark_agent.transcripts.lineage import conversation_lineage

LONG = "Please write a function that reads a file of timestamps and returns the mean pause between them. " * 2


def messages(*turns: tuple[str, str]) -> list[Message]:
    return [Message(role, text) for role, text in turns]


def test_continued_forked_and_resumed_conversations_are_one_session():
    start = [("system", "You are A."), ("user", LONG)]
    lineage = lineage_of(messages(*start))
    assert lineage == lineage_of(messages(*start, ("assistant", "ok"), ("user", "go on")))
    assert lineage == lineage_of(messages(*start, ("assistant", "other"), ("user", "fork")))
    assert lineage == lineage_of(messages(("developer", "You are B."), ("user", f"  {LONG}\n")))
    assert lineage != lineage_of(messages(("user", "Something else")))


def test_a_served_session_and_its_transcript_are_one_session():
    assert lineage_of(messages(("system", "s"), ("user", LONG))) == conversation_lineage(LONG)


def test_what_tools_write_in_the_persons_name_is_not_the_root():
    context = ("user", "<environment_context>cwd=/a</environment_context>")
    other = ("user", "<environment_context>cwd=/b</environment_context>")
    assert lineage_of(messages(context, ("user", LONG))) == lineage_of(messages(other, ("user", LONG)))


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_a_conversation_without_a_user_still_has_a_lineage(role):
    assert lineage_of(messages((role, "a"))) != lineage_of(messages((role, "b")))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shape(make_model):
    return make_model()


@pytest.fixture
def sessions(shape, spool: Spool, clock: Clock) -> LiveSessions:
    def close(lineage: str, counts) -> None:
        histogram = counts.to_histogram(session_hash(b"k" * 16, lineage), "chat")
        if histogram is not None:
            spool.add(shape, histogram)

    return LiveSessions(shape, close, clock)


def use(sessions: LiveSessions, lineage: str, tokens: int = 3) -> None:
    ids = np.array([[0, 1]] * tokens)
    sessions.counts_of(lineage).add("decode", tokens, [ids, ids])


def tokens_in(spool: Spool) -> int:
    return sum(row.tokens for row in spool.pending())


def test_requests_of_one_session_add_up(sessions, spool):
    use(sessions, "a", 2)
    use(sessions, "a", 5)
    sessions.close_all()
    assert [row.tokens for row in spool.pending()] == [7]
    assert len(sessions) == 0


def test_idle_sessions_are_handed_over_and_go_on_as_another_part(sessions, spool, clock):
    use(sessions, "a")
    clock.now = 10.0
    use(sessions, "b")
    clock.now = IDLE_S
    sessions.tidy()
    assert len(sessions) == 1
    assert tokens_in(spool) == 3
    use(sessions, "a", 4)
    sessions.close_all()
    assert tokens_in(spool) == 10
    assert len({row.session_hash for row in spool.pending()}) == 2


def test_the_oldest_give_way_when_too_many_are_open(sessions, spool):
    for number in range(MAX_OPEN + 3):
        use(sessions, str(number))
        if number == 1:
            use(sessions, "0")
    sessions.tidy()
    assert len(sessions) == MAX_OPEN
    assert len(spool.pending()) == 3
    kept = {row.session_hash for row in spool.pending()}
    assert kept == {session_hash(b"k" * 16, name) for name in "102"}


def test_a_session_without_tokens_leaves_nothing(sessions, spool):
    sessions.counts_of("a")
    sessions.close_all()
    assert (len(sessions), spool.pending()) == (0, [])


def test_a_full_spool_costs_nothing(sessions, spool, clock):
    room, spool.max_bytes = spool.max_bytes, 10
    for number in range(MAX_OPEN + 5):
        use(sessions, str(number))
    clock.now = 2 * IDLE_S
    with pytest.raises(SpoolFullError):
        sessions.tidy()
    with pytest.raises(SpoolFullError):
        sessions.close_all()
    assert len(sessions) == MAX_OPEN + 5
    spool.max_bytes = room
    sessions.tidy()
    assert len(sessions) == 0
    assert tokens_in(spool) == 3 * (MAX_OPEN + 5)


def test_one_refused_session_does_not_hold_up_the_others(shape, clock):
    kept: list[str] = []

    def close(lineage: str, counts) -> None:
        if lineage == "bad":
            raise ValueError("impossible counts")
        kept.append(lineage)

    sessions = LiveSessions(shape, close, clock)
    for name in ("bad", "a", "b"):
        use(sessions, name)
    with pytest.raises(ValueError, match="impossible"):
        sessions.close_all()
    assert kept == ["a", "b"]
    assert len(sessions) == 1
