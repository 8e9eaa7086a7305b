"""Every predictor by name, learned and judged: against plain definitions, and for any trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.predict.features import blocks, feature_matrix, normalised
from spark_runtime.predict.fitted import FittedLayer, fit, fitted_shapes
from spark_runtime.predict.judging import mean_recall, session_recalls
from spark_runtime.predict.kinds import COUNTED, FEATURES, PredictorKind, default_kinds, parse_kind
from spark_runtime.predict.losses import LOSSES
from spark_runtime.predict.mlp import Training
from spark_runtime.predict.selections import recall_at
from spark_runtime.predict.study import Sessions, judge, learn
from spark_runtime.simulator.traces import Trace

N_EXPERTS = (10, 8, 12)
WIDTH = 5
TRAINING = Training(width=7, epochs=2, batch=64)


def sessions(seed: int, lengths: tuple[int, ...] = (40, 0, 60)) -> Sessions:
    """What a layer selects follows from its router's input, which is the layer's input with a little more."""
    random = np.random.default_rng(seed)
    gates = [np.random.default_rng(9 + layer).normal(size=(WIDTH, n)) for layer, n in enumerate(N_EXPERTS)]
    n_tokens = sum(lengths)
    inputs = [random.normal(size=(n_tokens, WIDTH)) for _ in N_EXPERTS]
    routers = [rows + 0.5 * random.normal(size=rows.shape) for rows in inputs]
    routers = [rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True)) for rows in routers]
    ids = [np.argsort(-(rows @ gate), axis=1)[:, :3] for rows, gate in zip(routers, gates, strict=True)]
    trace = Trace(tuple(ids), N_EXPERTS, np.cumsum([0, *lengths]).astype(np.int64))
    hidden = {"input": [20 * rows for rows in inputs], "router": routers}
    return Sessions(trace, lambda kind, layer: hidden[kind][layer].astype(np.float16))


def learned(names: tuple[str, ...], given: Sessions) -> dict[PredictorKind, list[FittedLayer]]:
    kinds = [kind for name in names for kind in parse_kind(name)]
    fitted: dict[PredictorKind, list[FittedLayer]] = {kind: [] for kind in kinds}
    for _, kind, one in learn(kinds, given, TRAINING):
        fitted[kind].append(one)
    return fitted


def test_all_predictors_learn_and_say_as_much_as_they_see():
    fitted = learned(("frequency", "temporal", "ridge:hidden", "ridge:router"), sessions(1, (800, 0, 700)))
    steps: list[float] = []
    found = {one.kind.name: one for one in judge(fitted, sessions(2, (300, 200)), steps.append)}
    assert len(steps) == 4 * len(N_EXPERTS)
    recall = {name: one.recall.of(3).mean for name, one in found.items()}
    assert recall["frequency"] < 0.5 < recall["ridge:hidden"] < recall["ridge:router"]
    assert recall["temporal"] < 0.5
    for one in found.values():
        assert list(one.recall.counts) == [3, 6, 8, 9, 16, 24]
        assert one.recall.of(16).mean == one.recall.of(24).mean == 1
        values = [interval.mean for interval in one.recall.at]
        assert values == sorted(values)
        assert all(interval.low <= interval.mean <= interval.high for interval in one.recall.at)
        assert len(one.layers) == 3
        assert one.recall.of(3).mean == pytest.approx(np.mean(one.layers[1:]))
        assert one.first_layer.of(3).mean == pytest.approx(one.layers[0])
        assert one.cost_s > 0


def test_learning_and_judging_is_deterministic():
    results = [judge(learned(("mlp:hidden+average",), sessions(1)), sessions(2)) for _ in range(2)]
    assert [one.recall for one in results[0]] == [one.recall for one in results[1]]


# The last three read nothing at all in the first layer.
ALONE = [
    *default_kinds(("input", "router"), LOSSES),
    *(kind for name in ("linear:layers2", "mlp:layers1", "ridge:layers2") for kind in parse_kind(name, ("ranknet",))),
]


@pytest.mark.parametrize("kind", dict.fromkeys(ALONE), ids=lambda kind: f"{kind.name} {kind.loss}")
def test_a_token_alone_is_scored_as_among_others(kind: PredictorKind) -> None:
    given = sessions(3)
    for layer in range(len(N_EXPERTS)):
        inputs = given.inputs(layer, ["input", "router"])
        prior = np.linspace(0.01, 0.02, N_EXPERTS[layer]).astype(np.float32)
        one = fit(kind, inputs, prior, TRAINING)
        width = None if kind.hidden is None else WIDTH
        shapes = fitted_shapes(kind, layer, N_EXPERTS, TRAINING.width, width)
        assert {name: array.shape for name, array in one.arrays.items()} == shapes
        assert all(array.dtype == np.float32 for array in one.arrays.values())
        scores = one.scores(inputs)
        assert scores.shape == (given.trace.n_tokens, N_EXPERTS[layer])
        if kind.learner in {"frequency", "temporal", "moving-average"}:
            continue
        for token in (0, 1, 57):
            hidden = inputs.hidden_of(kind)
            alone = one._of_token(
                inputs,
                [given.trace.ids[place][token] for place in range(max(0, layer - kind.n_earlier), layer)],
                inputs.average()[token] if "average" in kind.features else None,
                None if hidden is None else hidden[token : token + 1],
                given.trace.ids[layer][token],
            )
            np.testing.assert_allclose(alone, scores[token], rtol=1e-3, atol=1e-4)


def test_nothing_to_learn_from():
    empty = sessions(1, (0,))
    with pytest.raises(ValueError, match="no tokens"):
        fit(parse_kind("frequency")[0], empty.inputs(0, []), np.ones(10, np.float32))
    with pytest.raises(ValueError, match="no input hidden states"):
        Sessions(sessions(1).trace).inputs(0, ["input"])
    with pytest.raises(ValueError, match="at least one session"):
        judge(learned(("frequency",), sessions(1)), empty)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_recall_by_session(seed: int, lengths: list[int]) -> None:
    random = np.random.default_rng(seed)
    n_tokens, counts = sum(lengths), (2, 4, 8, 20)
    ids = np.argsort(random.random((n_tokens, 8)), axis=1)[:, :2]
    trace = Trace((ids,), (8,), np.cumsum([0, *lengths]).astype(np.int64))
    scores = random.integers(0, 4, (n_tokens, 8)).astype(np.float32)
    found = session_recalls(trace, 0, scores, counts)
    for row, start, end in zip(found, trace.offsets, trace.offsets[1:], strict=False):
        if start == end:
            assert np.isnan(row).all()
        else:
            expected = recall_at(scores[start:end], ids[start:end], (2, 4, 8))
            np.testing.assert_allclose(row, [*expected, 1.0])
    if n_tokens:
        assert mean_recall([found, found], counts).of(20).mean == 1


@settings(max_examples=60)
@given(st.sampled_from(["ridge", "linear", "mlp"]), st.sets(st.sampled_from(FEATURES)), st.randoms())
def test_names_of_predictors(learner: str, features: set[str], random) -> None:
    shuffled = random.sample(sorted(features), len(features))
    name = f"{learner}:{'+'.join(shuffled)}"
    allowed = features and not {"layers1", "layers2"} <= features and not {"hidden", "router"} <= features
    if not allowed:
        with pytest.raises(ValueError, match="reads"):
            parse_kind(name)
        return
    kinds = parse_kind(name)
    assert len(kinds) == (1 if learner == "ridge" else 3)
    for kind in kinds:
        assert set(kind.features) == features
        assert kind in parse_kind(kind.name)


@pytest.mark.parametrize(
    "name", ["", "gate", "ridge", "ridge:", "ridge:words", "mlp", "temporal:hidden", "ridge+hidden"]
)
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(ValueError, match="predictor"):
        parse_kind(name)


def test_what_a_trace_allows():
    assert {kind.hidden for kind in default_kinds((), LOSSES)} == {None}
    assert {kind.hidden for kind in default_kinds(("input",), ("bce",))} == {None, "input"}
    names = [kind.name for kind in default_kinds(("input", "router"), ("bce",))]
    assert len(names) == len(set(names))
    assert set(COUNTED) < set(names)


def test_features_come_in_their_order():
    given = sessions(1)
    average = np.full((100, 12), 0.5, np.float32)
    hidden = given.hidden("input", 2)
    rows = slice(3, 9)
    found = feature_matrix(given.trace, 2, rows, 2, constant=True, average=average, hidden=hidden)
    assert found.shape == (6, 10 + 8 + 1 + 12 + WIDTH)
    for token in range(6):
        assert set(np.flatnonzero(found[token, :10])) == set(given.trace.ids[0][3 + token])
        assert set(np.flatnonzero(found[token, 10:18])) == set(given.trace.ids[1][3 + token])
    assert (found[:, 18] == 1).all()
    assert (found[:, 19:31] == 0.5).all()
    np.testing.assert_allclose(np.mean(found[:, 31:] ** 2, axis=1), 1, rtol=1e-3)
    assert feature_matrix(given.trace, 0, rows, 2).shape == (6, 0)
    assert np.isfinite(normalised(np.zeros((2, 3), np.float16))).all()
    assert [(part.start, part.stop) for part in blocks(8193)] == [(0, 8192), (8192, 8193)]
