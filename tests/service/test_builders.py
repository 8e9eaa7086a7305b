from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.calibration.sessions import SessionPart, merge_parts
from spark_runtime.calibration.tally import Window
from spark_runtime.placement import cold_hit_rates, frequencies, greedy_slots, hot_set, layer_sizes, residency_budget
from spark_runtime.votes import by_layer
from spark_schemas.ids import MAX_COUNT
from spark_schemas.mix import Mix
from spark_service.builders import BuiltProfile, Inputs, build_profile, revision_of
from spark_service.manifests import Budget, build_manifest

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
    assert {session_hash for batch in built.judges[0].held_out() for session_hash in batch.hashes} == held_out
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
    assert not [batch for batch in in_window.judges[0].held_out() if len(batch)]


def counted(make: Any, shape: Any, number: int, session_hash: str, day: int) -> SessionPart:
    """A part of whole numbers alone, the same on every machine."""
    counts = tuple(
        np.array([(number * 7 + index * 5 + expert * expert * 3) % (11 + expert) for expert in range(layer.n_experts)])
        for index, layer in enumerate(shape.layers)
    )
    reuse = tuple(np.array([*layer, 0])[::-1].copy() for layer in counts)
    return SessionPart(f"{number:064x}", "", session_hash, 40 * number + 1, counts, reuse, day)


@pytest.mark.parametrize(
    ("window", "revision", "profile"),
    [
        (
            Window(),
            "d383bc55febdf422c34caee45269ba606f5ba60660b0d2e73b71b0e2ec0bec1c",
            "b9ba318a69c579f8b928bb2a2830706c547f95d183995d02d3e4060fb5a156a8",
        ),
        (
            Window(103, 3, 2),
            "836cf769bbecbe2b5b76aa43a2f94f4953e039197f89b9548f97982428b2cc7c",
            "1618673f5d072263d5c2d3a8dc7067a2f5587722989f264cd870f143cc5fe9a9",
        ),
    ],
)
@pytest.mark.parametrize("workload", ["code", "code:5"])
def test_a_workloads_profile_keeps_its_bits(
    make: Any, workload: str, window: Window, revision: str, profile: str
) -> None:
    """Those it had before there were mixes: agents that pulled it must not be told that it changed."""
    shape = make.shape()
    parts = {
        name: [
            counted(make, shape, 31 * index + n + (9 if side == "held_out" else 0), make.hash(n, side), 100 + n)
            for side in ("calibration", "held_out")
            for n in range(4)
        ]
        for index, name in enumerate(("chat", "code", "docs"))
    }
    inputs = replace(Inputs.of_parts(shape, workload, parts), window=window)
    name = str(Mix.parse(workload))
    assert revision_of(shape.fingerprint, name, "decode", inputs) == revision
    built = build_profile(shape, name, "decode", revision, inputs)
    assert built is not None
    assert hashlib.sha256(built.profile.model_dump_json().encode()).hexdigest() == profile


@pytest.fixture(scope="module")
def shape(make: Any) -> Any:
    return make.shape()


@pytest.fixture(scope="module")
def tastes(make: Any, shape: Any) -> dict[str, list[SessionPart]]:
    """Three workloads of different tastes and numbers of sessions; the same lineages appear in all of them."""
    sizes = {"chat": (3, 4, 9), "code": (6, 5, 0), "docs": (4, 3, 4)}
    return {
        name: make.parts(shape, make.sessions(shape, calibration, held_out, workload=name, taste=taste, skew=2.0))
        for name, (calibration, held_out, taste) in sizes.items()
    }


def mixed(shape: Any, workload: str, parts: dict[str, list[SessionPart]], window: Window | None = None) -> BuiltProfile:
    name = str(Mix.parse(workload))
    inputs = replace(Inputs.of_parts(shape, workload, parts), window=window or Window())
    built = build_profile(shape, name, "decode", revision_of(shape.fingerprint, name, "decode", inputs), inputs)
    assert built is not None
    return built


def points(built: BuiltProfile, policy: str) -> dict[float, Any]:
    return {point.residency: point for point in built.profile.curves if point.policy == policy}


def test_a_mix_is_the_weighted_mean_of_its_workloads(shape: Any, tastes: dict[str, list[SessionPart]]) -> None:
    mix = mixed(shape, "code:7+chat:3", tastes)
    alone = {name: mixed(shape, name, tastes).profile for name in ("chat", "code")}
    assert mix.profile.workload == "chat:3+code:7"
    for index, layer in enumerate(mix.profile.layers):
        chat, code = (np.array(alone[name].layers[index].shares) for name in ("chat", "code"))
        assert list(layer.shares) == ((3 * chat + 7 * code) / 10).tolist()
        both = [alone[name].layers[index].selections for name in ("chat", "code")]
        assert list(layer.selections) == np.sum(both, axis=0).tolist()
    for name in ("n_calibration", "n_held_out", "tokens_calibration", "tokens_held_out"):
        assert getattr(mix.profile, name) == sum(getattr(one, name) for one in alone.values())
    # The uniform placement and the cache are no matter of frequencies: their rates are means of the workloads' own.
    for policy in ("uniform", "random", "lru"):
        for residency, point in points(mix, policy).items():
            chat, code = (
                next(p.cold_hit_rate for p in alone[name].curves if (p.policy, p.residency) == (policy, residency))
                for name in ("chat", "code")
            )
            assert point.cold_hit_rate == pytest.approx(0.3 * chat + 0.7 * code, abs=1e-11)
            assert point.low <= point.cold_hit_rate <= point.high


def test_each_workload_of_a_mix_is_judged_by_its_own_sessions(shape: Any, tastes: dict[str, list[SessionPart]]) -> None:
    """Averaged first, so that the five sessions of code are not worth more than the four of chat."""
    mix = mixed(shape, "code+chat", tastes)
    sizes = layer_sizes(shape)
    n_experts = [layer.n_experts for layer in sizes]
    shares = [np.array(layer.shares) for layer in mix.profile.layers]
    placed = hot_set(shares, greedy_slots(shares, sizes, residency_budget(sizes, 0.6)))
    means = []
    for name, judges in zip(("chat", "code"), mix.judges, strict=True):
        sessions = merge_parts(tastes[name])
        assert sessions is not None
        held_out = sessions.where(sessions.held_out)
        assert [one for batch in judges.held_out() for one in batch.hashes] == list(held_out.hashes)
        means.append(cold_hit_rates(by_layer(held_out.counts, n_experts), placed).mean())
    own = points(mix, "own")
    assert own[0.6].cold_hit_rate == pytest.approx(np.mean(means), abs=1e-11)
    assert own[0.6].profiles == ("chat", "code")
    manifest = build_manifest(mix.profile, shape, Budget(1200 + 2000, 100), mix.judges)
    placed = [np.array(layer.hot_set) for layer in manifest.layers]
    means = [
        cold_hit_rates(by_layer(np.concatenate([b.counts for b in judges.held_out()]), n_experts), placed).mean()
        for judges in mix.judges
    ]
    assert manifest.expected is not None
    assert manifest.expected.cold_hit_rate == pytest.approx(np.mean(means), abs=1e-15)
    assert (manifest.workload, manifest.n_held_out) == ("chat:1+code:1", 9)


def test_a_mix_is_compared_with_its_workloads_and_with_all_others(
    shape: Any, tastes: dict[str, list[SessionPart]]
) -> None:
    mix = mixed(shape, "code+chat", tastes)
    rows = {row.workload: row.cold_hit_rate for row in mix.profile.mismatch if row.residency == 0.6}
    assert set(rows) == {"chat", "code", "docs"}
    own, other, oracle = (points(mix, policy)[0.6] for policy in ("own", "other", "oracle"))
    assert (other.profiles, other.cold_hit_rate) == (("docs",), rows["docs"])
    # Mixing beats either profile alone on traffic that is half of each.
    assert oracle.cold_hit_rate <= own.cold_hit_rate < min(rows["chat"], rows["code"])
    # A row is the mean of what that profile does on each workload, of which both profiles say their part.
    alone = {name: mixed(shape, name, tastes) for name in ("chat", "code")}
    on_own = points(alone["code"], "own")[0.6].cold_hit_rate
    on_chat = next(
        row.cold_hit_rate for row in alone["chat"].profile.mismatch if (row.workload, row.residency) == ("code", 0.6)
    )
    assert rows["code"] == pytest.approx((on_own + on_chat) / 2, abs=1e-11)
    assert not points(mixed(shape, "code+chat+docs", tastes), "other")


@settings(max_examples=15, deadline=None)
@given(data=st.data(), weights=st.lists(st.integers(1, 300), min_size=3, max_size=3))
def test_the_order_of_spelling_does_not_matter(
    shape: Any, tastes: Any, weights: list[int], data: st.DataObject
) -> None:
    names = ("chat", "code", "docs")
    spelt = [f"{name}:{weight}" for name, weight in zip(names, weights, strict=True)][: data.draw(st.integers(1, 3))]
    other = data.draw(st.permutations(spelt))
    window = data.draw(st.sampled_from([Window(), Window(10, 30, 7)]))
    first, again = (mixed(shape, "+".join(order), tastes, window) for order in (spelt, other))
    assert first.profile.model_dump_json() == again.profile.model_dump_json()
    if len(spelt) == 1:
        assert first.profile == mixed(shape, "chat", tastes, window).profile


def test_no_held_out_session_of_a_mix_calibrates(make: Any, shape: Any, tastes: dict[str, list[SessionPart]]) -> None:
    """Changing what judges any of its workloads, or another one, changes no frequency and no placement."""
    held_out = {make.hash(n, "held_out") for n in range(6)}
    before = mixed(shape, "code:7+chat:3", tastes)
    for name in tastes:
        other = make.parts(shape, make.sessions(shape, 6, 6, workload=name, taste=77))
        by_hash = {part.session_hash: part for part in other}
        changed = [by_hash[part.session_hash] if part.session_hash in held_out else part for part in tastes[name]]
        after = mixed(shape, "code:7+chat:3", {**tastes, name: changed})
        assert after.profile.layers == before.profile.layers
        assert (after.profile.revision == before.profile.revision) == (name == "docs")
        without = [part for part in tastes[name] if part.session_hash not in held_out]
        left = mixed(shape, "code:7+chat:3", {**tastes, name: without}).profile
        assert left.layers == before.profile.layers
    judges = [{name for batch in one.held_out() for name in batch.hashes} for one in before.judges]
    assert all(hashes <= held_out for hashes in judges)
    assert [len(hashes) for hashes in judges] == [4, 5]


def test_a_revision_of_a_mix_names_its_inputs(make: Any, shape: Any, tastes: dict[str, list[SessionPart]]) -> None:
    def revision(workload: str, **changes: Any) -> str:
        return mixed(shape, workload, {**tastes, **changes}).profile.revision

    first = revision("code:7+chat:3")
    assert revision("chat:6+code:14") == first
    fewer = {name: parts[:-1] for name, parts in tastes.items()}
    others = [
        revision("code:7+chat:4"),
        revision("code+chat"),
        revision("code"),
        revision("code:7+docs:3"),
        revision("code:7+chat:3", chat=fewer["chat"]),
        revision("code:7+chat:3", code=fewer["code"]),
        revision("code:7+chat:3", docs=tastes["docs"][1:]),
    ]
    assert len({first, *others}) == 8
    assert revision("code:7+chat:3", docs=fewer["docs"]) == first, "held-out sessions of others are not used"


def test_a_workload_without_judges_leaves_nothing_to_promise(
    make: Any, shape: Any, tastes: dict[str, list[SessionPart]]
) -> None:
    unjudged = make.parts(shape, make.sessions(shape, 3, 0, workload="chat"))
    mix = mixed(shape, "code+chat", {**tastes, "chat": unjudged})
    assert (mix.profile.verdict, mix.profile.curves, mix.profile.mismatch) == (None, (), ())
    assert mix.profile.verdict_reason == "chat: 3 more held-out sessions needed (0 of 3)"
    assert (mix.profile.n_calibration, mix.profile.n_held_out) == (9, 5)
    manifest = build_manifest(mix.profile, shape, Budget(1200 + 2000, 100), mix.judges)
    assert (manifest.expected, manifest.verdict) == (None, None)
    assert manifest.verdict_reason == mix.profile.verdict_reason


def test_too_few_sessions_are_named_by_workload(make: Any, shape: Any, tastes: dict[str, list[SessionPart]]) -> None:
    few = make.parts(shape, make.sessions(shape, 2, 1, workload="chat"))
    mix = mixed(shape, "code+chat", {**tastes, "chat": few}).profile
    assert mix.verdict is None
    assert mix.verdict_reason == (
        "chat: 2 more held-out sessions needed (1 of 3) and chat: 1 more calibration session needed (2 of 3)"
    )
    # One session is no interval, whatever the others are.
    assert all((point.low, point.high) == (0.0, 1.0) for point in mix.curves)
    enough = mixed(shape, "code+chat", tastes).profile
    assert enough.verdict is not None
    assert "on 9 held-out sessions" in enough.verdict_reason


def test_a_mix_needs_calibration_sessions_of_every_workload(make: Any, shape: Any, tastes: Any) -> None:
    for chat in ([], make.parts(shape, make.sessions(shape, 0, 2, workload="chat"))):
        inputs = Inputs.of_parts(shape, "code+chat", {**tastes, "chat": chat})
        assert build_profile(shape, "chat:1+code:1", "decode", REVISION, inputs) is None
