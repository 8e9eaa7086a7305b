"""Uploads while serving: only after a yes, once at the end, and never in the way."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import raw_peers

from spark_agent.config import Config, save_config
from spark_agent.context import AgentContext
from spark_agent.paths import config_path
from spark_agent.server.uploader import Uploader
from spark_agent.spool import Spool


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr("spark_agent.server.uploader.LAST_CALL_S", 120.0)
    monkeypatch.setattr("spark_agent.server.uploader._LEAVE_S", 120.0)


def serve_once(spool: Spool) -> None:
    uploader = Uploader(AgentContext.create(), spool, AgentContext.create)
    uploader.start()
    uploader.stop()


def consent(service_url: str, granted: bool) -> None:
    save_config(config_path(), Config(service_url=service_url).with_consent(granted, service_url))


def test_what_is_there_is_sent_at_the_end(spool: Spool, service: Any, make_model: Any, make_session: Any) -> None:
    model = make_model()
    spool.add(model, make_session(model, decode=3000))
    consent(service.url, granted=True)
    serve_once(spool)
    assert spool.stats().pending == 0
    assert len(service.stored) == 1


@pytest.mark.parametrize("granted", [None, False])
def test_nothing_is_sent_without_a_yes(
    spool: Spool, service: Any, make_model: Any, make_session: Any, granted: bool | None
) -> None:
    model = make_model()
    spool.add(model, make_session(model, decode=3000))
    if granted is not None:
        consent(service.url, granted=granted)
    serve_once(spool)
    assert spool.stats().pending == 1
    assert service.requests == []


def test_a_service_that_is_down_costs_one_warning(
    spool: Spool, make_model: Any, make_session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    spool.add(model, make_session(model, decode=3000))
    consent("http://127.0.0.1:9", granted=True)
    serve_once(spool)
    assert spool.stats().pending == 1
    assert capsys.readouterr().err.count("histograms stay in the spool") == 1


def test_a_damaged_config_is_a_warning(spool: Spool, capsys: pytest.CaptureFixture[str]) -> None:
    context = AgentContext.create()
    config_path().parent.mkdir(parents=True)
    config_path().write_text("not toml")
    uploader = Uploader(context, spool, AgentContext.create)
    uploader.start()
    uploader.stop()
    assert "is not TOML" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["before", "at the end"])
def test_a_service_that_hangs_does_not_hold_up_the_end(
    spool: Spool, make_model: Any, make_session: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The client alone would wait for half a minute, and then for three more attempts."""
    monkeypatch.setattr("spark_agent.server.uploader.LAST_CALL_S", 0.3)
    if when == "before":
        monkeypatch.setattr("spark_agent.server.uploader.FIRST_WAIT_S", 0.0)
    asked, ending = threading.Event(), threading.Event()

    def talk(connection: socket.socket) -> None:
        raw_peers.read_request(connection)
        asked.set()
        ending.wait(240)

    model = make_model()
    spool.add(model, make_session(model, decode=3000))
    with raw_peers.raw_peer(talk) as url:
        consent(url, granted=True)
        uploader = Uploader(AgentContext.create(), spool, AgentContext.create)
        uploader.start()
        join = uploader._thread.join

        def join_once_asked(timeout: float | None = None) -> None:
            assert asked.wait(120)
            join(timeout)

        if when == "before":
            assert asked.wait(120)
        else:
            # What the last call may take counts from when the service hangs, however slow the machine is.
            monkeypatch.setattr(uploader._thread, "join", join_once_asked)
        uploader.stop()
        assert not any(thread.name == "spark-upload" for thread in threading.enumerate())
        ending.set()
    assert spool.stats().pending == 1


def test_a_full_spool_is_told(
    tmp_path: Any, make_model: Any, make_session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    sessions = [make_session(model, seed) for seed in range(4)]
    room = 2 * max(len(session.model_dump_json()) for session in sessions)
    with Spool.open(tmp_path / "small.db", max_bytes=room) as spool:
        uploader = Uploader(AgentContext.create(), spool, AgentContext.create)
        for session in sessions:
            spool.add(model, session)
        uploader.start()
        uploader.stop()
        assert spool.stats().dropped == 2
    assert "the spool was full: 2 histograms, the oldest, had to leave it" in capsys.readouterr().err
