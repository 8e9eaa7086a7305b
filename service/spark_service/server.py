"""One run of the service: bind, open, announce, serve, close."""

from __future__ import annotations

import gc
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from types import FrameType

import uvicorn

from spark_service.app import create_app
from spark_service.db.store import Store
from spark_service.drift_watch import DriftWatch
from spark_service.errors import AddressError
from spark_service.executors import executor_for
from spark_service.housekeeping import Housekeeping
from spark_service.inflate import BodyLimits
from spark_service.keyring import Keyring
from spark_service.local_only import LocalOnly
from spark_service.segment_mover import segment_mover
from spark_service.settings import Settings
from spark_service.windows import Windows

__all__ = ["bind", "serve"]

GRACE_SECONDS = 30


def bind(host: str, port: int) -> socket.socket:
    """Listen on an address, so that a client that reads the announcement can connect at once.

    Raises :class:`AddressError` with the operating system's reason.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        # Lets a restart take the port while old connections wind down; a second listener is still refused.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise AddressError(
            f"cannot listen on {host} port {port}: {reason}, expected a free port of this machine",
            "stop what uses it, or choose another with --port (0 picks a free one)",
        ) from error
    return listener


def serve(settings: Settings, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then finish requests in flight and close the database.

    ``announce`` gets the base URL once the socket listens and the database is open. Raises the errors of
    :func:`bind` and :meth:`Store.open`, and :class:`RefusedError` where nobody could authenticate.
    """
    settings.require_safe_address()
    settings.prepare_data_dir()
    with bind(settings.host, settings.port) as listener, ExitStack() as stack:
        store = Store.open(
            settings.database,
            memory=settings.db_memory,
            threads=settings.db_threads,
            segments=settings.segments_dir,
        )
        try:
            keyring = Keyring(store)
            settings.require_tokens(any_stored=keyring.any_usable())
            limits = BodyLimits(settings.max_body_bytes, settings.max_inflated_bytes)
            executor = stack.enter_context(closing(executor_for(settings.ray)))
            app = create_app(
                store,
                token=settings.token,
                open_access=settings.open_access,
                keyring=keyring,
                limits=limits,
                rates=settings.rates,
                history_per_key=settings.history_per_key,
                cache_bytes=settings.read_cache_bytes,
                executor=executor,
                min_sessions=settings.min_sessions,
                windows=Windows(settings.window_days, settings.half_life_days),
                retention_days=settings.retention_days,
                segment_after_days=settings.segment_after_days,
            )
            watch = DriftWatch(store, min_sessions=settings.min_sessions)
            if settings.open_access:
                app.add_middleware(LocalOnly)
            server = uvicorn.Server(
                uvicorn.Config(
                    app,
                    log_config=None,
                    # Paths carry session hashes, which belong in no log.
                    access_log=False,
                    server_header=False,
                    timeout_graceful_shutdown=GRACE_SECONDS,
                )
            )
            _stop_on_signals(server)
            # What was made up to here lives as long as the process: no garbage collection needs to look at it again.
            gc.collect()
            gc.freeze()
            announce(_base_url(settings.host, listener))
            with (
                Housekeeping(store, keyring, settings.retention_days, watch=watch),
                segment_mover(store, settings.segment_after_days),
                closing(app.state.dashboard),
            ):
                server.run(sockets=[listener])
        finally:
            store.close()
    logging.getLogger(__name__).info("stopped")


def _stop_on_signals(server: uvicorn.Server) -> None:
    # uvicorn raises the signals it caught once more after its shutdown, to whoever handled them before: without a
    # handler of ours a clean stop would look like a death by signal. Ours also covers the time before it starts.
    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _base_url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
