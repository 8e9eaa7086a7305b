"""What the computing thread tells a request: in order, nothing missed, however the two run."""

from __future__ import annotations

import asyncio
import threading

import pytest
from generated import events_of

from spark_agent.dialogue.output_parser import PlainParser
from spark_agent.server.exchange import Answering, Ended, Idle, Said
from spark_agent.server.generation import AbandonedError, Finished, Generation, Piece
from spark_runtime.sampling import Sampling

FINISHED = Finished("stop", 1, 0, 1)


def generation() -> Generation:
    return Generation("x", [1], Sampling(), None, ())


def test_nothing_is_missed_between_threads() -> None:
    number = 3000

    async def run() -> list[str]:
        asked = generation()
        reading = threading.Semaphore(0)

        def tell() -> None:
            for each in range(number):
                if each % 3 == 0:
                    # Now and then the reader has caught up, and waits or is about to.
                    reading.acquire(timeout=0.0005)
                asked.events.tell(Piece(str(each)))
            asked.events.tell(FINISHED)

        thread = threading.Thread(target=tell)
        thread.start()
        heard = []
        async for event in events_of(asked):
            if isinstance(event, Piece):
                heard.append(event.text)
            reading.release()
        thread.join()
        return heard

    assert asyncio.run(run()) == [str(each) for each in range(number)]


def test_waiting_ends_with_its_limit_and_lets_others_run() -> None:
    async def run() -> None:
        asked = generation()
        assert not await asked.events.wait(0.001)
        assert asked.events.take() is None
        asked.events.tell(FINISHED)
        others: list[int] = []
        asyncio.get_running_loop().call_soon(others.append, 1)
        assert await asked.events.wait(60)
        assert others == [1], "another one's turn came although there was something to take"
        assert asked.events.take() is FINISHED
        waiting = asyncio.ensure_future(asked.events.wait(60))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        asked.events.tell(FINISHED)
        assert await asked.events.wait(0)

    asyncio.run(run())


def test_telling_a_loop_that_is_closed_is_no_error() -> None:
    async def waiting() -> Generation:
        asked = generation()
        asked.events._waiting = asyncio.get_running_loop().create_future()
        return asked

    asyncio.run(waiting()).events.tell(FINISHED)


def test_an_answer_says_so_when_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while tokens come, if nothing of them is to be shown yet."""
    monkeypatch.setattr("spark_agent.server.exchange.IDLE_S", 0.01)
    monkeypatch.setattr("spark_agent.server.exchange.FIRST_WAIT_S", 0.01)

    async def run() -> list[object]:
        asked = generation()
        answering = Answering(asked, PlainParser(), lambda _: None, parallel=True)
        flushed: list[int] = []

        async def flush() -> None:
            flushed.append(1)

        said: list[object] = []
        async for output in answering.outputs(before_waiting=flush):
            said.append(type(output))
            if len(said) == 2:
                for piece in (Piece(""), Piece("a"), Piece("b"), FINISHED):
                    asked.events.tell(piece)
        assert flushed
        assert asked.cancelled.is_set()
        return said

    assert asyncio.run(run()) == [Idle, Idle, Said, Ended]


def test_who_leaves_ends_the_waiting() -> None:
    async def run() -> None:
        asked = generation()
        answering = Answering(asked, PlainParser(), lambda _: None, parallel=True)
        asyncio.get_running_loop().call_later(0.01, answering.leave, AbandonedError())
        with pytest.raises(AbandonedError):
            await answering.whole()
        assert asked.cancelled.is_set()

    asyncio.run(run())
