"""A real agent server on loopback: the demo model, uvicorn and sockets, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from spark_agent.server.app import create_app
from spark_agent.server.generation import GenerationReport
from spark_agent.server.serve import bind
from spark_agent.server.sessions import LiveSessions
from spark_agent.server.stats import tier_stats
from spark_agent.server.worker import Worker
from spark_runtime.chat import ChatFormat
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.models import demo_model_path
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier_start import TierStart

DEADLINE_S = 120.0


@dataclass
class Agent:
    client: httpx.Client
    address: tuple[str, int]
    engine: Engine
    worker: Worker
    sessions: LiveSessions
    kept: list[tuple[str, SessionCounts]]
    complaints: list[Exception]
    reports: list[GenerationReport]
    tasks: Callable[[], int]
    """How many tasks the server's loop has."""

    def chat(self, text: str = "How are you today?", **members: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16, **members}
        return self.client.post("/v1/chat/completions", json=body)

    def answer(self, text: str = "How are you today?", **members: Any) -> str:
        reply = self.chat(text, **members)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]["content"]

    def events(self, text: str = "How are you today?", **members: Any) -> list[Any]:
        """The JSON of a stream's events; the last one is ``[DONE]`` as text."""
        reply = self.chat(text, stream=True, **members)
        assert reply.status_code == 200, reply.text
        parts = reply.content.split(b"\n\n")
        assert parts.pop() == b""
        assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
        values = [part.removeprefix(b"data: ") for part in parts]
        return [value.decode() if value == b"[DONE]" else json.loads(value) for value in values]

    def never_ends(self, patch: pytest.MonkeyPatch) -> None:
        """Answers go on until something else ends them.

        Which tokens are the likeliest depends on how a processor rounds, so no prompt makes the model go on anywhere.
        """
        patch.setattr(self.engine._context, "is_end", lambda _token: False)


Serving = Callable[..., contextlib.AbstractContextManager[Agent]]


@contextlib.contextmanager
def serving(
    model: Path | None = None,
    n_ctx: int = 0,
    refuse: Callable[[], Exception | None] = lambda: None,
    tier: TierStart | None = None,
    repack: bool = True,
    n_seq_max: int = 1,
    n_ubatch: int = 0,
    **options: Any,
) -> Iterator[Agent]:
    """Serve while the block runs. ``refuse`` gives the error with which counts are not taken, if any.

    ``n_ubatch`` is how many tokens of a prompt are computed at once; ``options`` are further arguments of the
    application.
    """
    kept: list[tuple[str, SessionCounts]] = []
    complaints: list[Exception] = []
    reports: list[GenerationReport] = []
    loops: list[asyncio.AbstractEventLoop] = []

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        loops.append(asyncio.get_running_loop())
        yield

    def keep(lineage: str, _workload: str | None, counts: SessionCounts) -> None:
        if (error := refuse()) is not None:
            raise error
        kept.append((lineage, counts))

    opened = EngineOptions(
        n_ctx=n_ctx,
        n_threads=1,
        n_outputs_max=1,
        tier=tier,
        repack=repack,
        n_seq_max=n_seq_max,
        n_ubatch=n_ubatch,
    )
    with (
        bind("127.0.0.1", 0) as listener,
        Engine.load(model or demo_model_path(), opened) as engine,
    ):
        sessions = LiveSessions(engine.shape, keep, time.monotonic)
        worker = Worker(engine, sessions, complaints.append, on_done=reports.append)
        app = create_app(
            worker,
            ChatFormat(engine),
            model="nano",
            health={"fingerprint": engine.shape.fingerprint},
            stats=lambda: tier_stats(engine, 0.6),
            lifespan=lifespan,
            **options,
        )
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        worker.start()
        thread.start()
        host, port = listener.getsockname()
        try:
            with httpx.Client(base_url=f"http://{host}:{port}", timeout=DEADLINE_S, trust_env=False) as client:
                yield Agent(
                    client, (host, port), engine, worker, sessions, kept, complaints, reports,
                    lambda: len(asyncio.all_tasks(loops[0])),
                )  # fmt: skip
        finally:
            server.should_exit = True
            thread.join()
            worker.stop()


@pytest.fixture(scope="session")
def serve() -> Serving:
    return serving


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    """A server that the tests of a module share.

    It computes prompts token by token. How many of them are reused, which is up to the tests before, would otherwise
    change the sizes of batches, with them the bits, and with these now and then a greedy answer.
    """
    with serving(n_ubatch=1) as running:
        yield running
