from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from spark_runtime.bench import (
    decode_rate,
    gpu_memory,
    logits_sha256,
    prefill_tok_s,
    random_tokens,
)
from spark_runtime.tier import TierCounters


class FakeTier:
    """Two layers that miss two and one of four selections a token."""

    def __init__(self) -> None:
        self.tokens = 0

    def reset_counts(self) -> None:
        self.tokens = 0

    def counters(self) -> TierCounters:
        none = np.zeros(4, dtype=np.int64)
        counts, cold = [none + self.tokens, none + self.tokens], [2 * self.tokens, self.tokens]
        return TierCounters(
            counts={"prefill": [none, none], "decode": counts},
            tokens={"prefill": [0, 0], "decode": [self.tokens, self.tokens]},
            cold={"prefill": [0, 0], "decode": cold},
            loads={"prefill": [0, 0], "decode": cold},
            bytes_moved={"prefill": 0, "decode": 0},
            early={"prefill": [0, 0], "decode": [2, 2]},
            early_used={"prefill": [0, 0], "decode": [1, 2]},
            early_wasted={"prefill": [0, 0], "decode": [1, 0]},
            early_bytes={"prefill": 0, "decode": 0},
            early_used_bytes={"prefill": 0, "decode": 0},
            early_wasted_bytes={"prefill": 0, "decode": 0},
            reuse=[none, none],
        )


class FakeEngine:
    """Logits are the tokens of the context, counted."""

    def __init__(self, tier: FakeTier | None = None) -> None:
        self.tier = tier
        self.fed: list[tuple[list[int], str]] = []

    def reset(self) -> None:
        self.fed.clear()

    def feed(self, tokens: list[int], phase: str, *, before_step: Any = None) -> None:
        self.fed.append((list(tokens), phase))
        if self.tier is not None and phase == "decode":
            self.tier.tokens += len(tokens)

    def logits(self) -> np.ndarray:
        known = [token for tokens, _ in self.fed for token in tokens]
        return np.bincount(known, minlength=10).astype(np.float32)


def test_random_tokens_never_change() -> None:
    assert random_tokens(4, 32768, 202) == [5022, 12019, 22526, 18749]
    assert random_tokens(0, 10, 1) == []
    assert {*random_tokens(1000, 10, 3)} == set(range(10))


def test_decode_is_one_token_at_a_time() -> None:
    engine: Any = FakeEngine()
    rate = decode_rate(engine, [1, 2, 3], [4, 5, 6, 7], untimed=1)
    assert engine.fed == [([1, 2, 3], "prefill"), *(([token], "decode") for token in (4, 5, 6, 7))]
    assert rate.tokens == 3
    assert rate.tok_s > 0
    assert rate.cold_hits_per_token is rate.cold_hit_rate is None


def test_cold_hits_of_the_timed_tokens_alone() -> None:
    engine: Any = FakeEngine(FakeTier())
    rate = decode_rate(engine, [1, 2, 3], [4, 5, 6, 7], untimed=2)
    assert rate.cold_hits_per_token == 3
    assert rate.cold_hit_rate == 3 / 8
    assert (rate.early_per_token, rate.early_used_share) == (4 / 2, 3 / 4)


def test_decode_needs_a_timed_token() -> None:
    engine: Any = FakeEngine()
    with pytest.raises(ValueError, match="2 tokens, expected more than the 2"):
        decode_rate(engine, [1], [2, 3], untimed=2)


def test_hash_covers_every_token() -> None:
    engine: Any = FakeEngine()
    digest = hashlib.sha256()
    for known in ([1, 2], [1, 2, 3], [1, 2, 3, 4]):
        digest.update(np.bincount(known, minlength=10).astype(np.float32).tobytes())
    assert logits_sha256(engine, [1, 2], [3, 4]) == digest.hexdigest()


def test_prefill_starts_from_an_empty_context() -> None:
    engine: Any = FakeEngine()
    engine.feed([9], "decode")
    assert prefill_tok_s(engine, [1, 2, 3]) > 0
    assert engine.fed == [([1, 2, 3], "prefill")]


def test_gpu_memory() -> None:
    memory = gpu_memory()
    assert memory is None or 0 < memory.free <= memory.total
