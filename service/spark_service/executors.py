"""Where pure functions over arrays run: in threads of this process or on a Ray cluster. The results are the same.

Work is handed out as it is asked for and results come in order, so that neither side ever holds more than a few items.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from spark_service.errors import ExecutorError

__all__ = ["Executor", "LocalExecutor", "RayExecutor", "executor_for"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_AHEAD_PER_WORKER = 2
_ANSWER_SECONDS = 5.0


class Executor(Protocol):
    """Runs a function on every item."""

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Results in the order of the items. What a function raises is raised here."""
        ...

    def close(self) -> None:
        """Give back what it holds; closing twice is harmless."""
        ...


class LocalExecutor:
    """Threads: the work is numpy's, which leaves the interpreter to others meanwhile."""

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers or min(os.cpu_count() or 1, 8)
        self._pool: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Results in the order of the items."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="build")
        waiting: deque[Future[_Result]] = deque()
        try:
            for item in items:
                waiting.append(self._pool.submit(function, item))
                if len(waiting) >= self._workers * _AHEAD_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


class RayExecutor:
    """Tasks on a Ray cluster. Workers get arrays and return arrays; no worker ever opens the database."""

    def __init__(self, address: str) -> None:
        """Connect to ``address``, or with ``auto`` to a running cluster of this machine, else start one here.

        Raises :class:`ExecutorError` where Ray is not installed or the cluster does not answer.
        """
        try:
            import ray
        except ImportError as error:
            raise ExecutorError(
                "--ray: Ray is not installed, expected the extra of that name",
                'install it: pip install "spark-moe[ray]", or leave --ray out: the local builders give the same bits',
            ) from error
        self._ray: Any = ray
        self._started = not ray.is_initialized()
        if not self._started:
            return
        try:
            _require_answer(address)
            self._connect(address)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ExecutorError(
                f"--ray {address}: {reason}, expected a Ray cluster that answers",
                "start one with `ray start --head`, or use --ray auto to start one inside this process",
            ) from error

    def _connect(self, address: str) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
        if address != "auto":
            del options["include_dashboard"]  # the cluster's own
            self._ray.init(address=address, **options)
            return
        try:
            self._ray.init(address="auto", **{key: options[key] for key in ("log_to_driver", "configure_logging")})
        except ConnectionError:
            self._ray.init(**options)

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Results in the order of the items."""
        shared = self._ray.put(function)
        ahead = max(2, int(self._ray.cluster_resources().get("CPU", 1)) * _AHEAD_PER_WORKER)
        task = self._ray.remote(_apply)
        waiting: deque[Any] = deque()
        for item in items:
            waiting.append(task.remote(shared, item))
            if len(waiting) >= ahead:
                yield self._ray.get(waiting.popleft())
        while waiting:
            yield self._ray.get(waiting.popleft())

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        if self._started and self._ray.is_initialized():
            self._ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise ``OSError`` or ``ValueError`` unless something listens there: Ray would end the process after minutes."""
    if address == "auto":
        return
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.hostname is None or place.port is None:
        raise ValueError("no HOST:PORT")
    socket.create_connection((place.hostname, place.port), timeout=_ANSWER_SECONDS).close()


def _apply(function: Callable[[_Item], _Result], item: _Item) -> _Result:
    return function(item)


def executor_for(ray_address: str | None) -> Executor:
    """The local executor, or Ray's when it is asked for."""
    return LocalExecutor() if ray_address is None else RayExecutor(ray_address)
