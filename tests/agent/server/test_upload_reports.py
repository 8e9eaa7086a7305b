"""What is told of attempts to upload while serving."""

from __future__ import annotations

from typing import Any

import pytest

from spark_agent.config import Config, save_config
from spark_agent.context import AgentContext
from spark_agent.paths import config_path
from spark_agent.server.uploader import Uploader
from spark_agent.spool import Spool
from spark_agent.upload import FlushReport


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr("spark_agent.server.uploader.LAST_CALL_S", 120.0)


@pytest.fixture
def reports(spool: Spool, make_model: Any, make_session: Any) -> Any:
    """Flush one session to a service, and give what was told."""

    def flush_once(service_url: str, *, granted: bool = True) -> list[FlushReport | None]:
        model = make_model()
        spool.add(model, make_session(model, decode=3000))
        save_config(config_path(), Config(service_url=service_url).with_consent(granted, service_url))
        told: list[FlushReport | None] = []
        uploader = Uploader(AgentContext.create(), spool, AgentContext.create, told.append)
        uploader.start()
        uploader.stop()
        return told

    return flush_once


def test_what_the_service_took(reports: Any, service: Any) -> None:
    (report,) = reports(service.url)
    assert (report.uploaded, report.last_error, report.requests) == (1, None, 1)


def test_a_flush_that_finds_nothing_asks_nobody(spool: Spool, service: Any) -> None:
    save_config(config_path(), Config(service_url=service.url).with_consent(True, service.url))
    told: list[FlushReport | None] = []
    uploader = Uploader(AgentContext.create(), spool, AgentContext.create, told.append)
    uploader.start()
    uploader.stop()
    (report,) = told
    assert report is not None
    assert (report.requests, report.uploaded, report.last_error) == (0, 0, None)
    assert service.requests == []


def test_a_service_that_is_down(reports: Any) -> None:
    (report,) = reports("http://127.0.0.1:9")
    assert report is None or (report.uploaded, report.last_error is None) == (0, False)


def test_a_no_is_no_attempt(reports: Any, service: Any) -> None:
    assert reports(service.url, granted=False) == []
    assert service.requests == []


def test_settings_that_cannot_be_read(reports: Any, service: Any, spool: Spool) -> None:
    def broken() -> AgentContext:
        raise OSError("no such disk")

    told: list[FlushReport | None] = []
    uploader = Uploader(AgentContext.create(), spool, broken, told.append)
    uploader.start()
    uploader.stop()
    assert told == [None]
