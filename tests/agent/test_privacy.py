from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_agent.privacy import MINIMUM_TOKENS, form_groups, merge_sessions
from spark_schemas.histogram import SessionHistogram
from spark_schemas.invariants import check_session
from spark_schemas.live import LiveProfile
from spark_schemas.split import split_of

PARTS = st.lists(
    st.tuples(
        st.integers(0, 30),  # session
        st.integers(0, 12),  # prefill tokens
        st.integers(1, 12),  # decode tokens
        st.sampled_from(["chat", "review"]),
        st.integers(0, 3),  # part of the session
        st.booleans(),  # prefill only
    ),
    max_size=30,
)


def ready_to_send(
    sessions: list[SessionHistogram], minimum_tokens: int = MINIMUM_TOKENS
) -> tuple[list[SessionHistogram], list[SessionHistogram]]:
    groups, held_back = form_groups(sessions, minimum_tokens)
    return [merge_sessions(group) for group in groups], held_back


def totals(sessions: list[SessionHistogram]) -> Counter[tuple[object, ...]]:
    """Every single count, keyed by everything but the session."""
    found: Counter[tuple[object, ...]] = Counter()
    for session in sessions:
        side = (session.workload, session.split)
        for name, phase in (("prefill", session.prefill), ("decode", session.decode)):
            if phase is not None:
                found[(*side, name)] += phase.tokens
                for layer in phase.layers:
                    found[(*side, name, layer.block)] += layer.tokens
                    for expert, count in enumerate(layer.counts):
                        found[(*side, name, layer.block, expert)] += count
        for part in session.reuse or ():
            for distance, count in enumerate(part.distances):
                found[(*side, "reuse", part.block, distance)] += count
    return found


@settings(max_examples=60, deadline=None)
@given(parts=PARTS, minimum=st.integers(0, 60), order=st.randoms(use_true_random=False))
def test_merging_neither_loses_nor_mixes_anything(make_model, make_session, parts, minimum, order):
    model = make_model()
    sessions = [
        make_session(model, seed, prefill + prompt_only, 0 if prompt_only else decode, workload, part)
        for seed, prefill, decode, workload, part, prompt_only in parts
    ]
    to_send, held_back = ready_to_send(sessions, minimum)

    assert totals(to_send + held_back) == totals(sessions)
    for row in to_send:
        check_session(row, model)
        assert row.tokens >= minimum
    assert all(row.tokens < minimum for row in held_back)
    assert all(row in sessions for row in held_back)
    for workload in ("chat", "review"):
        for split in ("calibration", "held_out"):
            rest = [row.tokens for row in held_back if (row.workload, row.split) == (workload, split)]
            assert sum(rest) < max(minimum, 1)
    hashes = {session.session_hash for session in sessions}
    assert all(row.session_hash in hashes for row in to_send)
    # Merging does not depend on the order of the parts.
    alike = [session for session in sessions if (session.workload, session.split) == ("chat", "calibration")]
    if alike:
        merged = merge_sessions(alike)
        order.shuffle(alike)
        assert merge_sessions(alike) == merged
        assert merged.session_hash == min(session.session_hash for session in alike)
        assert split_of(merged.session_hash) == "calibration"


def test_a_large_session_stays_itself(make_model, make_session):
    session = make_session(make_model(), prefill=1990, decode=10)
    assert ready_to_send([session]) == ([session], [])
    assert ready_to_send([session], 2001) == ([], [session])


def test_parts_of_one_session_meet_first(make_model, make_session):
    model = make_model()
    parts = [make_session(model, seed, 5, 5, part=part) for part in (0, 1) for seed in (1, 2, 3, 5)]
    to_send, held_back = ready_to_send(parts, 20)
    assert not held_back
    assert sorted(row.session_hash for row in to_send) == sorted({part.session_hash for part in parts})


def test_parts_that_do_not_belong_together_are_refused(make_model, make_session):
    model = make_model()
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_sessions([])
    with pytest.raises(ValueError, match="share workload and split"):
        merge_sessions([make_session(model, workload="chat"), make_session(model, workload="review")])
    with pytest.raises(ValueError, match="zip"):
        merge_sessions([make_session(model), make_session(make_model(1, n_experts=6), part=1)])
    session = make_session(model)
    assert session.prefill is not None
    shifted = tuple(layer.model_copy(update={"block": layer.block + 1}) for layer in session.prefill.layers)
    other = session.model_copy(update={"prefill": session.prefill.model_copy(update={"layers": shifted})})
    with pytest.raises(ValueError, match=r"same blocks, found \[1, 2\]"):
        merge_sessions([session, other])


PROFILE = LiveProfile(workload="chat", revision="a" * 64, vram_budget_bytes=7)


def test_measurements_of_one_placement_add_up(make_model, make_session, measured):
    model = make_model()
    parts = [measured(make_session(model, 1, part=part), profile=PROFILE) for part in (1, 2, 3)]
    parts.append(make_session(model, 1, decode=0, part=4))
    merged = merge_sessions(parts)
    check_session(merged, model)
    assert merged.live is not None
    assert merged.live.cold_hits == sum(part.live.cold_hits for part in parts[:3])
    assert (merged.live.resident_bytes, merged.live.profile) == (400, PROFILE)
    assert merge_sessions(parts[::-1]) == merged


@pytest.mark.parametrize("other", ["unmeasured", "resident", "unprofiled", "profile"])
def test_measurements_of_several_placements_are_left_out(make_model, make_session, measured, other):
    model = make_model()
    one, two = (make_session(model, 1, part=part) for part in (1, 2))
    second = {
        "unmeasured": two,
        "resident": measured(two, resident_bytes=500, profile=PROFILE),
        "unprofiled": measured(two),
        "profile": measured(two, profile=PROFILE.model_copy(update={"revision": "b" * 64})),
    }[other]
    merged = merge_sessions([measured(one, profile=PROFILE), second])
    assert merged.live is None
    assert merged == merge_sessions([one, two])
