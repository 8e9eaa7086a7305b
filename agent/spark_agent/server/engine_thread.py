"""The one thread that has the engine: it loads the model, and computes with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

from spark_runtime.engine import Engine, EngineOptions

__all__ = ["EngineThread"]


class EngineThread:
    """Loads an engine, then works with it until that work ends; started when it is first needed.

    One thread for both, because prompts whose experts are fetched take longer on a GPU where another thread than the
    one that loaded launches them: first tokens came 3% later (``infra/docs/decisions/0017-late-by-milliseconds.md``).
    And another one than the main thread, so that Ctrl-C is heard while llama.cpp reads a file.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="spark-engine")
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.join()

    def load(self, path: Path, options: EngineOptions) -> Engine:
        """Load there; errors as :meth:`Engine.load`, with which the thread ends.

        Ctrl-C ends it with the next tensor that is read.
        """
        future: Future[Engine] = Future()
        given_up = threading.Event()

        def task() -> None:
            try:
                future.set_result(Engine.load(path, options, wanted=lambda: not given_up.is_set()))
            except BaseException as error:
                future.set_exception(error)

        try:
            self._do(task)
            return future.result()
        except BaseException:
            given_up.set()
            self.join()
            if future.done() and future.exception() is None:
                future.result().close()  # it was loaded all the same
            raise

    def work(self, function: Callable[[], None]) -> None:
        """Run a function there and then end; what it raises is an unhandled exception of a thread."""
        self._do(function)
        self._tasks.put(None)

    def join(self) -> None:
        """Return when the work has ended; without any, end."""
        if self._thread.ident is not None:
            self._tasks.put(None)
            self._thread.join()

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
