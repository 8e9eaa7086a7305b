"""The thread that loads an engine and works with it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_agent.server.engine_thread import EngineThread
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import NotGgufError
from spark_runtime.models import demo_model_path

SMALL = EngineOptions(n_ctx=64, n_threads=1)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "spark-engine"]


def test_what_loads_is_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, idents = Engine.load, []

    def load(*arguments: Any, **options: Any) -> Engine:
        idents.append(threading.get_ident())
        return usual(*arguments, **options)

    monkeypatch.setattr(Engine, "load", load)
    with EngineThread() as thread, thread.load(demo_model_path(), SMALL) as engine:
        thread.work(lambda: idents.append(threading.get_ident()))
        thread.join()
        assert engine.prompt(engine.tokenize("How are you?")) == 0
    assert idents[0] == idents[1] != threading.get_ident()
    assert not engine_threads()


def test_without_work_it_ends() -> None:
    with EngineThread() as thread, thread.load(demo_model_path(), SMALL):
        assert len(engine_threads()) == 1
    assert not engine_threads()
    with EngineThread():
        assert not engine_threads()


def test_an_error_while_loading_is_the_callers(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no model at all")
    with EngineThread() as thread:
        with pytest.raises(NotGgufError):
            thread.load(tmp_path / "model.gguf", SMALL)
        assert not engine_threads()


@pytest.mark.parametrize("too_late", [False, True])
def test_ctrl_c_while_loading(monkeypatch: pytest.MonkeyPatch, too_late: bool) -> None:
    usual, loaded = Engine.load, []

    def load(path: Path, options: EngineOptions, *, wanted: Callable[[], bool]) -> Engine:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        while wanted():
            threading.Event().wait(0.001)
        loaded.append(usual(path, options, wanted=(lambda: True) if too_late else wanted))
        return loaded[0]

    monkeypatch.setattr(Engine, "load", load)
    with pytest.raises(KeyboardInterrupt), EngineThread() as thread:
        thread.load(demo_model_path(), SMALL)
    assert not engine_threads()
    assert len(loaded) == too_late
    for engine in loaded:
        with pytest.raises(Exception, match="the model is closed"):
            engine.tokenize("a")
