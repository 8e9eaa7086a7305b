from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from spark_runtime.placement import frequencies
from spark_schemas.ids import MAX_COUNT
from spark_service.builders import BuiltProfile, build_profile, revision_of
from spark_service.sessions import SessionPart

REVISION = "0" * 64


def build(shape: Any, parts: dict[str, list[SessionPart]]) -> BuiltProfile:
    built = build_profile(shape, "code", "decode", REVISION, parts)
    assert built is not None
    return built


def test_a_profile_is_the_mean_of_calibration_shares(make: Any) -> None:
    shape = make.shape()
    sessions = make.sessions(shape, 3, 2)
    profile = build(shape, {"code": make.parts(shape, sessions)}).profile
    calibration = sorted((s for s in sessions if s.split == "calibration"), key=lambda s: s.session_hash)
    counts = [[np.array(layer.counts) for layer in s.decode.layers] for s in calibration if s.decode]
    expected = frequencies(counts, [300] * 3)
    assert [layer.block for layer in profile.layers] == [1, 2, 3]
    for index, layer in enumerate(profile.layers):
        assert list(layer.shares) == expected[index].tolist()
        assert list(layer.selections) == np.sum([session[index] for session in counts], axis=0).tolist()
        assert sum(layer.shares) == pytest.approx(1)
    assert (profile.n_calibration, profile.n_held_out) == (3, 2)
    assert (profile.tokens_calibration, profile.tokens_held_out) == (900, 600)


def test_the_order_of_parts_changes_no_bit(make: Any) -> None:
    shape = make.shape()
    parts = make.parts(shape, make.sessions(shape, 3, 1) + make.sessions(shape, 1, 1, decode=55))
    chat = make.parts(shape, make.sessions(shape, 2, 1, workload="chat", taste=3))
    first = build(shape, {"code": parts, "chat": chat}).profile.model_dump_json()
    for order in itertools.islice(itertools.permutations(parts), 0, 720, 173):
        again = build(shape, {"chat": chat[::-1], "code": list(order)}).profile.model_dump_json()
        assert again == first


def test_held_out_sessions_never_calibrate(make: Any) -> None:
    """Neither this workload's nor another's: changing them changes no frequency and no other profile's placement."""
    shape = make.shape()
    own = make.parts(shape, make.sessions(shape, 3, 3))
    chat = make.parts(shape, make.sessions(shape, 3, 3, workload="chat", taste=5))
    held_out = {make.hash(n, "held_out") for n in range(3)}
    changed = make.parts(shape, make.sessions(shape, 3, 3, workload="chat", taste=9))
    mixed = [b if b.session_hash in held_out else a for a, b in zip(chat, changed, strict=True)]
    built = build(shape, {"code": own, "chat": chat})
    assert {session.session_hash for session in built.held_out} == held_out
    assert build(shape, {"code": own, "chat": mixed}).profile == built.profile
    without = [part for part in own if part.session_hash not in held_out]
    assert build(shape, {"code": without}).profile.layers == built.profile.layers


def test_no_calibration_no_profile(make: Any) -> None:
    shape = make.shape()
    parts = make.parts(shape, make.sessions(shape, 0, 2))
    assert build_profile(shape, "code", "decode", REVISION, {"code": parts}) is None
    assert build_profile(shape, "code", "decode", REVISION, {"chat": parts}) is None


def test_workloads_without_calibration_are_no_other(make: Any) -> None:
    shape = make.shape()
    chat = make.parts(shape, make.sessions(shape, 0, 2, workload="chat"))
    profile = build(shape, {"code": make.parts(shape, make.sessions(shape, 2, 1)), "chat": chat}).profile
    assert "other" not in {point.policy for point in profile.curves}


def test_huge_counts_stay_sayable(make: Any) -> None:
    shape = make.shape([(2, 1, 1)])
    parts = [
        SessionPart(str(n), "code", make.hash(n), MAX_COUNT, (np.array([MAX_COUNT, 0]),), (np.array([0, 0, 1]),))
        for n in range(3)
    ]
    profile = build(shape, {"code": parts}).profile
    assert profile.tokens_calibration == MAX_COUNT
    assert profile.layers[0].selections == (MAX_COUNT, 0)


def test_a_revision_names_its_inputs(make: Any) -> None:
    ids = {"code": ["a", "b"], "chat": ["c"]}
    revision = revision_of(make.fingerprint, "code", "decode", ids)
    assert revision == revision_of(make.fingerprint, "code", "decode", {"chat": ["c"], "code": ["b", "a"]})
    others = [
        revision_of(make.fingerprint, "chat", "decode", ids),
        revision_of(make.fingerprint, "code", "prefill", ids),
        revision_of("mf1-" + "f" * 32, "code", "decode", ids),
        revision_of(make.fingerprint, "code", "decode", {"code": ["a", "b", "c"]}),
        revision_of(make.fingerprint, "code", "decode", {"code": ["a"], "chat": ["b", "c"]}),
    ]
    assert len({revision, *others}) == 6
