from __future__ import annotations

import datetime as dt

import pytest

from spark_agent.paths import config_path, spool_path
from spark_agent.spool import Spool
from spark_agent.upload import RetryPolicy

ONE_ATTEMPT = RetryPolicy(attempts=1)
STATUS = [
    "pending",
    "bytes",
    "held_back",
    "rejected",
    "dropped",
    "last_error",
    "next_attempt_at",
    "allowed",
    "refused_because",
    "consent",
    "paused",
    "service_url",
]
FLUSH = ["uploaded", "duplicates", "held_back", "rejected", "dropped", "pending", "bytes", "last_error"]


@pytest.fixture
def filled(make_model, make_session) -> None:
    with Spool.open(spool_path()) as spool:
        for model_seed in range(2):
            for seed in range(12):
                spool.add(make_model(model_seed), make_session(make_model(model_seed), seed))


@pytest.fixture(autouse=True)
def address(service, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPARKMOE_SERVICE_URL", service.url)
    return service.url


@pytest.fixture
def consented(agent_cli, address) -> None:
    assert agent_cli("upload", "consent", "--yes").code == 0


def test_status(agent_cli, filled, address):
    status = agent_cli("upload", "status", "--json").json
    assert list(status) == STATUS
    assert status["pending"] == 24
    assert status["bytes"] > 0
    assert (status["consent"], status["paused"], status["last_error"]) == (None, False, None)
    assert status["service_url"] == address
    assert (status["allowed"], status["next_attempt_at"], status["held_back"]) == (False, None, 24)
    assert "nobody has consented" in status["refused_because"]
    text = agent_cli("upload", "status").out
    assert "24 histograms" in text
    assert "never asked" in text


def test_the_bytes_shown_are_the_bytes_sent(agent_cli, filled, consented, service):
    shown = agent_cli("upload", "show", "--minimum-tokens", 100)
    assert shown.code == 0
    report = agent_cli("upload", "flush", "--minimum-tokens", 100, "--json").json
    assert list(report) == FLUSH
    assert len(service.uploads) == 2
    assert b"".join(body + b"\n" for body in service.uploads) == shown.out.encode()
    assert report["uploaded"] == len(service.stored) > 0
    assert report["pending"] == report["held_back"]
    assert agent_cli("upload", "status", "--json").json["pending"] == report["pending"]


def test_a_flush_says_why_something_is_held_back(agent_cli, filled, consented, service):
    result = agent_cli("upload", "flush")
    assert (result.code, service.uploads) == (0, [])
    assert "under 2000 tokens; they leave once there is more" in result.err
    assert "held back:" not in agent_cli("upload", "flush", "--minimum-tokens", 1).err


def test_nothing_to_show_is_said(agent_cli, filled):
    result = agent_cli("upload", "show")
    assert (result.code, result.out) == (0, "")
    assert "24 histograms wait" in result.err
    assert "minimum 2000" in result.err


def test_flushing_nothing_is_fine(agent_cli, consented, service):
    assert agent_cli("upload", "flush", "--json").json["uploaded"] == 0
    assert service.requests == []


def test_without_a_yes_nothing_leaves(agent_cli, filled, service):
    agent_cli("upload", "flush").failed(3, "nobody has consented", "spark-agent upload consent")
    assert agent_cli("upload", "consent", "--no").code == 0
    agent_cli("upload", "flush", "--json").failed(3, "consent was refused")
    assert service.requests == []


@pytest.mark.parametrize("name", ["DO_NOT_TRACK", "SPARKMOE_OFFLINE"])
def test_a_wish_not_to_be_tracked_is_kept(agent_cli, filled, consented, service, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    agent_cli("upload", "flush").failed(3, name)
    assert service.requests == []
    assert agent_cli("upload", "status", "--json").json["pending"] == 24
    assert agent_cli("upload", "show", "--minimum-tokens", 1).out


def test_consent_is_for_one_service(agent_cli, filled, consented, service):
    agent_cli("upload", "flush", "--service", "http://127.0.0.1:9").failed(3, service.url)


def test_a_pause(agent_cli, filled, consented, service):
    status = agent_cli("upload", "pause", "--json").json
    assert list(status) == STATUS
    assert (status["paused"], status["consent"]) == (True, True)
    agent_cli("upload", "flush").failed(3, "paused", "spark-agent upload pause --off")
    assert "paused" in agent_cli("upload", "status").out
    assert agent_cli("upload", "pause", "--off").code == 0
    assert agent_cli("upload", "flush", "--minimum-tokens", 1, "--json").json["uploaded"] == 24


def test_a_service_that_is_down_costs_nothing(agent_cli, filled, service, monkeypatch):
    monkeypatch.setenv("SPARKMOE_SERVICE_URL", "http://127.0.0.1:9")
    assert agent_cli("upload", "consent", "--yes").code == 0
    monkeypatch.setattr("spark_agent.upload.RetryPolicy", lambda: ONE_ATTEMPT)
    result = agent_cli("upload", "flush", "--minimum-tokens", 1, "--json")
    result.failed(1, "127.0.0.1:9", "nothing was lost")
    assert '"uploaded": 0' in result.out
    status = agent_cli("upload", "status", "--json").json
    assert status["pending"] == 24
    assert "no answer" in status["last_error"]


def test_what_was_refused_is_tried_again_when_told(agent_cli, filled, consented, service, make_problem):
    service.refuse = lambda upload: make_problem(422, "Untrue")
    agent_cli("upload", "flush", "--minimum-tokens", 100).failed(1, "Untrue")
    aside = agent_cli("upload", "status", "--json").json["rejected"]
    assert aside > 0
    service.refuse = lambda upload: None
    assert agent_cli("upload", "flush", "--minimum-tokens", 100).code == 0
    assert agent_cli("upload", "status", "--json").json["rejected"] == aside
    result = agent_cli("upload", "flush", "--minimum-tokens", 100, "--rejected", "--json")
    assert f"tried again: {aside} rejected" in result.err
    assert result.json["uploaded"] > 0
    assert agent_cli("upload", "status", "--json").json["rejected"] == 0
    agent_cli("upload", "consent", "--no")
    agent_cli("upload", "flush", "--rejected").failed(3, "consent was refused")


def test_the_status_says_when_it_goes_on(agent_cli, filled, consented, service, make_problem):
    service.script = [make_problem(429, "Slow down", {"Retry-After": "600"})]
    before = dt.datetime.now(dt.UTC)
    agent_cli("upload", "flush", "--minimum-tokens", 100).failed(1, "Slow down")
    after = dt.datetime.now(dt.UTC)
    status = agent_cli("upload", "status", "--json").json
    at = dt.datetime.fromisoformat(status["next_attempt_at"])
    assert (at - before).total_seconds() >= 599
    assert (at - after).total_seconds() <= 750
    assert (status["allowed"], status["refused_because"]) == (True, None)
    assert "Slow down" in status["last_error"]


def test_a_refusing_service_is_quoted(agent_cli, filled, consented, service, make_problem):
    service.script = [make_problem(403, "Wrong token")] * 4
    agent_cli("upload", "flush", "--minimum-tokens", 1).failed(1, "Wrong token")
    assert agent_cli("upload", "status", "--json").json["pending"] == 24


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--yes", "--no"], "--yes and --no"),
        ([], "not a terminal"),
        (["--yes", "--service", "ftp://x"], "--service"),
        (["--yes", "--service", "http://user:pw@x"], "--service"),
        (["--maybe"], "--maybe"),
    ],
)
def test_consent_misused(agent_cli, arguments, words):
    agent_cli("upload", "consent", *arguments).failed(2, words, hint=False)
    assert not config_path().exists()


def test_consent_answers_with_the_status(agent_cli, address):
    status = agent_cli("upload", "consent", "--yes", "--json").json
    assert (list(status), status["consent"]) == (STATUS, True)
    status = agent_cli("upload", "consent", "--no", "--json").json
    assert status["consent"] is False


def test_a_spool_that_is_none_is_left_alone(agent_cli):
    spool_path().parent.mkdir(parents=True)
    spool_path().write_bytes(b"precious" * 1000)
    agent_cli("upload", "status").failed(1, "not a readable spool")
    assert spool_path().read_bytes() == b"precious" * 1000


def test_purge_deletes_what_is_kept_and_only_after_a_yes(agent_cli, filled, service):
    agent_cli("upload", "purge").failed(2, "not a terminal", "--yes")
    assert agent_cli("upload", "status", "--json").json["pending"] == 24
    status = agent_cli("upload", "purge", "--yes", "--json").json
    assert list(status) == STATUS
    assert (status["pending"], status["bytes"]) == (0, 0)
    assert service.requests == []
