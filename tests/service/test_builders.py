from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_runtime.placement import frequencies
from spark_schemas.ids import MAX_COUNT
from spark_service.builders import BuiltProfile, Inputs, build_profile, revision_of
from spark_service.sessions import SessionPart
from spark_service.tally import Window

REVISION = "0" * 64


def build(shape: Any, parts: dict[str, list[SessionPart]]) -> BuiltProfile:
    built = build_profile(shape, "code", "decode", REVISION, Inputs.of_parts(shape, "code", parts))
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
    assert {session_hash for batch in built.held_out() for session_hash in batch.hashes} == held_out
    assert build(shape, {"code": own, "chat": mixed}).profile == built.profile
    without = [part for part in own if part.session_hash not in held_out]
    assert build(shape, {"code": without}).profile.layers == built.profile.layers


def test_no_calibration_no_profile(make: Any) -> None:
    shape = make.shape()
    parts = make.parts(shape, make.sessions(shape, 0, 2))
    for name in ("code", "chat"):
        inputs = Inputs.of_parts(shape, "code", {name: parts})
        assert build_profile(shape, "code", "decode", REVISION, inputs) is None


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
    shape = make.shape()
    a, b, c = make.parts(shape, make.sessions(shape, 3, 0))
    held_out = make.parts(shape, make.sessions(shape, 0, 1))

    def revision(parts: dict[str, list[SessionPart]], workload: str = "code", phase: Any = "decode") -> str:
        return revision_of(shape.fingerprint, workload, phase, Inputs.of_parts(shape, workload, parts))

    first = revision({"code": [a, b], "chat": [c]})
    assert first == revision({"chat": [c, *held_out], "code": [b, a]})
    inputs = Inputs.of_parts(shape, "code", {"code": [a, b], "chat": [c]})
    others = [
        revision({"code": [a, b], "chat": [c]}, "chat"),
        revision({"code": [a, b], "chat": [c]}, phase="prefill"),
        revision_of("mf1-" + "f" * 32, "code", "decode", inputs),
        revision_of(shape.fingerprint, "code", "decode", replace(inputs, window=Window(5, 5))),
        revision({"code": [a, b, c]}),
        revision({"code": [a], "chat": [b, c]}),
        revision({"code": [a, b, *held_out], "chat": [c]}),
    ]
    assert len({first, *others}) == 8


def test_old_sessions_fade_and_leave(make: Any) -> None:
    shape = make.shape()
    old = [replace(part, day=100) for part in make.parts(shape, make.sessions(shape, 3, 2, taste=0))]
    new = [replace(part, day=130) for part in make.parts(shape, make.sessions(shape, 6, 4, taste=4)[3:6])]
    inputs = Inputs.of_parts(shape, "code", {"code": old + new})
    alone = Inputs.of_parts(shape, "code", {"code": new})

    def shares(window: Window, of: Inputs = inputs) -> np.ndarray:
        built = build_profile(shape, "code", "decode", REVISION, replace(of, window=window))
        assert built is not None
        return np.array(built.profile.layers[0].shares)

    only_new = shares(Window(), alone)
    np.testing.assert_array_equal(shares(Window(131, 30)), only_new)
    everything, fading = shares(Window()), shares(Window(131, 0, 10.0))
    assert np.abs(fading - only_new).sum() < np.abs(everything - only_new).sum()
    in_window = build_profile(shape, "code", "decode", REVISION, replace(inputs, window=Window(131, 30)))
    assert in_window is not None
    assert (in_window.profile.n_calibration, in_window.profile.n_held_out) == (3, 0)
    assert not [batch for batch in in_window.held_out() if len(batch)]
