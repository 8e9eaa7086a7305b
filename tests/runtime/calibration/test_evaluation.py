from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_runtime.calibration.evaluation import RESIDENCIES, Evaluation, Plan, Stratum, uniform_slots_for
from spark_runtime.calibration.sessions import Rows, SessionPart, Sessions, merge_parts, merge_rows
from spark_runtime.calibration.tally import tally_of
from spark_runtime.calibration.trials import Trials, first_experts, joined
from spark_runtime.placement import (
    LayerSizes,
    cold_hit_rates,
    frequencies,
    residency_budget,
    uniform_slots,
)
from spark_runtime.recency import RecencyOrder
from spark_schemas.profile import CurvePoint

SIZES = (LayerSizes(12, 2, 100), LayerSizes(16, 2, 100), LayerSizes(8, 1, 50))


def session(name: str, tokens: int, counts: Any, reuse: Any) -> SessionPart:
    return SessionPart(name, "code", name.rjust(64, "0"), tokens, tuple(counts), tuple(reuse))


def evaluate(
    layers: Any, own: Any, others: Any, judges: list[SessionPart] | Sessions | None, n_calibration: int
) -> Evaluation:
    sessions = merge_parts(judges) if isinstance(judges, list) else judges
    sizes = [layer.n_experts for layer in layers]
    if sessions is None or not len(sessions):
        return Plan.of(layers, {"code": own}, own, others, own).evaluate([Stratum("code", 1, n_calibration, 0, None)])
    # Judged one by one, in reverse.
    oracle = frequencies_without_prior(sizes, sessions)
    plan = Plan.of(layers, {"code": own}, own, others, oracle)
    singly = [sessions.where(np.arange(len(sessions)) == index) for index in range(len(sessions))]
    rates = joined([plan.trials.judge(one) for one in singly[::-1]])
    return plan.evaluate([Stratum("code", 1, n_calibration, len(sessions), rates)])


def frequencies_without_prior(sizes: list[int], sessions: Sessions) -> Any:
    # Every session judges, whatever its side.
    tally = tally_of(sizes, sessions)
    shares = [np.zeros(size) for size in sizes]
    for side in ("calibration", "held_out"):
        votes = tally.votes(side)  # type: ignore[arg-type]
        for layer, mean in zip(shares, votes.mean_shares(), strict=True):
            layer += mean * votes.n_sessions / len(sessions)
    return shares


def of_sessions(sessions: Sessions | None) -> Any:
    assert sessions is not None
    return tally_of([layer.n_experts for layer in SIZES], sessions).votes("calibration").frequencies()


def evaluated(make: Any, *, phase: str = "decode", other_taste: int | None = None, **how: Any) -> Evaluation:
    shape = make.shape()
    sessions = merge_parts(make.parts(shape, make.sessions(shape, **how), phase))
    assert sessions is not None
    others = {}
    if other_taste is not None:
        others["chat"] = of_sessions(merge_parts(make.parts(shape, make.sessions(shape, 3, 0, taste=other_taste))))
    held_out = sessions.held_out
    n_calibration = int((~held_out).sum())
    return evaluate(SIZES, of_sessions(sessions), others, sessions.where(held_out), n_calibration)


def curve(evaluation: Evaluation, policy: str) -> dict[float, CurvePoint]:
    return {point.residency: point for point in evaluation.curves if point.policy == policy}


def test_every_policy_at_every_residency(make: Any) -> None:
    evaluation = evaluated(make, other_taste=7)
    for policy in ("uniform", "random", "own", "other", "oracle", "lru"):
        points = curve(evaluation, policy)
        assert tuple(points) == RESIDENCIES == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
        rates = [point.cold_hit_rate for point in points.values()]
        assert all(point.low <= point.cold_hit_rate <= point.high for point in points.values())
        if policy != "random":
            assert rates == sorted(rates, reverse=True)
        assert (rates[-1] == 0) == (policy != "lru")


def test_better_knowledge_places_better(make: Any) -> None:
    evaluation = evaluated(make, other_taste=7)
    oracle, own, other = (curve(evaluation, policy) for policy in ("oracle", "own", "other"))
    for residency in RESIDENCIES:
        assert oracle[residency].cold_hit_rate <= own[residency].cold_hit_rate + 1e-12
    assert own[0.6].cold_hit_rate < other[0.6].cold_hit_rate
    assert own[0.6].profiles == ("code",)
    assert other[0.6].profiles == ("chat",)
    assert oracle[0.6].profiles == ()


def test_no_other_workload_no_other_curve(make: Any) -> None:
    assert not curve(evaluated(make), "other")


def test_prefill_has_no_cache_to_compare(make: Any) -> None:
    evaluation = evaluated(make, phase="prefill", prefill=200)
    assert not curve(evaluation, "lru")
    assert evaluation.verdict is None
    assert "without reuse distances" in evaluation.verdict_reason


def test_lru_is_counted_from_distances() -> None:
    layers = (LayerSizes(4, 1, 10),)
    # Six selections: distances 0, 1, 1, 3, and two first uses (entry 4).
    judge = session("a", 6, [np.array([2, 2, 1, 1])], [np.array([1, 2, 0, 1, 2])])
    evaluation = evaluate(layers, [np.full(4, 0.25)], {}, [judge], 1)
    lru = curve(evaluation, "lru")
    # The floor is 2 slots; at 0.8 the budget of 32 bytes holds 3.
    assert [lru[r].cold_hit_rate for r in (0.1, 0.5, 0.8, 1.0)] == [0.5, 0.5, 0.5, round(2 / 6, 12)]
    assert (lru[0.5].low, lru[0.5].high) == (0.0, 1.0)


def test_without_held_out_sessions_nothing_is_claimed(make: Any) -> None:
    evaluation = evaluated(make, held_out=0)
    assert evaluation.curves == ()
    assert evaluation.verdict is None
    assert evaluation.verdict_reason == "3 more held-out sessions needed (0 of 3)"


@pytest.mark.parametrize(
    ("calibration", "held_out", "reason"),
    [
        (3, 2, "1 more held-out session needed (2 of 3)"),
        (1, 3, "2 more calibration sessions needed (1 of 3)"),
        (2, 1, "2 more held-out sessions needed (1 of 3) and 1 more calibration session needed (2 of 3)"),
    ],
)
def test_too_few_sessions_support_no_verdict(make: Any, calibration: int, held_out: int, reason: str) -> None:
    evaluation = evaluated(make, calibration=calibration, held_out=held_out)
    assert (evaluation.verdict, evaluation.verdict_reason) == (None, reason)


def test_profile_where_traffic_is_skewed_and_independent(make: Any) -> None:
    """Independent draws are the best case of a static placement: recency says nothing that frequency does not."""
    evaluation = evaluated(make, skew=2.0)
    assert evaluation.verdict == "profile"
    own = curve(evaluation, "own")[0.6]
    assert f"misses {own.cold_hit_rate:.1%}" in evaluation.verdict_reason
    assert "on 4 held-out sessions" in evaluation.verdict_reason


def drawn(seed: int, n_experts: int = 16, top_k: int = 2) -> tuple[np.ndarray, Sessions]:
    """A trace, and its counts as a session."""
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(n_experts)[:top_k] for _ in range(30)])
    distances = RecencyOrder(n_experts).observe(ids)
    counts, reuse = (np.bincount(x.ravel(), minlength=n) for x, n in ((ids, n_experts), (distances, n_experts + 1)))
    return ids, merge_rows(Rows(["a"], ["a" * 64], np.array([0]), np.array([30]), counts[None], reuse[None]))


@pytest.mark.parametrize("seed", range(5))
def test_a_filled_cache_is_never_better_than_counted_at_its_best(seed: int) -> None:
    from spark_runtime.simulate import lru_cold_hits

    slots = 7
    ids, sessions = drawn(seed)
    [filled] = lru_cold_hits(ids, 16, [slots], np.arange(16))
    trials = Trials.of([LayerSizes(16, 2, 1)], [], [[slots]], [first_experts([slots])])
    rates = trials.judge(sessions)
    assert rates.lru is not None
    # What is further away than its slots, or was never there.
    assert sessions.reuse is not None
    assert rates.lru[0, 0] == sessions.reuse[0, slots:].sum() / ids.size
    assert rates.lru[0, 0] - rates.spared[0, 0] <= filled / ids.size <= rates.lru[0, 0]


def test_a_placement_misses_what_it_leaves_out() -> None:
    _, sessions = drawn(0)
    placements = [[np.array([1, 4, 6])], [np.arange(16)], [np.arange(0)]]
    rates = Trials.of([LayerSizes(16, 2, 1)], placements, [], []).judge(sessions)
    assert rates.static[0].tolist() == [cold_hit_rates([sessions.counts], placements[0])[0], 0, 1]


def test_a_rate_of_some_sessions_is_no_rate() -> None:
    _, with_distances = drawn(0)
    without = Sessions(
        ("b" * 64,), (1,), *(getattr(with_distances, name) for name in ("days", "tokens", "counts")), None
    )
    trials = Trials.of([LayerSizes(16, 2, 1)], [[np.arange(3)]], [[3]], [])
    both = joined([trials.judge(without), trials.judge(with_distances)])
    assert both.hashes == ("a" * 64, "b" * 64)
    assert both.static.shape == (2, 1)
    assert both.lru is None


def test_every_other_workload_is_a_row_of_the_mismatch_matrix(make: Any) -> None:
    shape = make.shape()
    sessions = merge_parts(make.parts(shape, make.sessions(shape)))
    assert sessions is not None
    others = {
        f"taste-{taste}": of_sessions(merge_parts(make.parts(shape, make.sessions(shape, 3, 0, taste=taste))))
        for taste in (0, 5)
    }
    evaluation = evaluate(SIZES, of_sessions(sessions), others, sessions.where(sessions.held_out), 4)
    assert [(row.workload, row.residency) for row in evaluation.mismatch] == [
        (name, residency) for residency in RESIDENCIES for name in sorted(others)
    ]
    at = {(row.workload, row.residency): row.cold_hit_rate for row in evaluation.mismatch}
    assert at["taste-0", 0.6] < at["taste-5", 0.6]
    mean = (at["taste-0", 0.6] + at["taste-5", 0.6]) / 2
    assert curve(evaluation, "other")[0.6].cold_hit_rate == pytest.approx(mean)


def walking(seed: int) -> SessionPart:
    """Each session stays with a random third of the experts: frequency says nothing across sessions, recency all."""
    rng = np.random.default_rng(seed)
    counts, reuse = [], []
    for layer in SIZES:
        favourites = rng.permutation(layer.n_experts)[: layer.top_k + 1]
        ids = np.array([rng.permutation(favourites)[: layer.top_k] for _ in range(300)])
        counts.append(np.bincount(ids.ravel(), minlength=layer.n_experts))
        distances = RecencyOrder(layer.n_experts).observe(ids)
        reuse.append(np.bincount(distances.ravel(), minlength=layer.n_experts + 1))
    return session(f"{seed:064x}", 300, counts, reuse)


def test_cache_only_where_sessions_have_nothing_in_common(make: Any) -> None:
    calibration, held_out = [walking(n) for n in range(8)], [walking(n) for n in range(100, 108)]
    own = frequencies([s.counts for s in calibration], [s.tokens for s in calibration])
    evaluation = evaluate(SIZES, own, {}, held_out, 8)
    assert evaluation.verdict == "cache_only"
    assert "depends on order" in evaluation.verdict_reason


def test_no_gain_where_everything_fits_anyway(make: Any) -> None:
    """A floor of 2 * top_k that holds every expert: all placements are one."""
    layers = (LayerSizes(4, 2, 10),)
    judges = [session(str(n), 50, [np.array([40, 30, 20, 10])], [np.array([50, 46, 0, 0, 4])]) for n in range(4)]
    evaluation = evaluate(layers, frequencies([s.counts for s in judges], [50] * 4), {}, judges, 4)
    assert evaluation.verdict == "no_gain"


def test_beating_only_the_empty_cache_is_no_gain(make: Any) -> None:
    """Short flat sessions: any static placement beats a cache that starts empty, so a profile has earned nothing."""
    # Equal layers, so that not even knowing their sizes helps.
    shape, sizes = make.shape([(16, 2, 100)] * 3), [LayerSizes(16, 2, 100)] * 3
    sessions = merge_parts(make.parts(shape, make.sessions(shape, 8, 8, skew=0.0, decode=40)))
    assert sessions is not None
    own = tally_of([16] * 3, sessions).votes("calibration").frequencies()
    evaluation = evaluate(sizes, own, {}, sessions.where(sessions.held_out), 8)
    at_own, at_uniform, at_lru = (curve(evaluation, policy)[0.6] for policy in ("own", "uniform", "lru"))
    assert max(at_own.high, at_uniform.high) < at_lru.low
    assert evaluation.verdict == "no_gain"


def test_remembered_slots_are_the_slots() -> None:
    for residency in RESIDENCIES:
        budget = residency_budget(SIZES, residency)
        assert list(uniform_slots_for(SIZES, budget)) == uniform_slots(SIZES, budget)
