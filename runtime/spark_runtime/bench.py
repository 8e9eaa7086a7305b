"""Measuring an engine: rates of prefill and decode, cold hits, a hash over all logits, memory of the GPUs.

Nothing here knows of configurations, files or tables: each function measures one engine as it is. Rates are by the wall
clock, which stops when the last token's logits can be read, so work still queued on a device is never left out.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_runtime.devices import DeviceBytes, gpus
from spark_runtime.session_counts import SessionCounts

if TYPE_CHECKING:
    from spark_runtime.engine import Engine

__all__ = [
    "COUNTED_AT_ONCE",
    "UNTIMED_TOKENS",
    "DecodeRate",
    "counts_of",
    "decode_rate",
    "gpu_memory",
    "logits_sha256",
    "prefill_tok_s",
    "random_tokens",
]

UNTIMED_TOKENS = 16
"""Decoded before the clock starts: graphs are captured and the first cold hits of a prompt are over."""
COUNTED_AT_ONCE = 16
"""Tokens of a profile that are computed together; their selections are the same one by one."""
_LCG_FACTOR, _LCG_INCREMENT, _LCG_BITS = 6364136223846793005, 1442695040888963407, 64


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Decode of ``tokens`` timed tokens, one at a time."""

    tok_s: float
    tokens: int
    cold_hits_per_token: float | None
    """Selections whose expert was not in video memory, all layers together; ``None`` when nothing counted them."""
    cold_hit_rate: float | None
    """The same as a share of all selections."""
    early_per_token: float | None = None
    """Experts fetched early, all layers together."""
    early_used_share: float | None = None
    """Of those, selected while they were in video memory; ``None`` without any."""


def random_tokens(count: int, n_vocab: int, seed: int) -> list[int]:
    """The same ``count`` token ids for the same seed everywhere: Knuth's 64-bit linear congruential generator.

    Greedy text of a model falls into loops, which select the same experts again and again.
    """
    state, tokens = seed, []
    for _ in range(count):
        state = (state * _LCG_FACTOR + _LCG_INCREMENT) % 2**_LCG_BITS
        tokens.append((state >> 33) % n_vocab)
    return tokens


def decode_rate(
    engine: Engine,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    untimed: int = UNTIMED_TOKENS,
    before_step: Callable[[], None] = lambda: None,
) -> DecodeRate:
    """Decode ``tokens`` one at a time after ``prompt``, reading every token's logits as a sampler does.

    The first ``untimed`` tokens are neither timed nor counted. ``before_step`` as in ``Engine.feed``. Raises
    ``ValueError`` when none would be left.
    """
    if untimed >= len(tokens):
        raise ValueError(f"{len(tokens)} tokens, expected more than the {untimed} that are not timed")
    _start(engine, prompt, before_step)
    _step_through(engine, tokens[:untimed], before_step)
    if engine.tier is not None:
        engine.tier.reset_counts()
    start = time.perf_counter()
    _step_through(engine, tokens[untimed:], before_step)
    seconds = time.perf_counter() - start
    timed = len(tokens) - untimed
    per_token = share = early = used = None
    if engine.tier is not None:
        counters = engine.tier.counters()
        per_token, share = counters.cold_hits_per_token("decode"), counters.cold_hit_rate("decode")
        n_early = sum(counters.early["decode"])
        early = n_early / timed
        used = min(1.0, sum(counters.early_used["decode"]) / n_early) if n_early else None
    return DecodeRate(timed / seconds, timed, per_token, share, early, used)


def logits_sha256(
    engine: Engine, prompt: Sequence[int], tokens: Sequence[int], *, before_step: Callable[[], None] = lambda: None
) -> str:
    """SHA-256 over the logits after the prompt and after each of ``tokens``, decoded one at a time."""
    _start(engine, prompt, before_step)
    digest = hashlib.sha256(engine.logits().tobytes())
    for _ in _steps(engine, tokens, before_step):
        digest.update(engine.logits().tobytes())
    return digest.hexdigest()


def prefill_tok_s(engine: Engine, tokens: Sequence[int], *, before_step: Callable[[], None] = lambda: None) -> float:
    """Rate of computing ``tokens`` as a prompt in an empty context, in batches of the engine's size."""
    engine.reset()
    start = time.perf_counter()
    engine.feed(tokens, "prefill", before_step=before_step)
    engine.logits()
    return len(tokens) / (time.perf_counter() - start)


def counts_of(
    engine: Engine,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    keep_trace: bool = False,
    before_step: Callable[[], None] = lambda: None,
) -> SessionCounts:
    """Selections of ``tokens``, computed in an empty context after ``prompt``: what a profile is made of."""
    counts = SessionCounts(engine.shape, keep_trace=keep_trace)
    engine.reset()
    with engine.counting(counts):
        engine.feed(prompt, "prefill", before_step=before_step)
        engine.feed(tokens, "decode", batch=COUNTED_AT_ONCE, before_step=before_step)
    return counts


def _start(engine: Engine, prompt: Sequence[int], before_step: Callable[[], None]) -> None:
    engine.reset()
    engine.feed(prompt, "prefill", before_step=before_step)
    engine.logits()


def _steps(engine: Engine, tokens: Sequence[int], before_step: Callable[[], None]) -> Iterator[None]:
    for token in tokens:
        engine.feed([token], "decode", before_step=before_step)
        yield


def _step_through(engine: Engine, tokens: Sequence[int], before_step: Callable[[], None]) -> None:
    for _ in _steps(engine, tokens, before_step):
        engine.logits()


def gpu_memory() -> DeviceBytes | None:
    """Free and total memory of all GPUs that llama.cpp can use; ``None`` where there is none."""
    found = [gpu.memory() for gpu in gpus()]
    if not found:
        return None
    return DeviceBytes(sum(memory.free for memory in found), sum(memory.total for memory in found))
