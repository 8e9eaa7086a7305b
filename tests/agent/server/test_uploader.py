"""Uploads while serving: only after a yes, once at the end, and never in the way."""

from __future__ import annotations

from typing import Any

import pytest

from spark_agent.config import Config, save_config
from spark_agent.context import AgentContext
from spark_agent.paths import config_path
from spark_agent.server.uploader import Uploader
from spark_agent.spool import Spool


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
