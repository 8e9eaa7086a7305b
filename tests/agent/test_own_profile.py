from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.own_profile import ALL_SESSIONS, own_frequencies, own_profile
from spark_runtime.calibration.sessions import SessionPart
from spark_schemas.split import split_of

HASHES = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(60)]
CALIBRATION = [one for one in HASHES if split_of(one) == "calibration"]
HELD_OUT = [one for one in HASHES if split_of(one) == "held_out"]
TOKENS = 300


def part(shape, session_hash, favourite, day=0, workload="chat"):
    """A session of which half the selections are of one expert."""
    counts = []
    for layer in shape.layers:
        each, rest = divmod(TOKENS * layer.top_k // 2, layer.n_experts)
        selected = np.full(layer.n_experts, each)
        selected[favourite] += TOKENS * layer.top_k - TOKENS * layer.top_k // 2 + rest
        counts.append(selected)
    reuse = tuple(np.append(selected, 0) for selected in counts)
    return SessionPart(session_hash, workload, session_hash, TOKENS, tuple(counts), reuse, day)


@given(chosen=st.lists(st.sampled_from(HASHES), unique=True, max_size=30), favourite=st.integers(0, 7))
def test_held_out_sessions_never_calibrate(make_model, chosen, favourite):
    shape = make_model(n_experts=8)
    fitting = [part(shape, one, 2) for one in chosen if one in CALIBRATION]
    judging = [part(shape, one, favourite) for one in chosen if one in HELD_OUT]
    found = own_profile(shape, {"chat": fitting + judging}, "chat", 0)
    if not fitting:
        assert found is None
        return
    without = own_profile(shape, {"chat": fitting}, "chat", 0)
    assert found is not None
    assert without is not None
    assert (found.n_calibration, found.n_held_out) == (len(fitting), len(judging))
    for mine, theirs in zip(found.frequency, without.frequency, strict=True):
        assert np.array_equal(mine, theirs)
    expected = found.expectation([4, 4])
    assert (expected is None) == (len(judging) < 3), "nothing is promised without judges"
    assert found.manifest(100, slots=[4, 4]).expected == expected


def test_newer_sessions_count_more(make_model):
    shape = make_model(n_experts=8)
    old, new = part(shape, CALIBRATION[0], 1, day=0), part(shape, CALIBRATION[1], 2, day=28)
    found = own_profile(shape, {"chat": [old, new]}, "chat", 28)
    assert found is not None
    shares = found.frequency[0]
    assert shares[2] - shares.min() == pytest.approx(4 * (shares[1] - shares.min()), rel=0.01), "two half-lives"
    assert own_profile(shape, {"chat": [old]}, "chat", 181) is None, "too old"


def test_all_workloads_together(make_model):
    shape = make_model(n_experts=8)
    parts = {"chat": [part(shape, CALIBRATION[0], 1)], "code": [part(shape, CALIBRATION[1], 2, workload="code")]}
    together = own_profile(shape, parts, None, 0)
    assert together is not None
    assert (together.workload, together.n_calibration, together.suffices) == (ALL_SESSIONS, 2, True)
    assert own_profile(shape, parts, "review", 0) is None


def test_it_is_judged_as_the_service_judges(make_model):
    shape = make_model(n_experts=8)
    parts = {
        "chat": [part(shape, one, 3) for one in CALIBRATION[:6] + HELD_OUT[:4]],
        "code": [part(shape, one, 5, workload="code") for one in CALIBRATION[6:12]],
    }
    found = own_profile(shape, parts, "chat", 0)
    assert found is not None
    profile = found.profile()
    rates = {(point.policy, point.residency): point.cold_hit_rate for point in profile.curves}
    assert rates["own", 0.6] < rates["other", 0.6]
    assert {row.workload for row in profile.mismatch} == {"code"}
    assert profile.verdict is not None
    assert found.manifest(100, vram_bytes=4000).verdict == profile.verdict


@given(sizes=st.lists(st.integers(1, 5), max_size=8), days=st.randoms(use_true_random=False))
def test_frequencies_do_not_depend_on_how_sessions_are_grouped(make_model, sizes, days):
    shape = make_model(n_experts=8)
    parts = [part(shape, one, number % 8, day=days.randrange(30)) for number, one in enumerate(HASHES[: sum(sizes)])]
    ends = np.cumsum(sizes).tolist()
    grouped = own_frequencies(shape, (parts[end - size : end] for size, end in zip(sizes, ends, strict=True)), 30)
    together = own_profile(shape, {"chat": parts}, "chat", 30)
    if together is None or not together.suffices:
        assert grouped is None
        return
    assert grouped is not None
    for mine, theirs in zip(grouped, together.frequency, strict=True):
        assert np.array_equal(mine, theirs)
