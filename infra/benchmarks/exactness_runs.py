"""What a model computes in each situation that could show a difference, as fingerprints of its logits.

Every logit of every position counts where the model gives them: a step is one decode call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spark_runtime.engine import Engine

__all__ = ["CASES", "CONTEXT", "SEQUENCES", "Trail", "context_for", "generate"]

SEQUENCES = 4
"""Parallel sequences; an engine for that case needs as many."""
_STEP_DIGITS = 12
_TEMPERATURE = 1.0


class Trail:
    """Fingerprints of the logits of successive steps."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.finite = True
        self._digest = hashlib.sha256()

    def add(self, logits: NDArray[np.float32]) -> None:
        """Take the logits of one step, ``[n_tokens, n_vocab]`` or ``[n_vocab]``."""
        data = logits.tobytes()
        self._digest.update(data)
        self.steps.append(hashlib.sha256(data).hexdigest()[:_STEP_DIGITS])
        self.finite = self.finite and bool(np.isfinite(logits).all())

    @property
    def sha256(self) -> str:
        """Of all logits in order."""
        return self._digest.hexdigest()


def prompts(engine: Engine, seed: int) -> Trail:
    """Prompts of several batches: logits of the last token, of all tokens, and after going back to a common start."""
    trail, batch = Trail(), engine.n_batch
    tokens = _random_tokens(engine, 2 * batch + batch // 2 + 1, seed)
    engine.reset()
    engine.prompt(tokens)
    trail.add(engine.logits())
    engine.prompt([*tokens[: batch + 3], *tokens[:7]])
    trail.add(engine.logits())
    engine.reset()
    _feed(engine, tokens, batch, trail)
    return trail


def batches(engine: Engine, seed: int) -> Trail:
    """Batches of 1 to 8 tokens, twice: growing, and in another order with other tokens."""
    trail = Trail()
    engine.reset()
    for sizes in (range(1, 9), (8, 3, 1, 6, 2, 7, 5, 4)):
        for size in sizes:
            _feed(engine, _random_tokens(engine, size, seed + engine.n_past), size, trail)
    return trail


def sequences(engine: Engine, seed: int) -> Trail:
    """Several sequences side by side: prompts of different lengths in one batch, then a token of each at a time."""
    trail = Trail()
    engine.reset()
    texts = [_random_tokens(engine, 40, seed + index) for index in range(SEQUENCES)]
    lengths = [2 + 3 * index for index in range(SEQUENCES)]
    together = [(texts[index][at], at, index) for index in range(SEQUENCES) for at in range(lengths[index])]
    batch = engine.n_batch
    for start in range(0, len(together), batch):
        trail.add(_decode_rows(engine, together[start : start + batch]))
    for step in range(24):
        # Some sequences pause now and then, so that batches have from 2 to 4 tokens.
        awake = [index for index in range(SEQUENCES) if (step + index) % 3 or index < 2]
        trail.add(_decode_rows(engine, [(texts[index][lengths[index]], lengths[index], index) for index in awake]))
        for index in awake:
            lengths[index] += 1
    engine.reset()
    return trail


def generate(engine: Engine, seed: int, tokens: int = 24, prompts: int = 1) -> Trail:
    """Random prompts of growing length, each with ``tokens`` sampled ones after it, computed one by one."""
    trail = Trail()
    for index in range(prompts):
        rng = np.random.default_rng([seed, index])
        engine.reset()
        engine.prompt(_random_tokens(engine, 30 * (index + 1), seed + index))
        for _ in range(tokens):
            logits = engine.logits()
            trail.add(logits)
            # Sampled here and not by llama.cpp: a text that ends or repeats itself would compare little.
            engine.feed([int(np.argmax(logits / _TEMPERATURE + rng.gumbel(size=logits.size)))], "decode")
        trail.add(engine.logits())
    return trail


CASES: Mapping[str, Callable[[Engine, int], Trail]] = {
    "prompts": prompts,
    "batches": batches,
    "sequences": sequences,
    "generate": generate,
}
"""Situations by name; each takes an engine and a seed. Batches of up to 48 tokens fit :data:`CONTEXT`."""
CONTEXT = 160
"""Tokens of each sequence that :data:`CASES` need."""


def context_for(tokens: int, prompts: int) -> int:
    """Context that :func:`generate` needs."""
    return 30 * prompts + tokens + 1


def _random_tokens(engine: Engine, count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, engine.n_vocab, count)]


def _feed(engine: Engine, tokens: Sequence[int], batch: int, trail: Trail) -> None:
    for start in range(0, len(tokens), batch):
        step = tokens[start : start + batch]
        engine.feed(step, "decode")
        trail.add(engine.all_logits())


def _decode_rows(engine: Engine, rows: Sequence[tuple[int, int, int]]) -> NDArray[np.float32]:
    """Compute tokens at positions of sequences; the logits of all of them."""
    engine.feed_sequences(rows)
    return engine.all_logits()
