"""Running the server: one socket, one computing thread, and an orderly end that keeps every session's counts."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from spark_agent.context import AgentContext
from spark_agent.errors import RefusedError, SparkError, UsageError
from spark_agent.identity import session_hash
from spark_agent.live import live_misses
from spark_agent.server.app import create_app
from spark_agent.server.sessions import LiveSessions
from spark_agent.server.stats import tier_stats
from spark_agent.server.uploader import Uploader
from spark_agent.server.worker import Worker
from spark_agent.spool import Spool
from spark_runtime.chat import ChatFormat
from spark_runtime.engine import Engine
from spark_runtime.session_counts import SessionCounts
from spark_schemas.manifest import PlacementManifest

__all__ = ["bind", "serve"]

_BACKLOG = 128
_GRACE_S = 5
"""How long running requests may go on after a signal, before they are answered with an error."""
_CUT_OFF_S = 30
"""When connections are closed even if the engine is still in the middle of a step."""


@contextmanager
def bind(host: str, port: int, *, token: str | None = None) -> Iterator[socket.socket]:
    """A listening socket; port 0 takes a free one.

    Raises :class:`RefusedError` for an address that others reach where no ``token`` keeps them out,
    :class:`SparkError` when the port is taken.
    """
    name = "127.0.0.1" if host == "localhost" else host
    try:
        address = ipaddress.ip_address(name)
    except ValueError as error:
        raise UsageError(f"--host: found {host!r}, expected an IP address or localhost", "e.g. 127.0.0.1") from error
    if not address.is_loopback and token is None:
        raise RefusedError(
            f"refusing to listen on {host}: anyone who reaches it could use this model and read its answers",
            "set SPARKMOE_API_KEY, which requests then need as a token, or listen on 127.0.0.1 and use ssh -L",
        )
    with contextlib.ExitStack() as opened:
        try:
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((name, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            raise SparkError(
                f"cannot listen on {host} port {port}: {error.strerror}", "choose another port: -p 0 takes a free one"
            ) from error
        yield listener


def serve(
    context: AgentContext,
    engine: Engine,
    spool: Spool,
    listener: socket.socket,
    *,
    key: bytes,
    name: str,
    workload: str,
    start: dict[str, Any],
    resident_share: float,
    manifest: PlacementManifest | None,
    describe: Callable[[dict[str, Any]], str],
    token: str | None = None,
    aliases: Sequence[str] = (),
) -> None:
    """Serve until SIGINT or SIGTERM; then finish, keep all counts, and return. ``key`` is that of session hashes.

    ``resident_share`` of the experts' bytes is in slots; it is told with the counters. ``manifest`` is what the slots
    were started from. Requests need the ``token`` if there is one; ``aliases`` are further names of the model.
    """

    def close(lineage: str, counts: SessionCounts) -> None:
        histogram = counts.to_histogram(session_hash(key, lineage), workload, live_misses(counts, manifest))
        if histogram is not None:
            spool.add(engine.shape, histogram)

    def complain(error: Exception) -> None:
        context.output.warning(f"session counts could not be kept yet: {error}")

    sessions = LiveSessions(engine.shape, close, time.monotonic)
    worker = Worker(engine, sessions, complain)
    uploader = Uploader(context, spool, AgentContext.create)
    host, port = listener.getsockname()[:2]
    base_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    described = {"base_url": base_url, **start}

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        worker.start()
        uploader.start()
        context.output.result(described, describe(described))
        sys.stdout.flush()  # whoever started this process through a pipe waits for it
        yield

    app = create_app(
        worker,
        ChatFormat(engine),
        model=name,
        health={"model": Path(start["model"]).name, "fingerprint": engine.shape.fingerprint},
        stats=lambda: tier_stats(engine, resident_share),
        lifespan=lifespan,
        token=token,
        aliases=aliases,
    )
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_CUT_OFF_S, server_header=False)
    with _signals_end_quietly():
        try:
            _Server(config, worker).run(sockets=[listener])
        finally:
            worker.stop()
            uploader.stop()
            if len(sessions):
                context.output.warning(f"{len(sessions)} sessions' counts were lost: see the warnings above")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.get_running_loop().call_later(_GRACE_S, self._worker.give_up)
        await super().shutdown(sockets)
        ending.cancel()


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Let uvicorn stop on a signal without raising it again afterwards: stopping a server is not a failure."""
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
