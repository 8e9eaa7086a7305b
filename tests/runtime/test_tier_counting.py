"""A session counted by a tier is the session counted by the evaluation callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import write_small_model
from tier_runs import OPTIONS, SIZE, load

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import DecodeError, RoutingReadError
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier_start import uniform_start
from spark_schemas.histogram import SessionHistogram
from spark_schemas.invariants import check_session

SESSION = "ab" * 32


@pytest.fixture(scope="module", params=["qwen3moe", "glm4moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model") / "model.gguf", request.param, SIZE)


def callback(path: Path, **options: Any) -> Engine:
    """Counts as ever, over the same device."""
    return Engine.load(path, EngineOptions(**OPTIONS | {"proxy": True} | options))


def histogram(engine: Engine, session: SessionCounts) -> SessionHistogram:
    found = session.to_histogram(SESSION, "chat")
    assert found is not None
    check_session(found, engine.shape)
    return found


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SIZE.vocabulary, count).tolist()


def talk(engine: Engine, session: SessionCounts | None, seed: int) -> None:
    with engine.counting(session):
        engine.reset()
        engine.prompt(tokens(50, seed))
        engine.feed(tokens(20, seed + 1), "decode", batch=1)
        engine.feed(tokens(20, seed + 2), "decode", batch=6)
        engine.prompt(tokens(50, seed) + tokens(3, seed + 3))
        engine.feed(tokens(5, seed + 4), "decode", batch=1)


def one_session(engine: Engine) -> list[SessionHistogram]:
    session = SessionCounts(engine.shape)
    talk(engine, session, 1)
    return [histogram(engine, session)]


def sessions_in_turns(engine: Engine) -> list[SessionHistogram]:
    """Each goes on where it was: reuse distances are its own, whoever used the experts in between."""
    sessions = [SessionCounts(engine.shape) for _ in range(2)]
    for turn in range(3):
        for index, session in enumerate(sessions):
            talk(engine, session, 10 * turn + index)
        talk(engine, None, turn)
    return [histogram(engine, session) for session in sessions]


def sessions_inside_each_other(engine: Engine) -> list[SessionHistogram]:
    outer, inner = SessionCounts(engine.shape), SessionCounts(engine.shape)
    with engine.counting(outer):
        engine.reset()
        engine.feed(tokens(9, 1), "decode", batch=1)
        talk(engine, inner, 3)
        engine.feed(tokens(9, 2), "decode", batch=1)
    return [histogram(engine, session) for session in (outer, inner)]


def failed_calls(engine: Engine) -> list[SessionHistogram]:
    """A call that llama.cpp refuses counts nothing, and what was counted before it stays."""
    session = SessionCounts(engine.shape)
    with engine.counting(session):
        engine.reset()
        engine.feed(tokens(9, 1), "decode", batch=1)
        with pytest.raises(DecodeError):
            engine.feed([10**6], "decode")
        engine.feed(tokens(9, 2), "decode", batch=1)
    return [histogram(engine, session)]


@pytest.mark.parametrize("run", [one_session, sessions_in_turns, sessions_inside_each_other, failed_calls])
@pytest.mark.parametrize("residency", [0.0, 0.5, 1.0])
def test_counts_are_those_of_the_callback(run: Any, residency: float, model: Path) -> None:
    with callback(model) as engine:
        expected = run(engine)
    with load(model, residency) as engine:
        assert run(engine) == expected


@pytest.mark.parametrize("residency", [0.0, 0.5, 1.0])
def test_what_sessions_missed_is_what_the_slots_counted(residency: float, model: Path) -> None:
    with load(model, residency) as engine:
        sessions = [SessionCounts(engine.shape) for _ in range(2)]
        for turn in range(3):
            for index, session in enumerate(sessions):
                talk(engine, session, 10 * turn + index)
        totals = engine.tier_totals
        assert totals is not None
        misses = [session.misses for session in sessions]
        assert all(one is not None and one.start is engine.tier.start for one in misses)
        assert sum(one.selections for one in misses) == totals.selections["decode"]
        assert sum(one.cold_hits for one in misses) == totals.cold_hits["decode"]
        assert (totals.cold_hits["decode"] == 0) == (residency == 1.0)


def test_a_session_that_saw_two_placements_tells_of_none(model: Path) -> None:
    """Neither where the counters were read in between nor where they were not; the next session does again."""
    with load(model, 0.5) as engine:
        other = uniform_start(engine.shape, 0.5)
        for inside in (True, False):
            session = SessionCounts(engine.shape)
            with engine.counting(session):
                engine.reset()
                engine.feed(tokens(9, 1), "decode", batch=1)
                if inside:
                    engine.tier.place(other)
                    engine.feed(tokens(9, 2), "decode", batch=1)
            if not inside:
                engine.tier.place(uniform_start(engine.shape, 0.4))
                with engine.counting(session):
                    engine.feed(tokens(9, 2), "decode", batch=1)
            assert session.tokens["decode"] == 18
            assert session.misses is None
        session = SessionCounts(engine.shape)
        talk(engine, session, 1)
        assert session.misses is not None


def test_without_slots_nothing_is_said_to_be_missed(model: Path) -> None:
    with callback(model) as engine:
        session = SessionCounts(engine.shape)
        talk(engine, session, 1)
        assert session.misses is None


def test_counting_off_leaves_the_tier_counting(model: Path) -> None:
    with load(model, count_routing=False) as engine:
        session = SessionCounts(engine.shape)
        talk(engine, session, 1)
        assert session.tokens_total == 0
        assert engine.tier.counters().tokens["decode"][0] == 45


def test_reading_the_counters_in_a_session_is_refused_or_harmless(model: Path) -> None:
    """Without a reset they are the session's own; nothing is lost by looking."""
    with callback(model) as engine:
        [expected] = one_session(engine)
    with load(model) as engine:
        session = SessionCounts(engine.shape)
        with engine.counting(session):
            talk(engine, session, 1)
            engine.tier.counters()
        assert histogram(engine, session) == expected


def test_counts_that_do_not_add_up_are_refused(model: Path) -> None:
    """Somebody reset the counters in a session: its tokens are more than what the layers routed."""
    with load(model) as engine:
        session = SessionCounts(engine.shape)

        def lose() -> None:
            with engine.counting(session):
                engine.feed(tokens(5, 1), "decode", batch=1)
                engine.tier.reset_counts()

        with pytest.raises(RoutingReadError, match=r"routed 0 tokens, expected 5: counting stopped"):
            lose()
        assert session.tokens_total == 0
        talk(engine, None, 1)


def test_a_trace_needs_the_callback(model: Path) -> None:
    def count(engine: Engine) -> None:
        session = SessionCounts(engine.shape, keep_trace=True)
        with engine.counting(session):
            engine.feed(tokens(5, 1), "decode", batch=1)

    with load(model) as engine:
        with pytest.raises(ValueError, match="counts have no order"):
            count(engine)
        talk(engine, None, 1)
