"""``spark simulate`` over traces of any kind, against the native slots and plain counting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_agent.traces import SessionTrace, TraceFolder
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.placement import (
    FloatArray,
    LayerSizes,
    frequencies,
    greedy_slots,
    layer_sizes,
    residency_budget,
    uniform_slots,
)
from spark_runtime.slot_pool import SlotPool
from spark_runtime.tier_start import profile_start, slots_start
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

N_EXPERTS, TOP_K = 12, 2
POLICY = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def shape() -> ModelShape:
    """Three layers whose experts are not of one size, so that frequency per byte is not frequency."""
    demo = read_model_shape(demo_model_path())
    layers = tuple(
        layer.model_copy(update={"n_experts": N_EXPERTS, "top_k": TOP_K, "expert_bytes": size})
        for layer, size in zip(demo.layers, (300, 700, 300), strict=False)
    )
    return demo.model_copy(update={"layers": layers})


class Sessions:
    """Sixteen sessions on both sides of the split, which prefer some experts, each layer in another measure."""

    def __init__(self, seed: int, prompts: Sequence[int], answers: Sequence[int]) -> None:
        self.random = np.random.default_rng(seed)
        self.taste = self.random.gumbel(size=(3, N_EXPERTS)) * np.array([[0.2], [1.0], [3.0]])
        self.all = [
            self._session(number, prompts[number % len(prompts)], answers[number % len(answers)])
            for number in range(16)
        ]

    def _session(self, number: int, prompt: int, answer: int) -> SessionTrace:
        noise = self.random.gumbel(size=(3, prompt + answer, N_EXPERTS))
        ids = list(np.argsort(-(self.taste[:, None] + noise), axis=2)[:, :, :TOP_K])
        return SessionTrace(f"{number:064x}", "code", ids, np.arange(prompt + answer) >= prompt)

    def side(self, side: str) -> list[SessionTrace]:
        return [item for item in self.all if split_of(item.session_hash) == side]

    def profile(self, phase: str) -> list[FloatArray]:
        """Of the calibration sessions' tokens of a phase."""
        counts, tokens = [], []
        for item in self.side("calibration"):
            kept = item.decode == (phase == "decode")
            if kept.any():
                counts.append([np.bincount(ids[kept].ravel(), minlength=N_EXPERTS) for ids in item.ids])
                tokens.append(int(kept.sum()))
        return frequencies(counts, tokens)


@st.composite
def recorded(draw: st.DrawFn) -> Sessions:
    lengths = st.lists(st.integers(1, 25), min_size=1, max_size=5)
    return Sessions(draw(st.integers(0, 2**32)), draw(lengths), draw(lengths))


def simulated(spark_cli: Any, folder: Path, shape: ModelShape, sessions: Sessions, *arguments: Any) -> Any:
    with TraceFolder(folder, shape) as opened:
        for item in sessions.all:
            opened.add(item)
    return spark_cli("simulate", folder, *arguments, "--json").json["rows"]


def missed(shape: ModelShape, sessions: list[SessionTrace], start: Any, phase: str, at_once: int) -> float:
    """Mean over sessions of what finds no slot, each layer with slots of its own."""
    rates = []
    for item in sessions:
        kept = item.decode == (phase == "decode")
        n_tokens = int(kept.sum())
        if not n_tokens:
            continue
        cold = 0
        for number, layer in enumerate(shape.layers):
            one = shape.model_copy(update={"layers": (layer,)})
            pool = SlotPool(start(one, number))
            ids = item.ids[number][kept]
            for first, end in pairwise([*range(0, n_tokens, at_once), n_tokens]):
                pool.step([ids[first:end]], phase)
            cold += int(pool.counts(0, phase).cold)
        rates.append(cold / (n_tokens * TOP_K * len(shape.layers)))
    return float(np.mean(rates))


@POLICY
@given(sessions=recorded(), residency=st.sampled_from([0.3, 0.45, 0.6, 0.8, 1.0]))
def test_placed_slots_are_the_manifests_and_move_as_they_do(
    spark_cli, tmp_path_factory, shape, sessions, residency
) -> None:
    """As many as placement gives each layer by frequency per byte, in the bytes of equal shares; decode, replayed."""
    folder = tmp_path_factory.mktemp("placed")
    arguments = ("--policy", "scored", "--policy", "static", "--sharing", "placed", "--profile", "mixed")
    rows = simulated(spark_cli, folder, shape, sessions, *arguments, "--residency", residency)
    profile, sizes = sessions.profile("decode"), list(layer_sizes(shape))
    budget = residency_budget(sizes, residency)
    slots = greedy_slots(profile, sizes, budget)
    by_policy = {(row["policy"], row["sharing"]): row for row in rows}
    assert set(by_policy) == {("scored", "placed"), ("static", "placed"), ("static", None)}
    for key in (("scored", "placed"), ("static", "placed")):
        assert by_policy[key]["slots"] == sum(slots)
        assert by_policy[key]["slot_bytes"] == sum(n * size.expert_bytes for n, size in zip(slots, sizes, strict=True))
    floor = sum(min(2 * TOP_K, N_EXPERTS) * size.expert_bytes for size in sizes)
    assert by_policy["scored", "placed"]["slot_bytes"] <= max(budget, floor)
    assert by_policy["static", None]["slots"] == sum(uniform_slots(sizes, budget))
    found = missed(
        shape,
        sessions.side("held_out"),
        lambda one, number: profile_start(one, [profile[number]], [slots[number]]),
        "decode",
        1,
    )
    assert by_policy["scored", "placed"]["cold_hit_rate"] == pytest.approx(found)


@POLICY
@given(
    sessions=recorded(),
    residency=st.sampled_from([0.4, 0.6, 1.0]),
    ubatch=st.sampled_from([1, 3, 8, 9, 64]),
)
def test_prompts_are_replayed_as_the_slots_take_them(
    spark_cli, tmp_path_factory, shape, sessions, residency, ubatch
) -> None:
    """In calls of ``--ubatch`` tokens: up to eight move experts, larger ones go around the slots."""
    folder = tmp_path_factory.mktemp("prompts")
    policies = ("--policy", "scored", "--policy", "uniform", "--profile", "none", "--sharing", "layer")
    arguments = (*policies, "--phase", "prefill", "--ubatch", ubatch, "--residency", residency)
    rows = simulated(spark_cli, folder, shape, sessions, *arguments)
    by_policy = {row["policy"]: row for row in rows}
    assert {row["phase"] for row in rows} == {"prefill"}
    sizes: list[LayerSizes] = list(layer_sizes(shape))
    slots = uniform_slots(sizes, residency_budget(sizes, residency))
    judging = sessions.side("held_out")
    found = missed(shape, judging, lambda one, number: slots_start(one, [slots[number]]), "prefill", ubatch)
    assert by_policy["scored"]["cold_hit_rate"] == pytest.approx(found)
    outside = [
        np.mean([(ids[~item.decode] >= n).mean() for ids, n in zip(item.ids, slots, strict=True)]) for item in judging
    ]
    assert by_policy["uniform"]["cold_hit_rate"] == pytest.approx(np.mean(outside))
    assert by_policy["scored"]["loads_per_token"] <= by_policy["scored"]["cold_hits_per_token"]
    if residency == 1.0:
        assert by_policy["scored"]["cold_hit_rate"] == 0.0
