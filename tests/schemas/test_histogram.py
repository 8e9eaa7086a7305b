"""Histograms: closed, strict, and true."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from spark_schemas.histogram import HistogramUpload, SessionHistogram
from spark_schemas.invariants import InvariantError, check_session, check_upload
from spark_schemas.live import LiveMisses
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

Change = Callable[[dict[str, Any]], object]


def changed(upload: HistogramUpload, change: Change) -> HistogramUpload:
    body = json.loads(upload.model_dump_json())
    change(body)
    return HistogramUpload.model_validate_json(json.dumps(body))


def test_a_true_upload_passes_and_survives_json(upload: HistogramUpload) -> None:
    check_upload(upload)
    assert HistogramUpload.model_validate_json(upload.model_dump_json()) == upload
    assert upload.sessions[0].tokens == 7


def _session(body: dict[str, Any]) -> dict[str, Any]:
    return body["sessions"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(schema_version=3),
        lambda body: body.update(host="laptop"),
        lambda body: _session(body).update(text="hello"),
        lambda body: _session(body).update(session_hash="A" * 64),
        lambda body: _session(body).update(workload="../etc"),
        lambda body: _session(body)["decode"].update(tokens="2"),
        lambda body: _session(body)["decode"].update(tokens=2.0),
        lambda body: _session(body)["decode"].update(tokens=True),
        lambda body: _session(body)["decode"].update(tokens=-1),
        lambda body: _session(body)["decode"]["layers"][0].update(counts=[2, 1, 1, -1]),
        lambda body: _session(body)["decode"]["layers"][0].update(counts=[2, 1, 1, float("nan")]),
        lambda body: _session(body)["decode"]["layers"][0].update(counts=[2**53 + 1, 1, 1, 0]),
        lambda body: body["model"].update(fingerprint="mf1-xyz"),
        lambda body: body["model"]["layers"][0].update(top_k=5),
        lambda body: body["model"]["layers"].reverse(),
        lambda body: body["model"].update(n_blocks=2),
        lambda body: body.update(sessions=[]),
        lambda body: body.update(sessions=body["sessions"] * 257),
    ],
)
def test_the_schema_refuses(upload: HistogramUpload, change: Change) -> None:
    with pytest.raises(ValidationError):
        changed(upload, change)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("sessions[0].split", lambda s: s.update(split={"calibration": "held_out"}.get(s["split"], "calibration"))),
        ("sessions[0]", lambda s: s.update(prefill=None, decode=None, reuse=None)),
        ("sessions[0].prefill.layers", lambda s: s["prefill"]["layers"].pop()),
        ("sessions[0].prefill.layers", lambda s: s["prefill"]["layers"].reverse()),
        ("sessions[0].prefill.tokens", lambda s: s["prefill"].update(tokens=0)),
        ("sessions[0].prefill.layers[0].tokens", lambda s: s["prefill"]["layers"][0].update(tokens=4)),
        ("sessions[0].prefill.layers[1].tokens", lambda s: s["prefill"]["layers"][1].update(tokens=6)),
        ("sessions[0].decode.layers[1].tokens", lambda s: s["decode"]["layers"][1].update(tokens=1)),
        ("sessions[0].decode.layers[0].counts", lambda s: s["decode"]["layers"][0].update(counts=[2, 2])),
        ("sessions[0].decode.layers[0].counts", lambda s: s["decode"]["layers"][0].update(counts=[2, 1, 0, 0])),
        ("sessions[0].decode.layers[0].counts[0]", lambda s: s["decode"]["layers"][0].update(counts=[4, 0, 0, 0])),
        ("sessions[0].reuse", lambda s: s.update(reuse=None)),
        ("sessions[0].reuse", lambda s: s.update(decode=None)),
        ("sessions[0].reuse", lambda s: s["reuse"].pop()),
        ("sessions[0].reuse[0].distances", lambda s: s["reuse"][0].update(distances=[1, 0, 0, 3])),
        ("sessions[0].reuse[0].distances", lambda s: s["reuse"][0].update(distances=[1, 0, 0, 0, 4])),
        ("sessions[0].reuse[0].distances[-1]", lambda s: s["reuse"][0].update(distances=[2, 0, 0, 0, 2])),
    ],
)
def test_an_untrue_histogram_is_named(upload: HistogramUpload, field: str, change: Change) -> None:
    with pytest.raises(InvariantError) as caught:
        check_upload(changed(upload, lambda body: change(_session(body))))
    assert caught.value.field == field
    assert caught.value.found
    assert caught.value.expected


def test_the_last_block_may_route_fewer_tokens_in_prefill_only(model: ModelShape, session: SessionHistogram) -> None:
    check_session(session, model)
    deeper = model.model_copy(update={"n_blocks": 4})
    with pytest.raises(InvariantError, match=r"prefill.layers\[1\].tokens"):
        check_session(session, deeper)


def test_what_was_measured_is_no_part_of_the_content(session: SessionHistogram, measured: LiveMisses) -> None:
    with_it = session.model_copy(update={"live": measured})
    assert with_it.content_id("mf1-x") == session.content_id("mf1-x")
    assert SessionHistogram.model_validate_json(with_it.model_dump_json()) == with_it
    assert '"live"' not in session.model_dump_json()


def test_an_upload_has_the_lowest_version_that_holds_it(
    model: ModelShape, session: SessionHistogram, measured: LiveMisses
) -> None:
    plain = HistogramUpload.of("0.1.0", model, [session])
    assert plain == HistogramUpload(agent_version="0.1.0", model=model, sessions=(session,))
    assert plain.schema_version == 1
    mixed = HistogramUpload.of("0.1.0", model, [session, session.model_copy(update={"live": measured})])
    assert mixed.schema_version == 2
    check_upload(mixed)
    check_upload(plain.model_copy(update={"schema_version": 2}))
    with pytest.raises(InvariantError, match=r"sessions\[1\].live: found present in schema_version 1"):
        check_upload(mixed.model_copy(update={"schema_version": 1}))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("selections", {"selections": 7}),
        ("cold_hits", {"cold_hits": 9}),
        ("resident_bytes", {"resident_bytes": 801}),
    ],
)
def test_an_untrue_measurement_is_named(
    model: ModelShape, session: SessionHistogram, measured: LiveMisses, field: str, change: dict[str, int]
) -> None:
    check_session(session.model_copy(update={"live": measured}), model)
    wrong = session.model_copy(update={"live": measured.model_copy(update=change)})
    with pytest.raises(InvariantError) as caught:
        check_session(wrong, model)
    assert caught.value.field == f"session.live.{field}"


def test_nothing_is_measured_without_decode(model: ModelShape, session: SessionHistogram, measured: LiveMisses) -> None:
    prefill = session.model_copy(update={"decode": None, "reuse": None, "live": measured})
    with pytest.raises(InvariantError, match=r"session.live: found present, expected absent without decode"):
        check_session(prefill, model)


@pytest.mark.parametrize(
    "change",
    [
        {"selections": 0},
        {"selections": 2**53 + 1},
        {"cold_hits": -1},
        {"resident_bytes": 0},
        {"host": "laptop"},
        {"profile": {"workload": "../etc", "revision": "0" * 64, "vram_budget_bytes": 1}},
        {"profile": {"workload": "chat", "revision": "0" * 63, "vram_budget_bytes": 1}},
        {"profile": {"workload": "chat", "revision": "0" * 64}},
    ],
)
def test_the_schema_refuses_a_measurement(measured: LiveMisses, change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LiveMisses.model_validate_json(json.dumps(measured.model_dump() | change))


def test_content_id_is_of_the_counts_and_the_model(session: SessionHistogram) -> None:
    again = SessionHistogram.model_validate_json(session.model_dump_json())
    other = session.model_copy(update={"workload": "chat"})
    assert session.content_id("mf1-x") == again.content_id("mf1-x")
    assert session.content_id("mf1-x") != session.content_id("mf1-y")
    assert session.content_id("mf1-x") != other.content_id("mf1-x")
    assert split_of(session.session_hash) == session.split
