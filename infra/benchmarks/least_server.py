"""The least that a server on uvicorn can be: least_server.py MODEL.gguf PORT THREADS CONTEXT [--residency SHARE].

uvicorn with uvloop, one path that takes token ids as OpenAI's completions do, one thread that computes, greedily, and
an event for each token. Nothing is checked or put in line: what the first token takes here beside the engine alone is
HTTP's, two changes of threads, and the interpreter's, with which any server on uvicorn begins.
``serving_overhead.py --beside … --beside-asked ids`` asks it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier_start import uniform_start

Asked = tuple[dict[str, Any], asyncio.AbstractEventLoop, asyncio.Queue[bytes | None]]
_SWITCH_S = 0.0005
"""As the agent has it."""


def events(engine: Engine, body: dict[str, Any]) -> Iterator[bytes]:
    """A token each, and the usage."""
    sampling = Sampling(logit_bias=tuple((int(token), bias) for token, bias in body["logit_bias"].items()))
    engine.prompt(body["prompt"])
    count = 0
    for token in engine.generate(sampling, body["max_tokens"]):
        count += 1
        yield _event(choices=[{"text": engine.piece(token).decode(errors="replace")}])
    yield _event(choices=[], usage={"prompt_tokens": len(body["prompt"]), "completion_tokens": count})


def _event(**members: object) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def compute(engine: Engine, asked: queue.SimpleQueue[Asked]) -> None:
    """Without end; routing is counted, as the engine alone does it beside."""
    counts = SessionCounts(engine.shape)
    while True:
        body, loop, told = asked.get()
        with engine.counting(counts):
            for event in events(engine, body):
                loop.call_soon_threadsafe(told.put_nowait, event)
        loop.call_soon_threadsafe(told.put_nowait, None)


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    for name in ("port", "threads", "context"):
        parser.add_argument(name, type=int)
    parser.add_argument("--residency", type=float, default=1.0)
    arguments = parser.parse_args()
    asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()

    async def application(_scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        told: asyncio.Queue[bytes | None] = asyncio.Queue()
        asked.put((json.loads(body), asyncio.get_running_loop(), told))
        event = await told.get()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while event is not None:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            event = await told.get()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    shape = read_model_shape(arguments.model)
    tier = uniform_start(shape, arguments.residency) if arguments.residency < 1 else None
    options = EngineOptions(n_ctx=arguments.context, n_threads=arguments.threads, tier=tier)
    with Engine.load(arguments.model, options) as engine:
        sys.setswitchinterval(_SWITCH_S)
        threading.Thread(target=compute, args=(engine, asked), daemon=True).start()
        uvicorn.run(application, port=arguments.port, lifespan="off", access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
