"""What a generation tells, as whoever waits for it hears it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from spark_agent.server.generation import Finished, Generation, Piece

DEADLINE_S = 60.0


async def events_of(generation: Generation) -> AsyncIterator[Piece | Finished]:
    """Events until the generation is finished; raises what the engine raised."""
    while True:
        while (event := generation.events.take()) is None:
            assert await generation.events.wait(DEADLINE_S), "nothing came"
        if isinstance(event, Exception):
            raise event
        yield event
        if isinstance(event, Finished):
            return
