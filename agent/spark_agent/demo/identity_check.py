"""Whether counting and slots change anything that the model says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from spark_runtime.chat import ChatFormat
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier_start import TierStart

__all__ = ["DEMO_THREADS", "PROMPTS", "TOKENS", "Said", "say"]

PROMPTS = (
    "How are you today?",
    "Write a Python function that parses a date.",
    "What is a hash table?",
    "Tell me about the sea.",
)
TOKENS = 64
DEMO_THREADS = 1
"""The demo model gains nothing from more, and spinning threads are slow on a machine that is busy otherwise."""


@dataclass(frozen=True, slots=True)
class Said:
    """Greedy answers and the SHA-256 over the logits of every generated token."""

    logits_sha256: str
    answers: tuple[str, ...]


def say(model: Path, *, counting: bool, tier: TierStart | None = None) -> Said:
    """Answer :data:`PROMPTS` greedily, up to ``TOKENS`` tokens each, counted or not, from slots or by plain llama.cpp.

    Weights stay as they lie in the file: llama.cpp would repack them for the CPU where they are not in slots, and
    compute them by kernels that round otherwise.
    """
    digest = hashlib.sha256()
    answers: list[str] = []
    options = EngineOptions(n_threads=DEMO_THREADS, count_routing=counting, tier=tier, repack=False)
    with Engine.load(model, options) as engine:
        chat = ChatFormat(engine)
        for prompt in PROMPTS:
            engine.reset()
            session = SessionCounts(engine.shape) if counting else None
            answer = b""
            with engine.counting(session):
                engine.prompt(chat.tokenize(chat.prompt([{"role": "user", "content": prompt}])))
                for token in engine.generate(Sampling(), TOKENS):
                    digest.update(engine.logits().tobytes())
                    answer += b"" if engine.is_end(token) else engine.piece(token)
            answers.append(answer.decode(errors="replace"))
    return Said(digest.hexdigest(), tuple(answers))
