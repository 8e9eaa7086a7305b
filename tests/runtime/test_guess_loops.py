"""Guesses over whole rows of experts, of any width: what NumPy adds up and corrects, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_slots import layer_start, pool_of

from spark_runtime.early_fetch import PREDICTED_ONE, EarlyFetch
from spark_runtime.slot_pool import SlotPool

INT16 = np.iinfo(np.int16)
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1024)
"""Experts a layer: around what vectors and blocks of them hold."""
FILLS = ("nothing", "small", "any", "ends", "top", "bottom")


@dataclass(frozen=True)
class Layers:
    n_experts: tuple[int, ...]
    top_k: tuple[int, ...]
    resident: tuple[float, ...]
    """Share of each layer's experts in slots, at least its floor."""

    def pool(self) -> SlotPool:
        shares = zip(self.n_experts, self.top_k, self.resident, strict=True)
        return pool_of(
            *(
                layer_start(n, block=block, top_k=k, slots=max(min(2 * k, n), int(n * share)))
                for block, (n, k, share) in enumerate(shares)
            )
        )


@st.composite
def layers(draw: st.DrawFn) -> Layers:
    sizes = draw(st.lists(st.sampled_from(EDGES) | st.integers(1, 1024), min_size=2, max_size=4))
    top_k = tuple(draw(st.integers(1, min(n, draw(st.sampled_from([4, 16, 100]))))) for n in sizes)
    resident = tuple(draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in sizes)
    return Layers(tuple(sizes), top_k, resident)


class Plain:
    """``native/predictor.h`` in NumPy."""

    def __init__(self, pool: SlotPool, top_k: tuple[int, ...]) -> None:
        self.weights = [pool.guesses(layer).astype(np.int32) for layer in range(pool.n_layers)]
        self.top_k = top_k

    def rows(self, layer: int, ids: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        found, start = [], 0
        for source in range(layer - 1, max(-1, layer - 3), -1):
            found.append(start + ids[source])
            start += self.weights[source].shape[1]
        return np.concatenate([*found, [start]])

    def guess(self, layer: int, ids: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        total: NDArray[np.int64] = self.weights[layer][self.rows(layer, ids)].sum(axis=0, dtype=np.int64)
        return total

    def learn(self, ids: list[NDArray[np.int64]]) -> None:
        for layer in range(1, len(ids)):
            scores = self.guess(layer, ids)
            selected = np.isin(np.arange(len(scores)), ids[layer])
            error = np.where(selected, np.maximum(PREDICTED_ONE - scores, 0), np.minimum(-scores, 0))
            shift = max(6, int(np.ceil(np.log2(2 * (2 * self.top_k[layer] + 1)))))
            step = (error + (1 << (shift - 1))) >> shift
            rows = self.rows(layer, ids)
            self.weights[layer][rows] = np.clip(self.weights[layer][rows] + step, INT16.min, INT16.max)


def filled(fill: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.int16]:
    if fill == "nothing":
        return np.zeros(shape, np.int16)
    if fill in ("top", "bottom"):
        return np.full(shape, INT16.max if fill == "top" else INT16.min, np.int16)
    wild = random.integers(INT16.min, INT16.max, shape, np.int16, endpoint=True)
    if fill == "ends":
        return np.where(wild < 0, np.int16(INT16.min), np.int16(INT16.max))
    return wild // np.int16(300) if fill == "small" else wild


@settings(deadline=None, max_examples=60)
@given(layers(), st.sampled_from(FILLS), st.integers(0, 2**32), st.sampled_from([float("-inf"), 0.0, 0.1, 2.0]))
@example(Layers((128, 130), (70, 1), (1.0, 1.0)), "bottom", 0, 0.0)  # a step of more than 16 bits
@example(Layers((1, 511, 1024), (1, 8, 10), (1.0, 0.0, 0.5)), "any", 1, 0.0)
def test_any_width_is_guessed_and_learned_as_numpy_does(of: Layers, fill: str, seed: int, threshold: float) -> None:
    random = np.random.default_rng(seed)
    pool = of.pool()
    early = EarlyFetch(1, threshold)
    pool.set_early(early)
    for layer in range(pool.n_layers):
        pool.set_guesses(layer, filled(fill, pool.guesses(layer).shape, random))
    plain = Plain(pool, of.top_k)
    for _ in range(3):
        ids = [random.permutation(n)[:k] for n, k in zip(of.n_experts, of.top_k, strict=True)]
        for layer, selected in enumerate(ids):
            pool.ensure(layer, selected[None], "decode")
            if layer + 1 == len(ids):
                pool.fetch_early(layer, selected[None], "decode")
                continue
            missing = pool.experts(layer + 1).slots < 0
            moves = pool.fetch_early(layer, selected[None], "decode")
            scores = np.where(missing, plain.guess(layer + 1, ids), early.threshold_units - 1)
            # The best may stay away for lack of what may leave; nothing else comes instead.
            assert all(move.expert == int(scores.argmax()) for move in moves)
            assert not moves or scores.max() >= early.threshold_units
        pool.learn()
        pool.end_step()
        plain.learn(ids)
    for layer in range(pool.n_layers):
        np.testing.assert_array_equal(pool.guesses(layer), plain.weights[layer])


@pytest.mark.parametrize("n_experts", [24, 64, 512])
def test_the_best_of_the_missing_is_fetched(n_experts: int) -> None:
    """The first of equals, wherever it stands; one that has a slot is no candidate."""
    for wanted in (n_experts // 2, n_experts // 2 + 1, n_experts - 2):
        pool = pool_of(*[layer_start(n_experts, slots=n_experts // 2)] * 2)
        pool.set_early(EarlyFetch(1, 0.3))
        weights = np.zeros(pool.guesses(1).shape, np.int16)
        weights[-1, [0, wanted, n_experts - 1]] = [INT16.max, 9000, 9000]
        pool.set_guesses(1, weights)
        ids = np.array([[0, 1]])
        pool.ensure(0, ids, "decode")
        assert [move.expert for move in pool.fetch_early(0, ids, "decode")] == [wanted]
