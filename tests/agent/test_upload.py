from __future__ import annotations

import dataclasses
import datetime as dt
import sqlite3
from collections.abc import Iterator

import pytest
import stamina

from spark_agent.batch import LONGEST_WAIT_S
from spark_agent.config import Consent
from spark_agent.env import Environment
from spark_agent.errors import RefusedError
from spark_agent.http import ServiceClient
from spark_agent.spool import Spool
from spark_agent.upload import RetryPolicy, flush, preview, require_permission

NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def no_pauses() -> Iterator[None]:
    with stamina.set_testing(True, attempts=3, cap=True):
        yield


@pytest.fixture
def client(service) -> Iterator[ServiceClient]:
    with ServiceClient(service.url, timeout_s=5) as opened:
        yield opened


@pytest.fixture
def consent(service) -> Consent:
    return Consent(True, dt.datetime(2026, 11, 29, tzinfo=dt.UTC), service.url)


@pytest.fixture
def send(spool: Spool, client, consent):
    def call(**options):
        options = {"environment": Environment(), "minimum_tokens": 0, "now": NOW, **options}
        return flush(spool, client, consent, **options)

    return call


@pytest.fixture
def fill(spool: Spool, make_model, make_session):
    def call(*seeds: int, model_seed: int = 0, **options):
        model = make_model(model_seed)
        for seed in seeds:
            assert spool.add(model, make_session(model, seed, **options))

    return call


def test_everything_arrives_once(spool, service, send, fill):
    fill(*range(5))
    fill(*range(5), model_seed=1)
    report = send()
    assert dataclasses.astuple(report) == (10, 0, 0, 0, 0, None, 2)
    assert len(service.stored) == 10
    assert len(service.requests) == 2
    assert spool.stats().pending == 0
    assert send().uploaded == 0
    assert len(service.requests) == 2


def test_the_preview_is_what_is_sent(spool, service, send, fill):
    fill(*range(30), prefill=3, decode=3)
    fill(*range(3), model_seed=1)
    shown = list(preview(spool, minimum_tokens=20, now=NOW))
    assert shown == list(preview(spool, minimum_tokens=20, now=NOW))
    report = send(minimum_tokens=20)
    assert service.uploads == shown
    assert report.held_back == report.pending
    assert len(shown) == 2


def test_too_few_tokens_stay_here(spool, service, send, fill):
    fill(1, 2)
    report = send(minimum_tokens=2000)
    assert (report.uploaded, report.pending, report.held_back) == (0, 2, 2)
    assert service.requests == []
    assert list(preview(spool)) == []


def test_a_lost_answer_counts_nothing_twice(spool, service, send, fill, make_reply, make_model, make_session):
    fill(*range(20), prefill=3, decode=3)
    # The service commits, its answer is lost, every time: for the agent the upload failed.
    service.script = [make_reply(None, after=True)] * 3
    report = send(minimum_tokens=20)
    assert report.uploaded == 0
    assert "no answer" in report.last_error
    stored = dict(service.stored)
    assert stored
    # More sessions come before the next attempt; they must not mix with what was sent.
    fill(*range(20, 40), prefill=3, decode=3)
    report = send(minimum_tokens=20, ignore_waits=True)
    assert report.duplicates == len(stored)
    assert report.uploaded > 0
    assert stored.items() <= service.stored.items()
    assert len(service.stored) == len(stored) + report.uploaded
    rows = spool.pending()
    tokens = sum(session.tokens for session in service.stored.values()) + sum(row.tokens for row in rows)
    assert tokens == 40 * 6


def test_a_crash_before_marking_counts_nothing_twice(spool, service, client, consent, send, fill, monkeypatch):
    fill(*range(20), prefill=3, decode=3)

    def crash(self: Spool, ids: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "mark_uploaded", crash)
        with pytest.raises(KeyboardInterrupt):
            send(minimum_tokens=20)
    stored = dict(service.stored)
    fill(*range(20, 24), prefill=3, decode=3)
    with Spool.open(spool.path) as again:
        report = flush(again, client, consent, environment=Environment(), minimum_tokens=20, now=NOW)
    assert report.duplicates == len(stored)
    assert stored.items() <= service.stored.items()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_passing_trouble_is_tried_again(service, send, fill, make_problem, status):
    fill(1)
    service.script = [make_problem(status, "Busy", {"Retry-After": "3"}), make_problem(status, "Busy")]
    assert send().uploaded == 1
    assert len(service.requests) == 3
    assert len({request.headers["idempotency-key"] for request in service.requests}) == 1
    assert len(set(service.uploads)) == 1


def test_a_closed_connection_is_tried_again(service, send, fill, make_reply):
    fill(1)
    service.script = [make_reply(None)]
    assert dataclasses.astuple(send()) == (1, 0, 0, 0, 0, None, 1), "one batch, however often"


def test_attempts_are_bounded_and_the_rows_wait_longer_each_time(spool, service, send, fill, make_problem):
    fill(1)
    waits = []
    for _ in range(3):
        service.script = [make_problem(503, "Busy")] * 3
        report = send(ignore_waits=True)
        assert (report.uploaded, report.pending, report.rejected) == (0, 1, 0)
        assert "503: Busy" in report.last_error
        [row] = spool.pending()
        waits.append(row.next_try - NOW)
    # Drawn out by chance, so that a team's machines do not come back all at once.
    assert all(low <= wait <= 1.25 * low for wait, low in zip(waits, (30, 60, 120), strict=True))
    assert len(service.requests) == 9
    assert send().uploaded == 0
    assert list(preview(spool, minimum_tokens=0, now=NOW)) == []
    assert len(service.requests) == 9
    assert send(now=NOW + 150).uploaded == 1


def test_a_long_retry_after_is_left_for_later_and_capped(spool, service, send, fill, make_problem):
    fill(1)
    service.script = [make_problem(429, "Slow down", {"Retry-After": "600"})]
    send()
    [row] = spool.pending()
    assert 600 <= row.next_try - NOW <= 750
    service.script = [make_problem(429, "Slow down", {"Retry-After": "1000000"})]
    send(ignore_waits=True)
    [row] = spool.pending()
    assert 3600 <= row.next_try - NOW <= LONGEST_WAIT_S
    assert len(service.requests) == 2


@pytest.mark.parametrize("years", [-20, -1, 1, 20])
def test_a_clock_that_jumps_makes_nothing_wait_for_years(spool, service, send, fill, make_problem, years):
    fill(1)
    service.script = [make_problem(503, "Busy")] * 3
    send()
    jumped = NOW + years * 365 * 86_400
    assert send(now=jumped).uploaded == 1


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_a_refusal_in_nobodys_words_puts_nothing_aside(spool, service, send, fill, make_reply, status):
    """A proxy, or a captive portal, on the way."""
    fill(1, 2, 3)
    service.refuse = lambda upload: make_reply(status, b"<h1>No</h1>", {"Content-Type": "text/html"})
    report = send()
    assert (report.uploaded, report.rejected, report.pending) == (0, 0, 3)
    service.refuse = lambda upload: None
    assert send(ignore_waits=True).uploaded == 3


def test_one_bad_histogram_does_not_take_others_with_it(
    spool, service, send, fill, make_problem, make_session, make_model
):
    fill(*range(9))
    bad = make_session(make_model(), 4).session_hash

    def refuse(upload):
        return make_problem(422, "Untrue") if bad in {session.session_hash for session in upload.sessions} else None

    service.refuse = refuse
    report = send()
    assert (report.uploaded, report.pending, report.rejected) == (8, 0, 1)
    assert "422: Untrue" in report.last_error
    [row] = spool.rejected()
    assert "422: Untrue" in row.reason
    sent = len(service.requests)
    assert send().rejected == 0
    assert len(service.requests) == sent


def measured_rows(spool: Spool, make_model, make_session, measured, *seeds: int) -> None:
    for seed in seeds:
        assert spool.add(make_model(), measured(make_session(make_model(), seed)))


def test_measurements_are_shown_and_sent(spool, service, send, make_model, make_session, measured):
    measured_rows(spool, make_model, make_session, measured, 1, 2)
    shown = list(preview(spool, minimum_tokens=0))
    assert send().uploaded == 2
    assert service.uploads == shown
    assert shown[0].startswith(b'{"schema_version":2,')
    assert {session.live.resident_bytes for session in service.stored.values()} == {400}


def test_an_older_service_gets_the_counts_alone(
    spool, service, send, fill, make_model, make_session, measured, make_problem
):
    """Once it has said that it does not know the version; what was counted is the same histogram either way."""
    measured_rows(spool, make_model, make_session, measured, 1, 2)
    fill(3)
    fill(4, model_seed=1)
    measured_rows_of_other = measured(make_session(make_model(2), 5))
    assert spool.add(make_model(2), measured_rows_of_other)

    def refuse(upload):
        if upload.schema_version == 1:
            return None
        return make_problem(422, "Unprocessable", field="schema_version")

    service.refuse = refuse
    report = send()
    assert (report.uploaded, report.rejected, report.pending, report.last_error) == (5, 0, 0, None)
    assert all(session.live is None for session in service.stored.values())
    assert sum(b'"schema_version":2,"agent' in body for body in service.uploads) == 1, "asked once"
    service.refuse = lambda upload: None
    for seed in (1, 2):
        assert not spool.add(make_model(), measured(make_session(make_model(), seed)))
        assert not spool.add(make_model(), make_session(make_model(), seed))


def test_another_refusal_is_not_taken_for_an_older_service(
    spool, service, send, make_model, make_session, measured, make_problem
):
    measured_rows(spool, make_model, make_session, measured, 1)
    service.refuse = lambda upload: make_problem(422, "Untrue", field="sessions[0].live.selections")
    report = send()
    assert (report.uploaded, report.rejected) == (0, 1)


def test_a_service_that_refuses_everything_is_not_believed(spool, service, send, fill, make_problem):
    fill(*range(40))
    service.refuse = lambda upload: make_problem(422, "Unknown schema version")
    report = send()
    assert (report.rejected, report.pending) == (8, 32)
    assert spool.stats().rejected == 8
    assert len(service.requests) < 40


@pytest.mark.parametrize("status", [401, 403, 404, 415, 500])
def test_trouble_that_is_not_the_datas_rejects_nothing(spool, service, send, fill, make_problem, status):
    fill(1, 2)
    fill(1, model_seed=1)
    service.script = [make_problem(status, "No", hint="get a token")]
    report = send()
    assert (report.uploaded, report.pending, report.rejected) == (0, 3, 0)
    # It would fail the same way for the second request.
    assert len(service.requests) == 1
    assert spool.stats().last_error == report.last_error
    assert f"{status}: No" in report.last_error


def test_a_receipt_that_does_not_add_up_is_not_believed(spool, service, send, fill, make_reply):
    fill(1, 2)
    service.script = [make_reply(202, b'{"accepted": 1, "duplicates": 0}')]
    report = send()
    assert (report.uploaded, report.pending) == (0, 2)
    assert "accounts for 1 histograms, expected the 2" in report.last_error


def test_rows_that_cannot_be_read_are_put_aside(spool, service, send, fill):
    fill(1, 2)
    connection = sqlite3.connect(spool.path)
    with connection:
        connection.execute("UPDATE sessions SET body = 'nonsense' WHERE id = 1")
    connection.close()
    report = send()
    assert (report.uploaded, report.pending, report.rejected) == (1, 0, 1)
    assert "cannot be read" in spool.rejected()[0].reason


def test_pauses_follow_the_policy(service, client, consent, spool, fill, make_problem):
    fill(1)
    service.script = [make_problem(503, "Busy", {"Retry-After": "0"})] * 3
    with stamina.set_testing(False):
        report = flush(
            spool, client, consent, environment=Environment(), minimum_tokens=0, retry=RetryPolicy(attempts=2)
        )
    assert "503" in (report.last_error or "")
    assert len(service.requests) == 2


@pytest.mark.parametrize(
    ("environment", "change", "paused", "expected"),
    [
        (Environment(offline=True), {}, False, "SPARKMOE_OFFLINE"),
        (Environment(do_not_track=True), {}, False, "DO_NOT_TRACK"),
        (Environment(), None, False, "nobody has consented"),
        (Environment(), {"granted": False}, False, "consent was refused on 2026-11-29"),
        (Environment(), {"service_url": "https://other.example"}, False, "given for https://other.example only"),
        (Environment(), {}, True, "paused"),
    ],
)
def test_without_permission_nothing_is_even_connected(
    spool, service, client, consent, fill, environment, change, paused, expected
):
    fill(1)
    answer = None if change is None else dataclasses.replace(consent, **change)
    with pytest.raises(RefusedError, match=expected) as caught:
        flush(spool, client, answer, environment=environment, paused=paused, minimum_tokens=0)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert service.requests == []
    assert [row.parcel for row in spool.pending()] == [None]


def test_permission_is_given_for_one_service(consent):
    require_permission(Environment(), consent, consent.service_url)
