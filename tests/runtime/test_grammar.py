"""Grammars that requests bring: followed, refused, or ended, and the next one works."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import GrammarError, SamplingError
from spark_runtime.logprobs import likeliest, log_probabilities
from spark_runtime.models import demo_model_path
from spark_runtime.sampling import Sampling


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1, count_routing=False)) as loaded:
        yield loaded


def answer(engine: Engine, sampling: Sampling, n: int = 40) -> str:
    engine.prompt(engine.tokenize("How are you today?"))
    return b"".join(map(engine.piece, engine.generate(sampling, n))).decode(errors="replace")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_follows_its_grammar(engine: Engine, temperature: float) -> None:
    grammar = 'root ::= "{" ws "\\"n\\": " [0-9]{1,4} "}"\nws ::= [ ]?'
    for seed in range(3):
        text = answer(engine, Sampling(temperature=temperature, seed=seed, grammar=grammar, presence_penalty=0.5))
        assert re.fullmatch(r'\{ ?"n": \d{1,4}\}', text)


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "\0",
        "x" * 300_000,
        'root := "a"',
        'foo ::= "a"',
        "root ::= missing",
        'root ::= root "a"',
        'root ::= e root "a" | "b"\ne ::= f\nf ::= ""',
        "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    ],
    ids=["empty", "zero", "large", "syntax", "no root", "undefined", "left recursion", "hidden recursion", "deep"],
)
def test_what_cannot_be_read_or_followed_is_refused(engine: Engine, grammar: str) -> None:
    with pytest.raises(GrammarError):
        answer(engine, Sampling(grammar=grammar))
    assert answer(engine, Sampling(grammar='root ::= "yes" | "no"')) in {"yes", "no"}


def test_a_grammar_that_ends_the_process_ends_no_other_one(engine: Engine) -> None:
    engine.prompt(engine.tokenize("How are you today?"))
    going_on = engine.generate(Sampling(grammar="root ::= [a-z] [a-z] [a-z] [a-z] [0-9]"), 20)
    begun = [next(going_on)]
    with pytest.raises(GrammarError):
        answer(engine, Sampling(grammar="root ::= " + "(" * 100_000))
    text = b"".join(map(engine.piece, [*begun, *going_on])).decode()
    assert re.fullmatch(r"[a-z]{4}\d", text)


def test_markup_that_is_spelled_is_written_as_the_token_it_is() -> None:
    """A model that knows its markup as control tokens would otherwise have to spell it letter by letter."""
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1, count_routing=False)) as engine:
        (marker,) = engine.tokenize("<|im_start|>", add_special=False, parse_special=True)
        sampling = Sampling(grammar='root ::= "<|im_start|>" [a-z]', logit_bias=((marker, 50.0),))
        engine.prompt(engine.tokenize("x"))
        assert marker not in list(engine.generate(sampling, 20))
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1, count_routing=False)) as engine:
        engine.spell(marker, b"<|im_start|>")
        engine.prompt(engine.tokenize("x"))
        tokens = list(engine.generate(sampling, 20))
        assert tokens[0] == marker
        assert re.fullmatch(rb"<\|im_start\|>[a-z]", b"".join(map(engine.piece, tokens)))


def test_an_exploding_grammar_ends_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(engine, Sampling(grammar='root ::= "yes"')) == "yes"
    monkeypatch.setattr("spark_runtime.grammar.STEP_S", 0.3)
    exploding = "root ::= " + "x " * 24 + '\nx ::= [a-z] | [a-z] [a-z] | ""'
    with pytest.raises(GrammarError, match="takes too long"):
        answer(engine, Sampling(grammar=exploding))
    monkeypatch.undo()
    assert answer(engine, Sampling(grammar='root ::= "no"')) == "no"


def test_a_grammar_that_takes_its_time_lets_others_compute(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped where it stands; what it has seen of the logits by then is its own."""
    monkeypatch.setattr("spark_runtime.grammar.STEP_S", 120.0)
    sampling = Sampling(temperature=1.0, seed=5, grammar="root ::= [a-z ]{4,30} [0-9]")
    expected = answer(engine, sampling, 12)
    conversation = engine.conversations[0]
    with contextlib.closing(engine.sampler(sampling)) as sampler:
        conversation.prompt(engine.tokenize("How are you today?"))
        for _ in sampler.ready():
            time.sleep(0.001)
        process = sampler._grammar._process._process  # type: ignore[union-attr]
        steps = conversation.steps(sampler, 12)
        tokens = []
        process.send_signal(signal.SIGSTOP)
        try:
            assert [next(steps) for _ in range(3)] == [None] * 3
            assert sampler.waits
            before = engine.logits()
            # Another conversation's step would leave its logits there.
            conversation._context.logits = lambda: np.zeros_like(before)  # type: ignore[method-assign]
            assert next(steps) is None
        finally:
            process.send_signal(signal.SIGCONT)
            del conversation._context.logits
        for token in steps:
            if token is None:
                time.sleep(0.001)
                continue
            if not tokens:
                np.testing.assert_array_equal(sampler.logits(), before)
            tokens.append(token)
    assert b"".join(map(engine.piece, tokens)).decode() == expected


def test_processes_are_used_again_and_end_with_the_engine() -> None:
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1, count_routing=False)) as engine:
        processes = set()
        for _ in range(3):
            with contextlib.closing(engine.sampler(Sampling(grammar='root ::= "x"'))) as sampler:
                list(sampler.ready())
                processes.add(sampler._grammar._process)  # type: ignore[union-attr]
        assert len(processes) == 1
        (process,) = processes
        # It died meanwhile: the next grammar gets another one.
        process._process.kill()
        process._process.wait()
        assert answer(engine, Sampling(grammar='root ::= "yes"')) == "yes"
        held = [engine.sampler(Sampling(grammar='root ::= "x"')) for _ in range(2)]
        running = [sampler._grammar._process._process for sampler in held]  # type: ignore[union-attr]
        assert all(each.poll() is None for each in running)
    assert all(each.poll() is not None for each in running)
    for sampler in held:
        sampler.close()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=float("nan")),
        Sampling(frequency_penalty=float("inf")),
        Sampling(logit_bias=((-1, 1.0),)),
        Sampling(logit_bias=((10**9, 1.0),)),
        Sampling(logit_bias=((1, float("nan")),)),
    ],
)
def test_parameters_that_make_no_sense(engine: Engine, sampling: Sampling) -> None:
    with pytest.raises(SamplingError):
        answer(engine, sampling)


def test_biases_and_penalties_count_without_temperature(engine: Engine) -> None:
    token = engine.tokenize("x", add_special=False)[0]
    engine.prompt(engine.tokenize("How are you today?"))
    assert list(engine.generate(Sampling(logit_bias=((token, 100.0),)), 4)) == [token] * 4
    engine.prompt(engine.tokenize("How are you today?"))
    punished = list(engine.generate(Sampling(logit_bias=((token, 100.0),), frequency_penalty=60.0), 4))
    assert punished[0] == token
    assert punished != [token] * 4


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**64 - 1])
def test_every_seed_is_reproducible(engine: Engine, seed: int) -> None:
    sampling = Sampling(temperature=1.5, seed=seed, top_k=50, min_p=0.01)
    assert answer(engine, sampling) == answer(engine, sampling)


def test_log_probabilities() -> None:
    logits = np.array([1.0, 3.0, 3.0, -np.inf, 80.0], dtype=np.float32)
    logprobs = log_probabilities(logits)
    assert np.exp(logprobs).sum() == pytest.approx(1.0)
    assert logprobs[0] == pytest.approx(-79.0)
    assert [token for token, _ in likeliest(logprobs, 3)] == [4, 1, 2]
    assert likeliest(logprobs, 0) == []
    assert len(likeliest(logprobs, 20)) == 5


def test_a_process_that_nobody_used_for_a_while_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1, count_routing=False)) as engine:
        assert answer(engine, Sampling(grammar='root ::= "yes"')) == "yes"
        (kept,) = engine._grammars._idle
        engine.tidy()
        assert engine._grammars._idle == [kept]
        monkeypatch.setattr("spark_runtime.grammar.IDLE_S", 0.0)
        engine.tidy()
        assert engine._grammars._idle == []
        assert kept._process.returncode is not None
        engine.tidy()
        assert answer(engine, Sampling(grammar='root ::= "no"')) == "no"


def test_what_a_large_grammar_took_is_given_back() -> None:
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1, count_routing=False)) as engine:

        def taken() -> int:
            (kept,) = engine._grammars._idle
            while kept.busy:
                kept.answer(0.01)
            status = Path(f"/proc/{kept._process.pid}/status").read_text()
            return 1024 * int(status.split("RssAnon:")[1].split()[0])

        small = 'root ::= "yes" | "no"'
        answer(engine, Sampling(grammar=small))
        before = taken()
        choices = " | ".join(f"r{number}" for number in range(4000))
        rules = "\n".join(f"r{number} ::= [a-z]{{1,20}}" for number in range(4000))
        assert answer(engine, Sampling(grammar=f"root ::= ({choices})\n{rules}"), 6)
        assert taken() < before + 4 * 2**20
