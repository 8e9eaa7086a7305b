"""Networks: derivatives against differences, training against what must be learnable, NumPy against PyTorch."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_runtime.predict import mlp_torch
from spark_runtime.predict.losses import LOSSES, LossName, derivative, loss
from spark_runtime.predict.mlp import Network, Training, batches, initial_network, learning_rate, train
from spark_runtime.predict.selections import indicators, recall_at


def selected_of(random: np.random.Generator, n_tokens: int, n_experts: int, top_k: int) -> np.ndarray:
    return indicators(np.argsort(random.random((n_tokens, n_experts)), axis=1)[:, :top_k], n_experts)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 7), st.data())
def test_derivatives_of_losses(name: LossName, seed: int, n_tokens: int, n_experts: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    top_k = data.draw(st.integers(1, n_experts - 1))
    selected = selected_of(random, n_tokens, n_experts, top_k).astype(np.float64)
    scores = random.normal(size=selected.shape) * 2
    found = derivative(name, scores, selected)
    step = 1e-5
    for place in np.ndindex(scores.shape):
        up, down = scores.copy(), scores.copy()
        up[place] += step
        down[place] -= step
        difference = (loss(name, up, selected) - loss(name, down, selected)) / (2 * step)
        assert found[place] == pytest.approx(difference, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_by_their_definitions(name: LossName) -> None:
    random = np.random.default_rng(5)
    selected = selected_of(random, 3, 6, 2)
    scores = random.normal(size=selected.shape).astype(np.float32) * 3
    values = []
    for row, wanted in zip(scores.astype(np.float64), selected, strict=True):
        chance = 1 / (1 + np.exp(-row))
        match name:
            case "bce":
                values.append(-np.mean(np.where(wanted > 0, np.log(chance), np.log(1 - chance))))
            case "listnet":
                values.append(-np.mean(np.log(np.exp(row) / np.exp(row).sum())[wanted > 0]))
            case "ranknet":
                pairs = [(i, j) for i in np.flatnonzero(wanted) for j in np.flatnonzero(wanted == 0)]
                values.append(np.mean([np.log1p(np.exp(row[j] - row[i])) for i, j in pairs]))
    assert loss(name, scores, selected) == pytest.approx(np.mean(values), rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_large_scores_overflow_nothing(name: LossName) -> None:
    selected = selected_of(np.random.default_rng(1), 4, 5, 2)
    for scale in (1e4, -1e4):
        scores = (selected * scale).astype(np.float32)
        assert np.isfinite(loss(name, scores, selected))
        assert np.isfinite(derivative(name, scores, selected)).all()


@pytest.mark.parametrize("name", LOSSES)
def test_where_everything_is_selected_there_is_nothing_to_rank(name: LossName) -> None:
    selected = np.ones((2, 3), np.float32)
    assert np.isfinite(derivative(name, np.zeros((2, 3), np.float32), selected)).all()


def problem(seed: int = 3, n_tokens: int = 1500) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features of very different sizes, and the two experts of nine that a bent function of them ranks highest."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(n_tokens, 6)).astype(np.float32)
    scores = np.tanh(2 * features @ random.normal(size=(6, 12))) @ random.normal(size=(12, 9))
    ids = np.argsort(-scores, axis=1)[:, :2]
    sized = (features * np.logspace(-2, 3, 6) + 7).astype(np.float32)
    return sized, ids, indicators(ids, 9)


TRAINING = Training(width=32, epochs=12, batch=50, rate=1e-2, seed=4)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("width", [4, 0])
def test_derivatives_of_networks(name: LossName, width: int) -> None:
    features, _, selected = problem(n_tokens=8)
    network = initial_network(features, 9, Training(width=width))
    found = network.derivatives(name, features, selected)
    for number, (array, gradient) in enumerate(zip(network.trained, found, strict=True)):
        assert gradient.shape == array.shape
        for place in list(np.ndindex(array.shape))[:: max(1, array.size // 10)]:
            values = []
            for step in (1e-3, -1e-3):
                moved = [one.astype(np.float64) for one in network.trained]
                moved[number][place] += step
                values.append(loss(name, network.with_trained(moved).scores(features), selected))
            assert gradient[place] == pytest.approx((values[0] - values[1]) / 2e-3, rel=2e-3, abs=2e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_what_can_be_learned_is(name: LossName) -> None:
    features, ids, selected = problem()
    start = initial_network(features, 9, TRAINING)
    trained = train(start, name, lambda places: (features[places], selected[places]), 1200, TRAINING)
    judged = slice(1200, None)
    before, after = (recall_at(one.scores(features[judged]), ids[judged], (2,))[0] for one in (start, trained))
    assert after > 0.7 > before
    again = train(start, name, lambda places: (features[places], selected[places]), 1200, TRAINING)
    np.testing.assert_array_equal(trained.weights, again.weights)
    np.testing.assert_array_equal(start.weights, initial_network(features, 9, TRAINING).weights)


def test_every_token_comes_once_an_epoch_and_the_rate_falls_to_nothing() -> None:
    training = Training(epochs=3, batch=7)
    found = list(batches(20, training))
    assert [step for step, _ in found] == list(range(9))
    for epoch in range(3):
        assert sorted(np.concatenate([places for _, places in found[3 * epoch : 3 * epoch + 3]])) == list(range(20))
    rates = [learning_rate(step, 20, training) for step, _ in found]
    assert rates[0] == training.rate
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(training.rate / 9)


def test_a_feature_that_never_changes_does_no_harm() -> None:
    features = np.ones((10, 3), np.float32)
    assert np.isfinite(initial_network(features, 4, TRAINING).scores(features)).all()


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_without_pytorch_it_is_said() -> None:
    assert not mlp_torch.cuda_is_there()
    with pytest.raises(mlp_torch.TorchMissingError, match="not installed"):
        mlp_torch.check_device("cpu")
    features, _, selected = problem(n_tokens=20)
    start = initial_network(features, 9, TRAINING)
    with pytest.raises(mlp_torch.TorchMissingError):
        mlp_torch.train(start, "bce", lambda places: (features[places], selected[places]), 20, TRAINING, "cpu")


@pytest.mark.torch
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("width", [32, 0])
def test_pytorch_trains_the_same_network(name: LossName, device: str, width: int) -> None:
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    features, ids, selected = problem()
    training = replace(TRAINING, width=width)
    start = initial_network(features, 9, training)

    def data(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return features[places], selected[places]

    few = Training(width=width, epochs=1, batch=300, rate=1e-3, seed=4)
    one, other = train(start, name, data, 1200, few), mlp_torch.train(start, name, data, 1200, few, device)
    for mine, theirs in zip(one.trained, other.trained, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=2e-4)
    found = [
        recall_at(network.scores(features[1200:]), ids[1200:], (2,))[0]
        for network in (
            train(start, name, data, 1200, training),
            mlp_torch.train(start, name, data, 1200, training, device),
        )
    ]
    assert found[0] == pytest.approx(found[1], abs=0.03)
    assert isinstance(other, Network)
