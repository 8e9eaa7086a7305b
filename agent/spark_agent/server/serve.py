"""Running the server: one socket, one computing thread, and an orderly end that keeps every session's counts."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from spark_agent import __version__
from spark_agent.addresses import base_url_of, listening_address, reachable
from spark_agent.chosen_placement import PlacementSource
from spark_agent.context import AgentContext
from spark_agent.env import Replacement
from spark_agent.errors import RefusedError, SparkError, SpoolError
from spark_agent.identity import session_hash
from spark_agent.live import live_misses
from spark_agent.output import counted
from spark_agent.own_sessions import OwnSessions
from spark_agent.running import RunningAgent, RunningAgents, process_started
from spark_agent.served import ServedSessions
from spark_agent.server.activity import Activity, ClosedSession, Promise
from spark_agent.server.app import create_app
from spark_agent.server.conversations import Conversations, lineage_in
from spark_agent.server.engine_thread import EngineThread
from spark_agent.server.generation import GenerationReport
from spark_agent.server.metrics import Metrics
from spark_agent.server.nearest import WorkloadsHere
from spark_agent.server.observed import Observed, metrics_route
from spark_agent.server.placement_control import PlacementControl
from spark_agent.server.placement_routes import placement_routes
from spark_agent.server.prefetch_control import PrefetchControl
from spark_agent.server.sessions import LiveSessions
from spark_agent.server.state import StateReader
from spark_agent.server.stats import agent_stats
from spark_agent.server.stopping import StoppableServer
from spark_agent.server.uploader import Uploader
from spark_agent.server.worker import Worker
from spark_agent.server.workloads import Workloads
from spark_agent.spool import Spool
from spark_agent.tls import ServerTls
from spark_agent.trust import ManifestTrust
from spark_agent.upload import FlushReport
from spark_agent.workload_name import UNLABELLED
from spark_runtime.chat import ChatFormat
from spark_runtime.engine import Engine
from spark_runtime.huge_pages import gather_small_memory
from spark_runtime.session_counts import SessionCounts
from spark_schemas.manifest import PlacementManifest

__all__ = ["bind", "serve"]

_BACKLOG = 128
_SWITCH_S = 0.0005
"""How long one thread may go on while another waits to run Python: the computing thread and the one that answers hand
tokens to each other, and 5 ms, Python's own choice, is a token's time."""
_IDLE_CONNECTION_S = 75
"""How long a connection may wait for its next request. Longer than clients keep theirs (httpx, and with it the clients
of OpenAI and Anthropic, 5 s), so that no request is sent into a connection that is being closed."""
_CUT_OFF_S = 30
"""When connections are closed even if the engine is still in the middle of a step."""


@contextmanager
def bind(host: str, port: int, *, token: str | None = None) -> Iterator[socket.socket]:
    """A listening socket; port 0 takes a free one.

    Raises :class:`RefusedError` for an address that others reach where no ``token`` keeps them out,
    :class:`SparkError` when the port is taken.
    """
    address = listening_address(host)
    name = str(address)
    if not address.is_loopback and token is None:
        raise RefusedError(
            f"refusing to listen on {host}: anyone who reaches it could use this model and read its answers",
            "name a key that requests must bear (SPARKMOE_API_KEY), or listen on 127.0.0.1 and use ssh -L",
        )
    with contextlib.ExitStack() as opened:
        try:
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            # asyncio sends without delay only where the protocol is named; else tokens after the first write wait for
            # the client's acknowledgement, 40 ms of it.
            listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((name, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            other = (
                RunningAgents.of_this_machine().listening_on(name, port) if error.errno == errno.EADDRINUSE else None
            )
            if other is not None:
                raise SparkError(
                    f"cannot listen on {host} port {port}: an agent that serves {other.model} has it "
                    f"(process {other.pid})",
                    f"use that one (spark-agent ps shows it), end it (kill {other.pid}), or take a free port with -p 0",
                ) from error
            raise SparkError(
                f"cannot listen on {host} port {port}: {error.strerror}", "choose another port: -p 0 takes a free one"
            ) from error
        yield listener


def serve(
    context: AgentContext,
    engine: Engine,
    thread: EngineThread,
    spool: Spool,
    listener: socket.socket,
    *,
    key: bytes,
    name: str,
    workload: str,
    start: dict[str, Any],
    resident_share: float,
    manifest: PlacementManifest | None,
    source: PlacementSource,
    describe: Callable[[dict[str, Any]], str],
    token: str | None = None,
    aliases: Sequence[str] = (),
    rules: Path | None = None,
    replacement: Replacement = "auto",
    pinned_share: float = 0.0,
    prefetch: PrefetchControl,
    tls: ServerTls | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; then finish, keep all counts, and return. ``thread`` has loaded the engine.

    ``key`` is that of session hashes. ``resident_share`` of the experts' bytes is in slots; it is told with the
    counters. ``manifest`` is what the slots were started from, and ``source`` where it came from. ``workload`` is that
    of requests which neither a header nor a rule labels. Requests need the ``token`` if there is one, which is kept for
    ``spark-agent ps``; ``aliases`` are further names of the model. ``rules`` is the file of workload rules, which need
    not be there. ``replacement`` says whether recent traffic moves the slots' priors, and ``pinned_share`` of the slots
    stay pinned whatever is placed; ``prefetch`` says what is fetched early. With ``tls`` nothing but TLS is spoken. A
    second signal ends what runs at once, a third one the process.
    """
    conversations = Conversations()
    served = ServedSessions(spool, engine.shape.fingerprint, key, context.output.warning)
    own = OwnSessions(engine.shape, context.output.warning)
    workloads = Workloads(rules, context.output.warning)
    activity = Activity(workload, WorkloadsHere(engine.shape, own) if workload == UNLABELLED else None)

    def close(session: str, named: str | None, counts: SessionCounts) -> None:
        told, under = placement.manifest_of(None if counts.misses is None else counts.misses.start)
        live = live_misses(counts, under) if told else None
        histogram = counts.to_histogram(session_hash(key, lineage_in(session)), named or workload, live)
        if histogram is not None:
            spool.add(engine.shape, histogram, served=served.closed(*conversations.began(session)))
            own.keep(histogram)
            activity.closed(named, _closed(counts, placement.promised_of(counts)))

    def opened(name: str) -> None:
        served.opened(*conversations.began(name))

    def complain(error: Exception) -> None:
        context.output.warning(f"session counts could not be kept yet: {error}")

    def complain_of_placement(error: BaseException) -> None:
        context.output.warning(f"the experts stay where they are: {error}")

    def done(report: GenerationReport) -> None:
        # Whatever fails in telling must not end the thread that computes.
        try:
            activity.generation(report)
            activity.compare(sessions)
        except Exception as error:
            context.output.warning(f"a generation is missing in the metrics: {error}")

    def flushed(report: FlushReport | None) -> None:
        if report is not None and not report.requests:
            return  # nothing was due
        ok = report is not None and report.last_error is None
        activity.upload(ok=ok, histograms=0 if report is None else report.uploaded)

    sessions = LiveSessions(engine.shape, close, time.monotonic, len(engine.conversations))
    worker = Worker(engine, sessions, complain, on_done=done, thread=thread)
    placement = PlacementControl(
        engine,
        worker,
        ManifestTrust.of_this_machine(context.environment),
        own.profile,
        complain_of_placement,
        source=source,
        manifest=manifest,
        replacement=replacement,
        pinned_share=pinned_share,
    )
    prefetch.listen(worker)
    uploader = Uploader(context, spool, AgentContext.create, flushed)
    state = StateReader(
        __version__,
        name,
        worker,
        engine,
        sessions,
        spool,
        activity,
        lambda: resident_share,
        lambda: _promise(placement.manifest),
        lambda: prefetch.state,
    )
    agent = _described(listener, name, engine.shape.fingerprint, token, tls)
    described = {"base_url": agent.base_url, **start}

    chat = ChatFormat(engine)
    learning = threading.Thread(target=_learn, args=(chat,), name="spark-learning")

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        worker.start()
        uploader.start()
        _forget_open(context, spool, agent)
        served.start()
        _register(context, agent)
        context.output.result(described, describe(described))
        sys.stdout.flush()  # whoever started this process through a pipe waits for it
        learning.start()
        # What is there by now stays: looking through it for garbage would hold up tokens for a hundredth of a second.
        gc.freeze()
        yield

    app = create_app(
        worker,
        chat,
        model=name,
        health={"model": Path(start["model"]).name, "fingerprint": engine.shape.fingerprint},
        stats=lambda: agent_stats(state()),
        lifespan=lifespan,
        lineage_of=conversations.read,
        opened=opened,
        workload_of=workloads,
        extra_routes=[metrics_route(Metrics(state)), *placement_routes(placement)],
        token=token,
        aliases=aliases,
    )
    observed = Observed(app, app.routes, activity)
    config = uvicorn.Config(
        observed,
        log_level="warning",
        access_log=False,
        ws="none",
        timeout_keep_alive=_IDLE_CONNECTION_S,
        timeout_graceful_shutdown=_CUT_OFF_S,
        server_header=False,
        ssl_context_factory=None if tls is None else lambda _config, _default: tls.context(),
    )
    server = StoppableServer(config, worker.give_up)
    sys.setswitchinterval(_SWITCH_S)
    with server.signals():
        try:
            server.run(sockets=[listener])
        finally:
            _unregister(context, agent)
            worker.stop()
            prefetch.close()
            _joined(learning)
            served.stop()
            _forget_open(context, spool, agent)
            uploader.stop()
            own.close()
            lost = len(sessions) + sessions.lost
            if lost:
                context.output.warning(f"the counts of {counted(lost, 'session')} were lost: see the warnings above")


def _learn(chat: ChatFormat) -> None:
    """What makes later requests quicker, and the first one need not wait for."""
    chat.learn_markers()
    gather_small_memory()


def _joined(thread: threading.Thread) -> None:
    if thread.ident is not None:
        thread.join()


def _closed(counts: SessionCounts, manifest: PlacementManifest | None) -> ClosedSession:
    misses, promise = counts.misses, _promise(manifest)
    return ClosedSession(
        workload="",  # the activity's own word for it
        prefill_tokens=counts.tokens["prefill"],
        decode_tokens=counts.tokens["decode"],
        cold_hit_rate=None if misses is None else misses.cold_hits / misses.selections,
        promised_cold_hit_rate=None if promise is None else promise.cold_hit_rate,
        placement="none" if manifest is None else manifest.workload,
    )


def _promise(manifest: PlacementManifest | None) -> Promise | None:
    expected = None if manifest is None else manifest.expected
    if manifest is None or expected is None:
        return None
    return Promise(expected.cold_hit_rate, expected.low, expected.high, manifest.workload)


def _described(
    listener: socket.socket, name: str, fingerprint: str, token: str | None, tls: ServerTls | None
) -> RunningAgent:
    host, port = listener.getsockname()[:2]
    return RunningAgent(
        pid=os.getpid(),
        process_started=process_started(os.getpid()),
        host=host,
        port=port,
        base_url=base_url_of(host, port) if tls is None else base_url_of(tls.host_for(reachable(host)), port, "https"),
        model=name[:300],
        fingerprint=fingerprint,
        started_s=time.time(),
        token=token,
        certificate_sha256=None if tls is None else tls.digest,
        trust_file=str(tls.cert_file) if tls is not None and tls.self_signed else None,
    )


def _forget_open(context: AgentContext, spool: Spool, agent: RunningAgent) -> None:
    """Conversations that are open are this agent's, unless another one serves the model."""
    others = [one for one in RunningAgents.of_this_machine().find() if one.pid != agent.pid]
    if any(one.fingerprint == agent.fingerprint for one in others):
        return
    try:
        spool.forget_open(agent.fingerprint)
    except SpoolError as error:
        context.output.warning(f"transcripts of conversations that were never counted cannot be recorded: {error}")


def _register(context: AgentContext, agent: RunningAgent) -> None:
    try:
        RunningAgents.of_this_machine().add(agent)
    except OSError as error:
        context.output.warning(f"`spark-agent ps` will not show this agent: {error}")


def _unregister(context: AgentContext, agent: RunningAgent) -> None:
    try:
        RunningAgents.of_this_machine().remove(agent.pid)
    except OSError as error:
        context.output.warning(f"the file of this agent stays until the next `spark-agent ps`: {error}")
