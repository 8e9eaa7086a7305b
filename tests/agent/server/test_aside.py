import asyncio
import threading

import pytest

from spark_agent.server.aside import SHORT_CHARACTERS, aside


@pytest.mark.parametrize(("size", "here"), [(0, True), (SHORT_CHARACTERS, True), (SHORT_CHARACTERS + 1, False)])
def test_what_takes_long_lets_others_be_answered(size, here):
    async def where() -> bool:
        return await aside(threading.get_ident, size=size) == threading.get_ident()

    assert asyncio.run(where()) is here


def test_what_has_to_wait_lets_others_be_answered():
    async def elsewhere() -> bool:
        return await aside(threading.get_ident, size=0, waits=True) != threading.get_ident()

    assert asyncio.run(elsewhere())


@pytest.mark.parametrize("size", [0, SHORT_CHARACTERS + 1])
def test_failures_come_through(size):
    with pytest.raises(ZeroDivisionError):
        asyncio.run(aside(divmod, 1, 0, size=size))
