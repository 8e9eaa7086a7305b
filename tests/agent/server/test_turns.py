"""Several conversations at once, through the worker: the same answers and counts as one after another."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest
from generated import events_of

from spark_agent.errors import SpoolFullError
from spark_agent.server.generation import BusyError, Events, Finished, Generation, GenerationReport, Piece
from spark_agent.server.sessions import LiveSessions
from spark_agent.server.worker import Worker
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import ContextFullError
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier_start import uniform_start

PROMPTS = ("How are you today?", "Tell me of the sea and of its ships. " * 20, "def mean(values):", "What is a list?")


async def heard(generation: Generation) -> tuple[str, Any, list[Any]]:
    text, tokens = "", []
    async for event in events_of(generation):
        if isinstance(event, Finished):
            return text, (event.reason, event.completion_tokens), tokens
        assert isinstance(event, Piece)
        text += event.text
        tokens.extend(event.tokens)
    raise AssertionError("no end")


def answers(n_seq_max: int, tier: Any, *, at_once: bool) -> tuple[list[Any], dict[str, Any], list[GenerationReport]]:
    kept: dict[str, Any] = {}
    faults: list[Exception] = []
    reports: list[GenerationReport] = []

    def keep(lineage: str, _workload: str | None, counts: SessionCounts) -> None:
        kept[lineage] = counts.to_histogram("ab" * 32, "chat")

    options = EngineOptions(n_ctx=512, n_batch=32, n_threads=1, n_outputs_max=1, n_seq_max=n_seq_max, tier=tier)
    with Engine.load(demo_model_path(), options) as engine:
        worker = Worker(engine, LiveSessions(engine.shape, keep, lambda: 0.0), faults.append, on_done=reports.append)

        def asked(index: int) -> Generation:
            sampling = Sampling(temperature=1.0, seed=index)
            return Generation(str(index), engine.tokenize(PROMPTS[index]), sampling, 40, (), top_logprobs=2)

        async def ask() -> list[Any]:
            if not at_once:
                found = []
                for index in range(len(PROMPTS)):
                    worker.submit(generation := asked(index))
                    found.append(await heard(generation))
                return found
            generations = [asked(index) for index in range(len(PROMPTS))]
            for generation in generations:
                worker.submit(generation)
            worker.start()
            return await asyncio.gather(*map(heard, generations))

        if not at_once:
            worker.start()
        try:
            found = asyncio.run(ask())
            assert worker.call(lambda: 7).result(120) == 7
            assert (worker.load.running, worker.load.waiting, worker.load.sequences) == (0, 0, n_seq_max)
        finally:
            worker.stop()
        with pytest.raises(RuntimeError):
            worker.call(lambda: 7)
    assert faults == []
    return found, kept, reports


@pytest.mark.parametrize("residency", [None, 0.4])
def test_turns_change_nothing(residency: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns as short as can be, so that every step is another conversation's."""
    monkeypatch.setattr("spark_agent.server.scheduler.MIN_SLICE_S", 0.0)
    monkeypatch.setattr("spark_agent.server.scheduler.MAX_SLICE_S", 0.0)
    tier = None if residency is None else uniform_start(read_model_shape(demo_model_path()), residency)
    # As many sequences in both, so that each prompt is computed whole.
    alone, expected, _ = answers(4, tier, at_once=False)
    together, counted, reports = answers(4, tier, at_once=True)
    assert together == alone, "text, ends, and every log probability"
    assert counted == expected
    assert {report.outcome for report in reports} <= {"stop", "length"}
    assert [report.completion_tokens for report in reports] != [0] * 4
    assert any(tokens for _, _, tokens in alone)


def test_a_grammar_that_hangs_makes_only_its_own_request_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped in the middle: others are answered whole, and then it goes on as if nothing had been."""
    monkeypatch.setattr("spark_runtime.grammar.STEP_S", 120.0)
    options = EngineOptions(n_ctx=256, n_threads=1, n_outputs_max=1, n_seq_max=2)
    with Engine.load(demo_model_path(), options) as engine:
        worker = Worker(engine, LiveSessions(engine.shape, lambda *_: None, lambda: 0.0), lambda error: None)
        worker.start()
        never_ends = tuple((token, -100.0) for token in range(engine.n_vocab) if engine.is_end(token))

        def followed() -> Generation:
            sampling = Sampling(temperature=1.0, seed=3, grammar="root ::= [a-z ]{30,60} [0-9]")
            return Generation("g", engine.tokenize(PROMPTS[0]), sampling, 24, (), top_logprobs=1)

        async def ask() -> None:
            worker.submit(alone := followed())
            expected = await heard(alone)
            worker.submit(hanging := followed())
            first = await anext(events_of(hanging))
            (process,) = engine._grammars._lent
            process._process.send_signal(signal.SIGSTOP)
            try:
                for index in range(3):
                    sampling = Sampling(logit_bias=never_ends)
                    worker.submit(free := Generation("f", engine.tokenize(PROMPTS[index]), sampling, 12, ()))
                    assert (await heard(free))[1] == ("length", 12)
                assert worker.load.running == 1
                # One that is given up meanwhile goes at once.
                worker.submit(other := followed())
                while worker.load.running < 2:
                    await asyncio.sleep(0.005)
                other.cancelled.set()
                while worker.load.running > 1:
                    await asyncio.sleep(0.005)
            finally:
                process._process.send_signal(signal.SIGCONT)
            assert isinstance(first, Piece)
            text, end, tokens = await heard(hanging)
            assert (first.text + text, end, [*first.tokens, *tokens]) == expected

        try:
            asyncio.run(asyncio.wait_for(ask(), 60))
            assert worker.load.running == 0
        finally:
            worker.stop()


@pytest.mark.parametrize("prompt", [1, 600], ids=["an answer", "an error"])
def test_the_numbers_of_an_answer_are_there_before_its_end(prompt: int) -> None:
    """Whoever has been answered can ask what it took."""
    order: list[str] = []

    class Followed(Events):
        def tell(self, event: Any) -> None:
            order.append("error" if isinstance(event, Exception) else type(event).__name__)
            super().tell(event)

    with Engine.load(demo_model_path(), EngineOptions(n_ctx=512, n_threads=1, n_outputs_max=1)) as engine:
        sessions = LiveSessions(engine.shape, lambda *_: None, lambda: 0.0)
        worker = Worker(engine, sessions, lambda error: None, on_done=lambda report: order.append(report.outcome))
        worker.start()

        async def ask() -> None:
            tokens = engine.tokenize(PROMPTS[0])[:1] * prompt
            generation = Generation("x", tokens, Sampling(temperature=0.0), 3, (), events=Followed())
            worker.submit(generation)
            await heard(generation)

        try:
            if prompt == 1:
                asyncio.run(ask())
                assert order[-2:] in (["length", "Finished"], ["stop", "Finished"])
            else:
                with pytest.raises(ContextFullError):
                    asyncio.run(ask())
                assert order == ["error", "error"]
        finally:
            worker.stop()


@pytest.mark.parametrize("full", [False, True])
def test_conversations_that_keep_coming_do_not_pile_up(full: bool) -> None:
    """While there is always something to compute; where none can be handed over it is not tried at every turn."""
    kept: list[str] = []
    faults: list[Exception] = []
    most_open = 0

    def keep(lineage: str, _workload: str | None, _counts: SessionCounts) -> None:
        if full:
            raise SpoolFullError("no room")
        kept.append(lineage)

    def done(_report: GenerationReport) -> None:
        nonlocal most_open
        most_open = max(most_open, len(sessions))

    options = EngineOptions(n_ctx=256, n_threads=1, n_outputs_max=1, n_seq_max=2)
    with Engine.load(demo_model_path(), options) as engine:
        sessions = LiveSessions(engine.shape, keep, lambda: 0.0, 2)
        sessions.max_open = sessions.max_kept = 4
        worker = Worker(engine, sessions, faults.append, on_done=done)

        async def ask() -> None:
            tokens = engine.tokenize(PROMPTS[0])
            generations = [Generation(str(number), tokens, Sampling(), 2, ()) for number in range(24)]
            for generation in generations:
                worker.submit(generation)
            worker.start()
            await asyncio.gather(*map(heard, generations))

        try:
            asyncio.run(ask())
        finally:
            worker.stop()
    if full:
        assert len(faults) <= 4, "the first attempts and the end"
    else:
        assert faults == []
        assert most_open <= 6
        assert sorted(map(int, kept)) == list(range(24))


def test_a_request_on_its_way_into_the_line_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than the line holds would end the thread that computes."""
    monkeypatch.setattr("spark_agent.server.worker.MAX_WAITING", 1)
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1, n_outputs_max=1)) as engine:
        worker = Worker(engine, LiveSessions(engine.shape, lambda *_: None, lambda: 0.0), pytest.fail)
        enter = worker._scheduler.submit

        async def ask() -> list[BaseException | None]:
            generations = [Generation(str(number), [5, 6], Sampling(), 2, ()) for number in range(2)]
            worker.submit(generations[0])
            found: list[BaseException | None] = []

            def another() -> None:
                try:
                    worker.submit(generations[1])
                except BusyError as error:
                    found.append(error)
                else:
                    found.append(None)

            meanwhile = threading.Thread(target=another)

            def slowly(job: Any) -> None:
                meanwhile.start()
                meanwhile.join(0.2)
                enter(job)

            monkeypatch.setattr(worker._scheduler, "submit", slowly)
            worker._take_in()
            meanwhile.join()
            return found

        [error] = asyncio.run(ask())
        assert isinstance(error, BusyError)
