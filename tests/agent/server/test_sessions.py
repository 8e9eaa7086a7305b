from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_agent.dialogue.messages import Message
from spark_agent.errors import SpoolFullError
from spark_agent.identity import session_hash
from spark_agent.server.sessions import (
    IDLE_S,
    MAX_KEPT,
    MAX_KEPT_BYTES,
    MAX_OPEN,
    MAX_OPEN_BYTES,
    MIN_OPEN,
    LiveSessions,
    lineage_of,
)
from spark_agent.spool import Spool
from spark_agent.transcripts.lineage import conversation_lineage
from spark_runtime.session_counts import SessionCounts
from spark_schemas.model import ExpertLayer, ModelShape

SHAPE = ModelShape(
    fingerprint="mf1-" + "0" * 32,
    sibling="ms1-" + "0" * 32,
    architecture="test",
    n_blocks=1,
    context_length=64,
    core_bytes=1,
    kv_bytes_per_token=1,
    layers=(ExpertLayer(block=0, n_experts=4, top_k=2, expert_bytes=10, tensor_types={"up": "q8_0"}),),
)

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
    def close(lineage: str, _workload: str | None, counts) -> None:
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

    def close(lineage: str, _workload: str | None, counts) -> None:
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


def test_a_conversation_under_two_workloads_is_two_sessions(shape, clock):
    kept: list[tuple[str, str | None, int]] = []
    sessions = LiveSessions(
        shape, lambda lineage, name, counts: kept.append((lineage, name, counts.tokens_total)), clock
    )
    for workload, tokens in ((None, 2), ("review", 3), (None, 4)):
        ids = np.array([[0, 1]] * tokens)
        sessions.counts_of("a", workload).add("decode", tokens, [ids, ids])
    assert sessions.latest() == (None, sessions.counts_of("a"))
    sessions.close_all()
    assert sorted(kept, key=str) == [("a", "review", 3), ("a", None, 6)]
    assert sessions.closed == 2
    assert sessions.latest() is None


def test_what_is_being_computed_is_not_handed_over(sessions, spool, clock):
    with sessions.held("long") as counts:
        for number in range(MAX_OPEN + 3):
            use(sessions, str(number))
        clock.now = 10 * IDLE_S
        sessions.tidy()
        assert len(sessions) == 1
        ids = np.array([[0, 1]])
        counts.add("decode", 1, [ids, ids])
        clock.now = 20 * IDLE_S
    sessions.tidy()
    assert len(sessions) == 1, "it was used until now"
    clock.now = 21 * IDLE_S
    sessions.tidy()
    assert len(sessions) == 0
    assert tokens_in(spool) == 3 * (MAX_OPEN + 3) + 1


def test_a_disk_that_stays_full_costs_the_oldest_and_says_so(shape, clock):
    def full(_lineage: str, _workload: str | None, _counts) -> None:
        raise SpoolFullError("no room")

    sessions = LiveSessions(shape, full, clock)
    for number in range(MAX_KEPT + 7):
        use(sessions, str(number))
        with contextlib.suppress(SpoolFullError):
            sessions.tidy()
    assert len(sessions) == MAX_KEPT
    assert (sessions.closed, sessions.lost) == (0, 7)


def large(n_layers: int, n_experts: int) -> ModelShape:
    layers = (
        ExpertLayer(block=block, n_experts=n_experts, top_k=2, expert_bytes=10, tensor_types={"up": "q8_0"})
        for block in range(n_layers)
    )
    return SHAPE.model_copy(update={"layers": tuple(layers)})


@pytest.mark.parametrize(("n_layers", "n_experts"), [(1, 4), (48, 128), (58, 256), (60, 384), (92, 160)])
def test_what_is_open_is_bounded_in_bytes(clock, n_layers, n_experts):
    """Shapes up to those of the largest models there are."""
    shape = large(n_layers, n_experts)
    sessions = LiveSessions(shape, lambda *_: None, clock)
    size = SessionCounts.size_bytes(shape)
    assert sessions.max_open * size <= MAX_OPEN_BYTES
    assert sessions.max_kept * size <= MAX_KEPT_BYTES
    assert MIN_OPEN <= sessions.max_open <= min(MAX_OPEN, sessions.max_kept)
    assert LiveSessions(shape, lambda *_: None, clock, 64).max_open >= 128, "what computes is never handed over"
    for number in range(sessions.max_open):
        sessions.counts_of(str(number))
    assert not sessions.too_many
    sessions.counts_of("another")
    assert sessions.too_many
    sessions.tidy()
    assert not sessions.too_many


@pytest.mark.parametrize("now_s", [0.0, 4e9])
def test_a_wall_clock_that_jumps_changes_nothing(sessions, spool, monkeypatch, now_s):
    use(sessions, "a")
    monkeypatch.setattr("time.time", lambda: now_s)
    sessions.tidy()
    assert len(sessions) == 1
    sessions.close_all()
    assert tokens_in(spool) == 3


PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, 5), st.integers(1, 4)),
        st.tuples(st.just("wait"), st.integers(0, int(1.5 * IDLE_S)), st.just(0)),
        st.tuples(st.just("full"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("tidy"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@PROPERTY
@given(STEPS)
def test_no_token_is_lost_or_counted_twice(steps: list[tuple[str, int, int]]) -> None:
    now, full = [0.0], [False]
    expected: Counter[str] = Counter()
    kept: Counter[str] = Counter()

    def close(lineage: str, _workload: str | None, counts: SessionCounts) -> None:
        if full[0]:
            raise SpoolFullError("no room")
        kept[lineage] += counts.tokens_total

    sessions = LiveSessions(SHAPE, close, lambda: now[0])
    for what, number, tokens in steps:
        if what == "use":
            ids = np.array([[0, 1]] * tokens)
            sessions.counts_of(str(number)).add("decode", tokens, [ids])
            expected[str(number)] += tokens
        elif what == "wait":
            now[0] += number
        elif what == "full":
            full[0] = bool(number)
        else:
            with contextlib.suppress(SpoolFullError):
                sessions.tidy()
    full[0] = False
    sessions.close_all()
    assert kept == expected
    assert len(sessions) == sessions.lost == 0
