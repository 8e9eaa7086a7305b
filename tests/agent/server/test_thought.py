"""Reasoning with a limit: when it is over, and what a model then writes, with and without a grammar."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from generated import events_of
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.dialogue.call_grammar import call_grammar
from spark_agent.dialogue.events import Call, Reasoning, merged
from spark_agent.dialogue.harmony import HarmonyParser
from spark_agent.dialogue.messages import Tool
from spark_agent.server.generation import Finished, Generation
from spark_agent.server.sessions import LiveSessions
from spark_agent.server.thought import ThoughtLimit, ThoughtWatch
from spark_agent.server.worker import Worker
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.models import demo_model_path
from spark_runtime.sampling import Sampling

LIMIT = ThoughtLimit(5, b"<think>", b"</think>", (1,), opened=False)


def over_after(pieces: list[bytes], limit: ThoughtLimit) -> list[int]:
    watch = ThoughtWatch(limit)
    return [at for at, piece in enumerate(pieces) if watch.is_over(piece)]


def test_when_it_is_over() -> None:
    words = [b"a "] * 9
    assert over_after([b"\n", b"<thi", b"nk>", *words], LIMIT) == [6], "tokens inside count"
    assert over_after([b"<think>", b"a", b"</thi", b"nk>", *words], LIMIT) == []
    assert over_after([b"Hello", b"<think>", *words], LIMIT) == []
    opened = ThoughtLimit(2, b"<think>", b"</think>", (1,), opened=True)
    assert over_after(words, opened) == [1]
    assert over_after([b"</think>", *words], opened) == []


def test_none_at_all() -> None:
    none = ThoughtLimit(0, b"<think>", b"</think>", (1,), opened=False)
    assert not none.over
    assert over_after([b"\n", b"<thi", b"nk>", b"a"], none) == [2]
    assert over_after([b"<think></think>", b"a"], none) == []
    assert over_after([b"Hello", b"<think>", b"a"], none) == []
    opened = ThoughtLimit(0, b"<think>", b"</think>", (1,), opened=True)
    assert opened.over, "before the first token"
    assert over_after([b"a", b"b"], opened) == []


@given(text=st.text(alphabet="<>/think a", max_size=60), size=st.integers(1, 7), opened=st.booleans())
def test_it_is_over_once_and_only_inside(text: str, size: int, opened: bool) -> None:
    limit = ThoughtLimit(3, b"<think>", b"</think>", (1,), opened=opened)
    raw = text.encode()
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    found = over_after(pieces, limit)
    assert len(found) <= 1
    if found:
        before = b"".join(pieces[: found[0] + 1])
        assert opened or before.lstrip().startswith(b"<think>")
        assert b"</think>" not in before


UNIT = Tool(
    "unit",
    parameters={
        "type": "object",
        "properties": {"exact": {"type": "boolean"}},
        "required": ["exact"],
        "additionalProperties": False,
    },
)


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_a_thought_that_would_not_end_makes_way_for_the_call(bias: float) -> None:
    """A small model has no idea of harmony: the grammar makes it think and call, and the limit end the one.

    It thinks without any ``<``, or of nothing else, so that what ends it comes after its own beginning.
    """
    grammar = call_grammar(None, [UNIT], parallel=False)
    grammar = grammar.replace('<|start|>assistant")?', '<|start|>assistant")', 1)
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=512, n_threads=1, count_routing=False)) as engine:
        worker = Worker(engine, LiveSessions(engine.shape, lambda *_: None, lambda: 0.0), lambda error: None)
        worker.start()
        markup = tuple((token, bias) for token in range(engine.n_vocab) if b"<" in engine.piece(token))
        ending = tuple(engine.tokenize("<|end|><|start|>assistant", add_special=False))
        limit = ThoughtLimit(20, b"<|channel|>analysis<|message|>", b"<|end|>", ending, opened=False)

        async def told(thought_limit: ThoughtLimit | None) -> tuple[list[Any], str]:
            sampling = Sampling(grammar=grammar, logit_bias=markup)
            prompt = engine.tokenize("How are you today?")
            generation = Generation("x", prompt, sampling, 150, (), thought_limit=thought_limit)
            worker.submit(generation)
            parser, events = HarmonyParser({"unit": UNIT}), []
            async for event in events_of(generation):
                if isinstance(event, Finished):
                    return merged([*events, *parser.end(cut=event.reason == "length")]), event.reason
                events += parser.push(event.text)
            raise AssertionError("no end")

        try:
            (thought,), reason = asyncio.run(told(None))
            assert isinstance(thought, Reasoning)
            assert reason == "length"
            (thought, call), reason = asyncio.run(told(limit))
            assert isinstance(thought, Reasoning)
            assert (set(thought.text) == {"<"}) == (bias > 0)
            assert isinstance(call, Call)
            assert (call.name, set(json.loads(call.arguments)), reason) == ("unit", {"exact"}, "stop")
        finally:
            worker.stop()


def test_reasoning_that_the_prompt_has_opened_and_nobody_wants_is_over_at_once() -> None:
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=512, n_threads=1, count_routing=False)) as engine:
        worker = Worker(engine, LiveSessions(engine.shape, lambda *_: None, lambda: 0.0), lambda error: None)
        worker.start()
        ending = tuple(engine.tokenize("</think>\n\n", add_special=False))
        limit = ThoughtLimit(0, b"<think>", b"</think>", ending, opened=True)

        async def told() -> str:
            prompt = engine.tokenize("How are you today?")
            generation = Generation("x", prompt, Sampling(), 20, (), thought_limit=limit)
            worker.submit(generation)
            return "".join([event.text async for event in events_of(generation) if not isinstance(event, Finished)])

        try:
            text = asyncio.run(told())
        finally:
            worker.stop()
        assert text.startswith("</think>\n\n")
        assert len(text) > len("</think>\n\n")


def test_a_limit_without_a_grammar() -> None:
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=512, n_threads=1, count_routing=False)) as engine:
        ending = engine.tokenize("</think>", add_special=False)
        engine.prompt(engine.tokenize("How are you today?"))
        with contextlib.closing(engine.sampler(Sampling(frequency_penalty=1.0))) as sampler:
            tokens = []
            for token in engine.conversations[0].generate(sampler, 12):
                tokens.append(token)
                if len(tokens) == 4:
                    sampler.force(ending)
        assert tokens[4 : 4 + len(ending)] == ending
