"""Conversations that take turns in one context on a GPU: the bits, tokens and counts of one after another."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_models import write_small_model

from spark_runtime.bench import random_tokens
from spark_runtime.conversation import Conversation
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier_start import uniform_start

pytestmark = pytest.mark.gpu

CONVERSATIONS = 3
TOKENS = 24
Answers = list[tuple[list[int], str, list[bytes]]]


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs a CUDA build of llama-cpp-python and a GPU")


def answers(path: Path, residency: float, *, together: bool) -> Answers:
    """Of every conversation its tokens, a hash of all its logits, and its decode counts."""
    shape = read_model_shape(path)
    options = EngineOptions(
        n_ctx=512,
        n_batch=64,
        n_threads=1,
        n_seq_max=CONVERSATIONS if together else 1,
        n_outputs_max=1,
        repack=False,
        devices=1,
        tier=None if residency == 1.0 else uniform_start(shape, residency),
    )
    counts = [SessionCounts(shape) for _ in range(CONVERSATIONS)]
    said: list[list[int]] = [[] for _ in counts]
    digests = [hashlib.sha256() for _ in counts]
    with Engine.load(path, options) as engine:
        prompts = [random_tokens(80 + 40 * number, engine.n_vocab, number) for number in range(CONVERSATIONS)]

        def steps(number: int, conversation: Conversation) -> Iterator[None]:
            with contextlib.closing(engine.sampler(Sampling(temperature=0.0))) as sampler:
                conversation.prompt(prompts[number])
                for token in conversation.generate(sampler, TOKENS):
                    said[number].append(token)
                    digests[number].update(engine.logits().tobytes())
                    yield

        running: dict[int, Iterator[None]] = {}
        taken: list[Conversation] = []
        for number in range(CONVERSATIONS):
            if not together:
                engine.reset()
            conversation = engine.conversation_for(prompts[number], taken if together else [])
            taken.append(conversation)
            running[number] = steps(number, conversation)
            if not together:
                engine.count_into(counts[number])
                for _ in running.pop(number):
                    pass
        while running:
            for number in list(running):
                engine.count_into(counts[number])
                if next(running[number], running) is running:
                    del running[number]
        engine.count_into(None)
    return [
        (tokens, digest.hexdigest(), [layer.tobytes() for layer in each.counts["decode"]])
        for tokens, digest, each in zip(said, digests, counts, strict=True)
    ]


@pytest.mark.parametrize("residency", [1.0, 0.6, 0.31])
def test_turns_change_no_bit(residency: float, tmp_path: Path) -> None:
    path = write_small_model(tmp_path / "model.gguf", "qwen3moe")
    alone = answers(path, residency, together=False)
    assert all(len(tokens) == TOKENS for tokens, _, _ in alone)
    assert answers(path, residency, together=True) == alone
