"""What is read fast is what the schemas and the invariants accept, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_schemas.ids import MAX_COUNT
from spark_service.canonical import MAX_HEAD_BYTES, SAFE_COUNT, read_canonical, read_upload
from spark_service.errors import RequestError
from spark_service.ingest import parse_upload
from spark_service.packed import PackedUpload, pack_upload

STEADY = settings(deadline=None, derandomize=True, max_examples=400)


def outcome(read: Callable[[bytes], PackedUpload], raw: bytes) -> object:
    """The packed upload, or all of the error that refuses it."""
    try:
        return read(raw)
    except RequestError as error:
        return error.status, error.code, error.message, error.field, error.found, error.expected


def by_definition(raw: bytes) -> object:
    return outcome(lambda raw: pack_upload(parse_upload(raw)), raw)


def check(raw: bytes) -> bool:
    """Compare both readers; return whether the fast one read it."""
    expected, fast = by_definition(raw), read_canonical(raw)
    assert fast is None or fast == expected
    assert outcome(read_upload, raw) == expected
    return fast is not None


def body_of(make: Any, sessions: int = 2, **how: Any) -> bytes:
    shape = make.shape()
    made: bytes = make.body(shape, make.sessions(shape, sessions, 1, **how))
    return made


@pytest.mark.parametrize("how", [{}, {"prefill": 30}, {"decode": 0, "prefill": 30}, {"workload": "7-eleven-2"}])
@pytest.mark.parametrize("sessions", [0, 1, 3])
def test_canonical_uploads_are_read_fast(make: Any, how: dict[str, Any], sessions: int) -> None:
    assert check(body_of(make, sessions, **how))


def test_the_last_block_may_route_fewer_in_prefill(make: Any) -> None:
    shape = make.shape()
    full, short = make.session(shape, make.hash(0), prefill=30), make.session(shape, make.hash(0), prefill=20)
    data = json.loads(make.body(shape, [full]))
    data["sessions"][0]["prefill"]["layers"][-1] = short.model_dump(mode="json")["prefill"]["layers"][-1]
    assert check(compact(data))
    data["sessions"][0]["prefill"]["layers"][0] = short.model_dump(mode="json")["prefill"]["layers"][0]
    assert not check(compact(data))


def measured(make: Any, **how: Any) -> bytes:
    """Uploads with measurements of each kind, and without, beside each other."""
    shape = make.shape()
    first, second, third = make.sessions(shape, 2, 1, **how)
    sessions = [make.live(shape, first, 0.25), make.live(shape, second, profile=make.profile("7-up")), third]
    raw: bytes = make.body(shape, sessions)
    return raw


@pytest.mark.parametrize("how", [{}, {"prefill": 30}])
def test_measurements_are_read_fast(make: Any, how: dict[str, Any]) -> None:
    raw = measured(make, **how)
    assert raw.startswith(b'{"schema_version":2,')
    assert check(raw)
    upload = read_canonical(raw)
    assert upload is not None
    assert [session.live is None for session in upload.sessions] == [False, False, True]
    plain = read_canonical(make.body(make.shape(), make.sessions(make.shape(), 2, 1, **how)))
    assert plain is not None
    assert [one.content_id for one in plain.sessions] == [one.content_id for one in upload.sessions]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"schema_version":2', '"schema_version":1'),
        ('"schema_version":2', '"schema_version":2.0'),
        ('"schema_version":2,"agent', '"agent'),
        ('"live":{', '"live":null,"live":{'),
        ('"live":{', '"live":{"x":1,'),
        ('"live":{"sel', '"live":{"cold_hits":1,"sel'),
        ('"selections":', '"selections":1'),
        ('"cold_hits":', '"cold_hits":9999'),
        ('"cold_hits":', '"cold_hits":-'),
        ('"cold_hits":', '"cold_hits":0.'),
        ('"cold_hits":', '"cold_hits":0,"cold_hits":'),
        ('"resident_bytes":', '"resident_bytes":9999'),
        ('"resident_bytes":', f'"resident_bytes":{2**64}'),
        ('"profile":null', '"profile":0'),
        ('"profile":null', '"profile":{}'),
        ('"profile":null', '"profile":{"workload":"7-up","revision":"%s","vram_budget_bytes":1}' % ("7a" * 32)),
        (',"profile":null', ""),
        ('"workload":"7-up"', '"workload":"7-uP"'),
        ('"workload":"7-up"', '"workload":null'),
        ('"revision":"7a', '"revision":"7b'),
        ('"revision":"7a', '"revision":"7'),
        ('"vram_budget_bytes":4000', f'"vram_budget_bytes":{MAX_COUNT + 1}'),
        ('"vram_budget_bytes":4000', f'"vram_budget_bytes":{MAX_COUNT}'),
        ('"vram_budget_bytes":4000', '"vram_budget_bytes":null'),
    ],
)
def test_each_other_measurement_is_judged_by_the_definition(make: Any, old: str, new: str) -> None:
    raw = measured(make)
    changed = raw.replace(old.encode(), new.encode(), 1)
    assert changed != raw
    check(changed)


def test_an_absent_measurement_may_be_named(make: Any) -> None:
    shape = make.shape()
    data = json.loads(make.body(shape, make.sessions(shape, 2, 1)))
    for session in data["sessions"]:
        session["live"] = None
    for data["schema_version"] in (1, 2):
        assert not check(compact(data))
        assert isinstance(by_definition(compact(data)), PackedUpload)


def test_nothing_is_measured_without_decode(make: Any) -> None:
    shape = make.shape()
    data = json.loads(make.body(shape, [make.session(shape, make.hash(0), decode=0, prefill=30)]))
    data["schema_version"] = 2
    data["sessions"][0]["live"] = {"selections": 1, "cold_hits": 0, "resident_bytes": 1, "profile": None}
    assert not check(compact(data))


@STEADY
@given(data=st.data())
def test_any_damage_to_a_measurement_is_judged_by_the_definition(make: Any, data: st.DataObject) -> None:
    shape = make.shape([(3, 1, 10), (2, 1, 10)])
    first, second = (make.session(shape, make.hash(number), decode=12) for number in range(2))
    raw = bytearray(make.body(shape, [make.live(shape, first), make.live(shape, second, profile=make.profile())]))
    alphabet = b'0123456789,:[]{}"-.eEtn \\\x00'
    start = raw.index(b'"live"') if data.draw(st.booleans()) else raw.rindex(b'"live"')
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(start, min(start + 220, len(raw) - 1)))
        raw[at : at + data.draw(st.integers(0, 2))] = bytes(data.draw(st.lists(st.sampled_from(alphabet), max_size=2)))
    check(bytes(raw))


def compact(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda raw: raw.replace(b":", b": "),
        lambda raw: raw + b"\n",
        lambda raw: json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode(),
        lambda raw: raw.replace(b'"workload":"code"', b'"workload":"c\\u006fde"'),
        lambda raw: raw.replace(b'"workload":"code"', b'"workload":"x","workload":"code"'),
        lambda raw: raw.replace(b'"prefill":null,', b""),
        lambda raw: raw.replace(b'"schema_version":1,"agent', b'"agent', 1),
        lambda raw: raw.replace(b'{"schema_version"', b'{"sessions":[],"schema_version"', 1),
        lambda raw: raw.replace(b'"agent_version":"0.1.0"', b'"agent_version":"\\"sessions\\":["'),
        lambda raw: raw.replace(b'"name":"Toy MoE"', b'"name":"' + b"x" * 200 + b'"' + b" " * MAX_HEAD_BYTES),
        lambda raw: raw.replace(b'"block":1,', b'"block":-0,').replace(b'"block":2,', b'"block":1,'),
    ],
)
def test_other_spellings_mean_the_same(make: Any, rewrite: Callable[[bytes], bytes]) -> None:
    raw = body_of(make)
    assert rewrite(raw) != raw
    check(rewrite(raw))


_SESSION = '{"session_hash"'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"tokens":300', '"tokens":300.0'),
        ('"tokens":300', '"tokens":3e2'),
        ('"tokens":300', '"tokens":0300'),
        ('"tokens":300', '"tokens":true'),
        ('"tokens":300', '"tokens":"300"'),
        ('"tokens":300', '"tokens":NaN'),
        ('"tokens":300', '"tokens":-300'),
        ('"tokens":300', f'"tokens":{"9" * 5000}'),
        ('"tokens":300', f'"tokens":{2**64}'),
        ('"tokens":300', f'"tokens":{MAX_COUNT + 1}'),
        ('"tokens":300', '"tokens":301'),
        ('"tokens":300', '"tok1ens":300'),
        ('"tokens":300', '"tok,ens":300'),
        ('"counts":[', '"counts":[0,'),
        ('"counts":[', '"counts":[[],'),
        ('"counts":[', f'"counts":[{2**64},'),
        ('"distances":[', '"distances":[1,'),
        ('"block":1', '"block":4'),
        ('"split":"calibration"', '"split":"held_out"'),
        ('"split":', '"spl1it":'),
        ('"split":"calibration"', '"split":"calib,ration"'),
        ('"workload":"code"', '"workload":"code\\n"'),
        ('"workload":"code"', '"workload":"-code"'),
        ('"workload":"code"', '"workload":null'),
        ('"fused_gate_up":false', '"fused_gate_up":0'),
        ('"core_bytes":1000', f'"core_bytes":{MAX_COUNT}'),
        ('"sessions":[', '"sessions":[],"sessions":['),
        ('"sessions":[', '"sessions":[1,'),
        (_SESSION, f"{_SESSION}:1,{_SESSION[1:]}"),
        (_SESSION, f"[{_SESSION}"),
        ("]}]}", "]}]}]"),
        ("]}]}", "]},]}"),
        ("]}]}", ']}],"extra":1}'),
    ],
)
def test_each_fault_is_refused_in_the_words_of_the_definition(make: Any, old: str, new: str) -> None:
    raw = body_of(make)
    changed = raw.replace(old.encode(), new.encode(), 1)
    assert changed != raw
    check(changed)


def test_counts_beyond_what_is_safe_take_the_long_way(make: Any) -> None:
    shape = make.shape([(2, 2, 1)])
    data = json.loads(make.body(shape, [make.session(shape, make.hash(0), decode=10)]))
    for tokens, fast in ((SAFE_COUNT, True), (SAFE_COUNT + 1, False), (MAX_COUNT, False)):
        decode = data["sessions"][0]["decode"]
        decode["tokens"] = decode["layers"][0]["tokens"] = tokens
        decode["layers"][0]["counts"] = [tokens, tokens]
        data["sessions"][0]["reuse"][0]["distances"] = [tokens - 2, tokens, 2]
        raw = compact(data)
        assert read_upload(raw) == by_definition(raw)
        assert check(raw) is fast


@STEADY
@given(data=st.data())
def test_any_damage_is_judged_by_the_definition(make: Any, data: st.DataObject) -> None:
    shape = make.shape([(3, 1, 10), (2, 1, 10)])
    sessions = [make.session(shape, make.hash(number), decode=12, prefill=5 * number) for number in range(2)]
    raw = bytearray(make.body(shape, sessions))
    alphabet = b'0123456789,:[]{}"-.eEtn \\\x00'
    # After the model: its description is read by the definition itself.
    first = raw.index(b'"sessions"')
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(first, len(raw) - 1))
        size = data.draw(st.integers(0, 2))
        raw[at : at + size] = bytes(data.draw(st.lists(st.sampled_from(alphabet), max_size=2)))
    check(bytes(raw))


@pytest.mark.parametrize("name", ["session_hash", "split", "workload", "prefill", "decode", "reuse", "block", "counts"])
def test_digits_inside_names_are_judged_by_the_definition(make: Any, name: str) -> None:
    shape = make.shape([(3, 1, 10), (2, 1, 10)])
    raw = make.body(shape, [make.session(shape, make.hash(0), decode=12, prefill=5)])
    at = raw.index(f'"{name}"'.encode(), raw.index(b'"sessions"')) + 3
    check(raw[:at] + b"1" + raw[at:])


@STEADY
@given(data=st.data())
def test_any_other_numbers_are_judged_by_the_definition(make: Any, data: st.DataObject) -> None:
    shape = make.shape([(3, 1, 10), (2, 1, 10)])
    upload = json.loads(make.body(shape, [make.session(shape, make.hash(0), decode=12, prefill=5)]))
    session = upload["sessions"][0]
    layers = [*session["prefill"]["layers"], *session["decode"]["layers"], *session["reuse"]]
    for _ in range(data.draw(st.integers(1, 2))):
        layer = data.draw(st.sampled_from(layers))
        name = data.draw(st.sampled_from([name for name in layer if name != "block"]))
        if name == "tokens":
            layer[name] = data.draw(st.integers(0, 13))
        else:
            # Moved from one entry to another: the sum stays, so that later checks are reached.
            one, other = (data.draw(st.integers(0, len(layer[name]) - 1)) for _ in range(2))
            moved = data.draw(st.integers(0, layer[name][one]))
            layer[name][one] -= moved
            layer[name][other] += moved
    check(compact(upload))
