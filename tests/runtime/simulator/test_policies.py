"""Each policy against the plainest cache that does the same, and what holds for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import study_of, trace_of

from spark_runtime.recency import RecencyOrder
from spark_runtime.simulator.cost import Machine, MeasuredRun
from spark_runtime.simulator.histograms import SessionCounts, count_rates, lru_rates
from spark_runtime.simulator.policies import CACHES, POLICIES, Cache, PolicyName, replay
from spark_runtime.simulator.study import PROFILES, Study, TraceTooSmallError, equal_slots
from spark_runtime.simulator.traces import Trace


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trace, list[int], list[Any]]:
    """A trace, slots for each layer, and a profile or none for each session."""
    n_experts = draw(st.integers(2, 9))
    top_k = draw(st.integers(1, min(3, n_experts)))
    lengths = draw(st.lists(st.integers(0, 15), min_size=1, max_size=4))
    trace = trace_of(draw(st.integers(0, 2**32)), lengths, n_experts, top_k)
    slots = [draw(st.integers(min(2 * top_k, n_experts), n_experts)) for _ in trace.ids]
    shares = st.lists(st.integers(0, 5), min_size=n_experts, max_size=n_experts).map(
        lambda row: np.array(row, dtype=float)
    )
    profile = st.none() | st.tuples(shares, shares).map(list)
    return trace, slots, [draw(profile) for _ in lengths]


class PlainCache:
    """One layer's experts in slots, decided one token at a time."""

    def __init__(self, policy: str, slots: int, n_experts: int, profile: np.ndarray | None, pinned: int) -> None:
        order = list(range(n_experts)) if profile is None else np.argsort(-profile, kind="stable").tolist()
        self.policy, self.resident = policy, order[:slots]
        self.pinned = set(order[:pinned])
        self.counts = [0] * n_experts
        self.last = [0] * n_experts
        # LRU starts as if the hottest had been used last.
        self.stack = order[:slots]
        self.clock = 0

    def token(self, ids: list[int]) -> int:
        if self.policy in {"uniform", "static"}:
            return sum(expert not in self.resident for expert in ids)
        if self.policy == "lru_unprotected":
            return sum(self._use_alone(expert) for expert in ids)
        if self.policy == "lru":
            missing = sum(expert not in self.stack for expert in ids)
            self.stack = [*ids, *(expert for expert in self.stack if expert not in ids)][: len(self.stack)]
            return missing
        missing = [expert for expert in ids if expert not in self.resident]
        for expert in missing:
            free = [e for e in self.resident if e not in ids and e not in self.pinned]
            worth = self.counts if self.policy == "lfu" else [0] * len(self.counts)
            leaving = min(free, key=lambda e: (worth[e], self.last[e], e))
            self.resident[self.resident.index(leaving)] = expert
        self.clock += len(ids)
        for rank, expert in enumerate(ids):
            self.counts[expert] += 1
            self.last[expert] = self.clock - rank
        return len(missing)

    def _use_alone(self, expert: int) -> int:
        missing = expert not in self.stack
        self.stack = [expert, *(other for other in self.stack if other != expert)][: len(self.stack)]
        return int(missing)


@pytest.mark.parametrize("policy", ["uniform", "static", "lru_unprotected", "lru", "lfu", "lru_pinned"])
@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_it_is_the_plain_cache(policy: PolicyName, case: tuple[Trace, list[int], list[Any]]) -> None:
    trace, slots, profiles = case
    found = replay(Cache(policy, pinned_share=0.5), trace, slots, profiles).cold
    for session, profile in enumerate(profiles):
        start, end = int(trace.offsets[session]), int(trace.offsets[session + 1])
        for layer, (ids, count) in enumerate(zip(trace.ids, slots, strict=True)):
            n_experts, top_k = trace.n_experts[layer], ids.shape[1]
            movable = count - min(2 * top_k, count) if count < n_experts else 0
            pinned = min(int(0.5 * count), movable) if policy == "lru_pinned" else 0
            known = None if profile is None or policy == "uniform" else profile[layer]
            cache = PlainCache(policy, count, n_experts, known, pinned)
            assert found[start:end, layer].tolist() == [cache.token(row) for row in ids[start:end].tolist()]


@pytest.mark.parametrize("sharing", ["layer", "pool"])
@pytest.mark.parametrize("policy", CACHES)
@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_what_holds_for_every_cache(policy: PolicyName, sharing: Any, case: tuple[Trace, list[int], list[Any]]) -> None:
    trace, slots, profiles = case
    cache = Cache(policy, sharing)
    if policy == "lru_unprotected" and sharing == "pool":
        with pytest.raises(ValueError, match="slots of each layer's own"):
            replay(cache, trace, slots, profiles)
        return
    found = replay(cache, trace, slots, profiles).cold
    top_k = trace.ids[0].shape[1]
    assert found.shape == (trace.n_tokens, 2)
    assert found.max(initial=0) <= top_k
    # Everything that did not start in a slot misses once.
    best = replay(Cache("belady", sharing), trace, slots, profiles).cold
    for session in range(trace.n_sessions):
        part = slice(int(trace.offsets[session]), int(trace.offsets[session + 1]))
        if policy == "belady" or (sharing == "layer" and policy != "lru_unprotected"):
            assert best[part].sum() <= found[part].sum()
        for layer, ids in enumerate(trace.ids):
            distinct = len(np.unique(ids[part]))
            assert found[part, layer].sum() >= (max(0, distinct - slots[layer]) if sharing == "layer" else 0)
    everything = replay(cache, trace, list(trace.n_experts), profiles).cold
    assert not everything.any()


@settings(deadline=None)
@given(case=cases(), batch=st.integers(1, 4))
def test_calls_of_several_tokens_copy_at_most_what_misses(case: tuple[Trace, list[int], list[Any]], batch: int) -> None:
    trace, slots, profiles = case
    calls = trace.calls(batch)
    cache = Cache("scored", "pool")
    replayed = replay(cache, trace, slots, profiles, calls)
    cold, moved = replayed.cold, replayed.loads
    assert (moved.sum(axis=0) <= cold.sum(axis=0)).all()
    if batch == 1:
        assert (moved == cold).all()


@settings(deadline=None)
@given(case=cases())
def test_lru_from_distances_is_the_replayed_one(case: tuple[Trace, list[int], list[Any]]) -> None:
    """Started empty, as an agent counts distances: to the last cold hit, for every number of slots."""
    trace, _, _ = case
    for session in range(trace.n_sessions):
        alone = trace.select([session])
        distances = [
            np.bincount(RecencyOrder(n).observe(ids).ravel(), minlength=n + 1)
            for ids, n in zip(alone.ids, alone.n_experts, strict=True)
        ]
        counted = SessionCounts(alone.counts(0), distances, alone.n_tokens)
        for slots in range(alone.ids[0].shape[1], alone.n_experts[0] + 1):
            cold = sum(empty_lru(ids, slots) for ids in alone.ids)
            rate = lru_rates([counted], [slots] * 2)[0]
            selections = alone.n_tokens * alone.selections_per_token
            assert rate == cold / selections if selections else np.isnan(rate)


def empty_lru(ids: np.ndarray, slots: int) -> int:
    stack: list[int] = []
    cold = 0
    for row in ids.tolist():
        cold += sum(expert not in stack for expert in row)
        stack = [*row, *(expert for expert in stack if expert not in row)][:slots]
    return cold


@settings(deadline=None)
@given(case=cases())
def test_counts_say_what_static_placement_misses(case: tuple[Trace, list[int], list[Any]]) -> None:
    trace, slots, profiles = case
    found = replay(Cache("static"), trace, slots, profiles).cold
    for session, profile in enumerate(profiles):
        part = found[int(trace.offsets[session]) : int(trace.offsets[session + 1])]
        counted = SessionCounts(trace.counts(session), None, len(part))
        rate = count_rates([counted], slots, [profile])[0]
        if len(part):
            assert rate == pytest.approx(part.sum() / (len(part) * trace.selections_per_token))


# ---- studies


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "given"])
def test_judged_sessions_never_calibrate(policy: PolicyName, profile: Any) -> None:
    """Other judges leave the judgement of each session as it is."""
    study = study_of()
    slots = equal_slots(study.trace, 0.5)
    whole = study.judge(Cache(policy), slots, profile, (10,))
    assert (whole.n_sessions, whole.n_tokens) == (3, 120)
    alone = [study_of(judged=workload).judge(Cache(policy), slots, profile) for workload in "abc"]
    if profile != "foreign":  # the others take turns
        assert whole.cold_hit_rate.mean == pytest.approx(np.mean([each.cold_hit_rate.mean for each in alone]))
    inside = [part.cold_hit_rate for part in whole.parts]
    assert (inside[0] or 0) * 10 + (inside[1] or 0) * 30 == pytest.approx(40 * whole.cold_hit_rate.mean)


def test_too_few_sessions_are_said() -> None:
    trace = trace_of(1, [5, 5])
    with pytest.raises(TraceTooSmallError, match="none may calibrate"):
        Study(trace, ["a", "a"], [False, False]).judge(Cache("scored"), [4, 4], "own")
    with pytest.raises(TraceTooSmallError, match="no workload but a"):
        Study(trace, ["a", "a"], [False, True]).judge(Cache("scored"), [4, 4], "foreign")
    with pytest.raises(TraceTooSmallError, match="decoded tokens only"):
        Study(trace, ["a", "a"], [False, True], phase="prefill")
    with pytest.raises(TraceTooSmallError, match="no session with a token of decode"):
        Study(trace_of(1, [0, 0]), ["a", "a"], [False, True])
    with pytest.raises(TraceTooSmallError, match="no held-out session of b"):
        Study(trace, ["b", "a"], [False, True], judged="b")


def test_traces_that_are_none() -> None:
    good: dict[str, Any] = {"ids": (np.array([[0, 1]]),), "n_experts": (4,), "offsets": np.array([0, 1])}
    Trace(**good)
    for changes, reason in (
        ({"ids": (np.array([[0, 4]]),)}, "expert 4"),
        ({"ids": (np.array([[0, -1]]),)}, "expert -1"),
        ({"ids": (np.array([[1, 1]]),)}, "twice"),
        ({"ids": ()}, "0 layers"),
        ({"offsets": np.array([0, 2])}, "over 2 tokens"),
        ({"offsets": np.array([0, 2, 1])}, "do not add up"),
        ({"offsets": np.array([], dtype=np.int64)}, "do not add up"),
        ({"decode": np.array([True, False])}, "2 phases"),
    ):
        with pytest.raises(ValueError, match=reason):
            Trace(**good | changes)
    with pytest.raises(ValueError, match="1 slots, expected at least top_k = 2"):
        replay(Cache("lru"), Trace(**good), [1], [None])


# ---- cost


@given(
    token_s=st.floats(1e-4, 1),
    miss_s=st.floats(0, 1e-2),
    link=st.none() | st.floats(1e9, 1e11),
    missed=st.lists(st.floats(0.1, 50), min_size=1, max_size=4),
)
def test_a_machine_is_found_again_in_its_own_runs(
    token_s: float, miss_s: float, link: Any, missed: list[float]
) -> None:
    machine = Machine(token_s, miss_s, link)
    runs = [MeasuredRun(machine.decode_tok_s(count, 2e6), count) for count in missed]
    found = Machine.fitted(token_s, runs, 2e6, link)
    for count in (0.0, 1.0, 20.0):
        assert found.decode_tok_s(count, 2e6) == pytest.approx(machine.decode_tok_s(count, 2e6), rel=1e-6)


@given(
    token_s=st.floats(1e-4, 1),
    miss_s=st.floats(1e-7, 1e-2),
    layer_s=st.floats(0, 1e-3),
    missed=st.lists(st.floats(0.5, 50), min_size=2, max_size=5, unique_by=lambda count: round(count)),
)
def test_what_a_layer_adds_is_told_from_a_miss(
    token_s: float, miss_s: float, layer_s: float, missed: list[float]
) -> None:
    machine = Machine(token_s, miss_s, 1e10, layer_s, 24)
    runs = [MeasuredRun(machine.decode_tok_s(count, 1e6), count) for count in missed]
    found = Machine.fitted(token_s, runs, 1e6, 1e10, 24)
    for count in (0.0, 1.0, 20.0):
        assert found.decode_tok_s(count, 1e6) == pytest.approx(machine.decode_tok_s(count, 1e6), rel=1e-3)


@given(
    computed_s=st.floats(1e-7, 1e-3),
    absent=st.lists(st.floats(0, 100), min_size=1, max_size=6),
    tokens=st.integers(9, 4096),
)
def test_a_prompt_takes_the_longer_of_computing_and_fetching(
    computed_s: float, absent: list[float], tokens: int
) -> None:
    machine = Machine(1.0, 1e-5, 5e10, prompt_token_s=computed_s)
    seconds = tokens / machine.prefill_tok_s(tokens, absent, 3e6)
    fetched_s = sum(absent) * (1e-5 + 3e6 / 5e10)
    assert seconds >= max(tokens * computed_s, fetched_s) * (1 - 1e-9)
    assert seconds <= (tokens * computed_s + fetched_s) * (1 + 1e-9)
    assert machine.prefill_tok_s(tokens, [0.0] * len(absent), 3e6) == pytest.approx(1 / computed_s)


def test_memory_that_is_not_locked_takes_longer() -> None:
    machine = Machine(1e-3, 1e-5, 5e10, pageable_bytes_per_s=8e9)
    locked, half, none = (machine.decode_tok_s(3, 2e6, share) for share in (0.0, 0.5, 1.0))
    assert locked > half > none
    assert 1 / none == pytest.approx(1e-3 + 3 * (1e-5 + 2e6 / 8e9))
    for figures in (Machine(1e-3, 1e-5), Machine(1e-3, 1e-5, 5e10)):
        with pytest.raises(ValueError, match="not locked"):
            figures.decode_tok_s(3, 2e6, 0.5)
        with pytest.raises(ValueError, match="not known"):
            figures.prefill_tok_s(512, [3.0], 2e6)
    prompts = Machine(1.0, 1e-5, 5e10, pageable_bytes_per_s=8e9, prompt_token_s=1e-9)
    seconds = [512 / prompts.prefill_tok_s(512, [3.0, 4.0], 2e6, share) for share in (0.0, 1.0)]
    assert seconds[1] - seconds[0] == pytest.approx(7 * 2e6 * (1 / 8e9 - 1 / 5e10), rel=1e-3)
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match="expected a share"):
            machine.decode_tok_s(3, 2e6, share)


@given(launch_s=st.floats(0, 1e-3), shares=st.lists(st.floats(0, 1), min_size=1, max_size=5), loads=st.floats(1, 50))
def test_the_time_of_a_miss_comes_back_from_whatever_memory_was_measured(
    launch_s: float, shares: list[float], loads: float
) -> None:
    machine = Machine(1e-3, launch_s, 5e10, pageable_bytes_per_s=8e9)
    runs = [MeasuredRun(machine.decode_tok_s(loads, 2e6, share), loads, share) for share in shares]
    found = Machine.fitted(1e-3, runs, 2e6, 5e10, pageable_bytes_per_s=8e9)
    assert found.miss_s == pytest.approx(launch_s, abs=1e-9)
    for share in (0.0, 1.0):
        assert found.decode_tok_s(loads, 2e6, share) == pytest.approx(machine.decode_tok_s(loads, 2e6, share), rel=1e-5)
    if any(shares):
        with pytest.raises(ValueError, match="not locked"):
            Machine.fitted(1e-3, runs, 2e6, 5e10)


def test_runs_that_missed_alike_do_not_say_what_a_miss_takes() -> None:
    """Noise of a tenth would else become the time of a miss, and fewer experts would seem to cost far more."""
    machine = Machine(1e-3, 1e-6, 1e10, 1e-5, 8)
    noise = (1.0, 0.92, 0.95)
    runs = [
        MeasuredRun(machine.decode_tok_s(loads, 4e4) * factor, loads)
        for loads, factor in zip((9.0, 8.6, 9.4), noise, strict=True)
    ]
    told = Machine.fitted(1e-3, runs, 4e4, 1e10, 8, latency_s=1e-6)
    assert told.miss_s == 1e-6
    for loads in (0.0, 9.0, 25.0):
        assert told.decode_tok_s(loads, 4e4) == pytest.approx(machine.decode_tok_s(loads, 4e4), rel=0.08)
    apart = [*runs, MeasuredRun(machine.decode_tok_s(25.0, 4e4), 25.0)]
    assert Machine.fitted(1e-3, apart, 4e4, 1e10, 8, latency_s=1e-6).miss_s != 1e-6
    faster = [MeasuredRun(2e3, 9.0)]
    assert Machine.fitted(1e-3, faster, 4e4, 1e10, 8, latency_s=1e-6).layer_s == 0.0


def test_an_early_copy_costs_what_a_layer_does_not_hide() -> None:
    """Layers of 100 us, copies of 50 us after a guess of 20: one fits, of two 20 us are waited for, of three 70."""
    machine = Machine(1e-3, 1e-5, 5e10, n_layers=10, guess_s=2e-5)

    def waited_s(*layers: float) -> float:
        return 1 / machine.decode_tok_s(3, 2e6, early_layers=layers) - 1 / machine.decode_tok_s(3, 2e6)

    assert waited_s() == pytest.approx(0, abs=1e-12)
    assert waited_s(4) == pytest.approx(0, abs=1e-12)
    assert waited_s(4, 2) == pytest.approx(2 * 2e-5)
    assert waited_s(1, 2, 0.5) == pytest.approx(2 * 2e-5 + 0.5 * 7e-5)
    slow = Machine(1e-3, 1e-5, 5e10, pageable_bytes_per_s=1e10, n_layers=10)
    locked, other = (1 / slow.decode_tok_s(0, 2e6, share, (1,)) for share in (0.0, 1.0))
    assert other - locked == pytest.approx(1e-5 + 2e-4 - 1e-4)
    guessing = Machine(1e-3, 1e-5, 5e10, n_layers=10, guess_token_s=3e-4)
    assert 1 / guessing.decode_tok_s(0, early_layers=()) == pytest.approx(1.3e-3)
    assert 1 / guessing.decode_tok_s(0) == pytest.approx(1e-3)
    unknown = Machine(1e-3, 1e-5, 5e10)
    assert unknown.decode_tok_s(3, 2e6, early_layers=(0.0,)) == unknown.decode_tok_s(3, 2e6)
    with pytest.raises(ValueError, match="how many layers"):
        unknown.decode_tok_s(3, 2e6, early_layers=(1.0,))


@given(
    guess_us=st.floats(0, 99),
    layers=st.lists(st.floats(0.1, 5), min_size=1, max_size=4),
    host=st.booleans(),
)
def test_what_a_guess_takes_comes_back_from_runs_that_fetched_early(
    guess_us: float, layers: list[float], host: bool
) -> None:
    guess = {"guess_token_s": guess_us * 1e-6} if host else {"guess_s": guess_us * 1e-6}
    machine = Machine(1e-3, 1e-5, 5e10, n_layers=10, **guess)
    runs = [MeasuredRun(machine.decode_tok_s(loads, 2e6), loads) for loads in (3.0, 9.0)]
    runs.append(MeasuredRun(machine.decode_tok_s(2.0, 2e6, early_layers=layers), 2.0, 0.0, tuple(layers)))
    found = Machine.fitted(1e-3, runs, 2e6, 5e10, 10, host_guesses=host)
    for early in ((1.0,), tuple(layers)):
        expected = machine.decode_tok_s(2.0, 2e6, early_layers=early)
        assert found.decode_tok_s(2.0, 2e6, early_layers=early) == pytest.approx(expected, rel=1e-3)
    assert (found.guess_s == 0) if host else (found.guess_token_s == 0)
    assert found.guess_s <= 1e-4


def test_figures_that_no_machine_has() -> None:
    for figures in ((0.0, 0.0, None), (1.0, -1.0, None), (1.0, 0.0, 0.0), (float("nan"), 0.0, None)):
        with pytest.raises(ValueError, match="expected numbers above 0"):
            Machine(*figures)
    with pytest.raises(ValueError, match="nothing says what a copy takes"):
        Machine.fitted(1.0, [MeasuredRun(1.0, 0.0)])
