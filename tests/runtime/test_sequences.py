"""Which sequence a prompt goes to, and that conversations which share a context do not touch each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_architectures import ARCHITECTURES, ModelSize
from small_models import write_small_model

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.sampling import Sampling
from spark_runtime.sequences import Cached, Choice, choose_sequence, common_length
from spark_runtime.session_counts import SessionCounts

TOKENS = st.lists(st.integers(0, 1), max_size=12)


@given(TOKENS, TOKENS, st.integers(0, 3000))
def test_common_length(a: list[int], b: list[int], ahead: int) -> None:
    expected = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_length([2] * ahead + a, [2] * ahead + b) == ahead + expected
    assert common_length([2] * ahead + a, (*[2] * ahead, *b)) == ahead + expected


def test_a_conversation_goes_on_where_it_is() -> None:
    cached = [Cached(list(range(100)), 9), Cached(list(range(500, 900)), 1), Cached([], 0)]
    assert choose_sequence(list(range(120)), cached) == Choice(0)
    assert choose_sequence(list(range(500, 950)), cached) == Choice(1)


def test_a_short_common_beginning_destroys_no_long_conversation() -> None:
    main = list(range(5000))
    prompt = [*main[:100], *range(9000, 9100)]
    assert choose_sequence(prompt, [Cached(main, 9), Cached([], 0)]) == Choice(1)
    assert choose_sequence(prompt, [Cached(main, 9), Cached([7] * 50, 3)]) == Choice(1)
    assert choose_sequence(prompt, [Cached(main, 9)]) == Choice(0)


def test_a_long_common_beginning_is_copied_when_it_has_to_stay() -> None:
    main = list(range(5000))
    prompt = [*main[:1000], 9]
    assert choose_sequence(prompt, [Cached(main, 9), Cached([], 0)]) == Choice(1, copy_from=0)
    assert choose_sequence([*main, 9], [Cached(main, 9, busy=True), Cached([], 0)]) == Choice(1, copy_from=0)


def test_none_free() -> None:
    with pytest.raises(ValueError, match="every sequence is busy"):
        choose_sequence([1], [Cached([], 0, busy=True)])


def _options(n_seq_max: int) -> EngineOptions:
    return EngineOptions(n_ctx=512, n_batch=64, n_threads=1, n_outputs_max=1, n_seq_max=n_seq_max)


def test_turns_change_no_token_and_no_count(demo_model: Path) -> None:
    texts = ["How are you today?", "Tell me of the sea, of ships and of harbours.", "def mean(values):"]
    sampling = Sampling(temperature=1.0, seed=5)
    with Engine.load(demo_model, _options(1)) as engine:
        prompts = [engine.tokenize(text) for text in texts]
        alone, expected = [], []
        for prompt in prompts:
            counts = SessionCounts(engine.shape)
            engine.reset()
            with engine.counting(counts):
                engine.prompt(prompt)
                alone.append(list(engine.generate(sampling, 20)))
            expected.append(counts.to_histogram("ab" * 32, "chat"))
    with Engine.load(demo_model, _options(3)) as engine:
        sessions = [SessionCounts(engine.shape) for _ in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        steps = []
        for conversation, prompt, session, tokens in zip(engine.conversations, prompts, sessions, found, strict=True):
            engine.count_into(session)
            conversation.prompt(prompt)
            steps.append(conversation.generate(engine.sampler(sampling), 20))
            tokens.append(next(steps[-1]))
        going = [0, 1, 2]
        while going:
            for which in list(going):
                engine.count_into(sessions[which])
                token = next(steps[which], None)
                if token is None:
                    going.remove(which)
                else:
                    found[which].append(token)
        engine.count_into(None)
    assert found == alone
    assert [session.to_histogram("ab" * 32, "chat") for session in sessions] == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_copy_goes_on_with_the_same_bits(architecture: str, tmp_path: Path) -> None:
    path = write_small_model(tmp_path / "model.gguf", architecture, ModelSize(embedding=128, width=96, latent=64))
    options = EngineOptions(n_ctx=512, n_batch=64, n_threads=1, n_seq_max=2, count_routing=False)
    tokens = [(at * 7) % 50 + 1 for at in range(300)]
    with Engine.load(path, options) as engine:
        first, second = engine.conversations
        first.prompt(tokens)
        chosen = engine.conversation_for([*tokens, 3, 4], busy=[first])
        assert chosen is second
        assert chosen.n_past == len(tokens)
        chosen.prompt([*tokens, 3, 4])
        copied = engine.logits()
        first.prompt([*tokens, 3, 4])
        assert engine.logits().tobytes() == copied.tobytes()
