"""How much is thought: the same fields mean the same in every dialect, and what they become for a model."""

from __future__ import annotations

from typing import Any

import families
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spark_agent.server.anthropic_requests import MessagesRequest
from spark_agent.server.exchange import Ask
from spark_agent.server.openai_requests import ChatRequest
from spark_agent.server.prompting import Prepared, Prompting
from spark_agent.server.reasoning import ReasoningAsk
from spark_agent.server.responses_requests import ResponsesRequest
from spark_runtime.chat import ChatFormat

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> Ask:
    return ChatRequest.model_validate({"messages": HELLO, **fields}).ask()


def responses(**fields: Any) -> Ask:
    body = ResponsesRequest.model_validate({"input": "Hello", **fields})
    return body.ask((), body.declared())


def messages(**fields: Any) -> Ask:
    return MessagesRequest.model_validate({"messages": HELLO, "max_tokens": 100, **fields}).ask()


DIALECTS = {"chat": chat, "responses": responses, "messages": messages}
ON = {"enable_thinking": True, "thinking": True, "thinking_mode": "enabled"}
OFF = {"enable_thinking": False, "thinking": False, "thinking_mode": "disabled", "thinking_budget": 0}
NONE = ReasoningAsk(0, None, OFF)
FIELDS: dict[str, tuple[dict[str, Any], ReasoningAsk]] = {
    "nothing": ({}, ReasoningAsk()),
    "nulls": ({"reasoning_effort": None, "reasoning": None, "thinking": None}, ReasoningAsk()),
    "OpenAI's chat": ({"reasoning_effort": "low"}, ReasoningAsk(None, "low", ON)),
    "OpenAI's chat, none": ({"reasoning_effort": "none"}, NONE),
    "OpenAI's responses": ({"reasoning": {"effort": "xhigh", "summary": "auto"}}, ReasoningAsk(None, "xhigh", ON)),
    "OpenAI's responses, none": ({"reasoning": {"effort": "none"}}, NONE),
    "OpenRouter's": ({"reasoning": {"max_tokens": 300}}, ReasoningAsk(300, None, {"thinking_budget": 300})),
    "OpenRouter's, off": ({"reasoning": {"enabled": False, "max_tokens": 300}}, NONE),
    "Anthropic's": (
        {"thinking": {"type": "enabled", "budget_tokens": 40}},
        ReasoningAsk(40, None, ON | {"thinking_budget": 40}),
    ),
    "Anthropic's, adaptive": ({"thinking": {"type": "adaptive"}}, ReasoningAsk(None, None, ON)),
    "Anthropic's, off": ({"thinking": {"type": "disabled"}}, NONE),
    "vLLM's": ({"thinking_token_budget": 40}, ReasoningAsk(40, None, {"thinking_budget": 40})),
    "llama-server's": ({"reasoning_budget_tokens": 40}, ReasoningAsk(40, None, {"thinking_budget": 40})),
    "llama-server's, other": ({"thinking_budget_tokens": 40}, ReasoningAsk(40, None, {"thinking_budget": 40})),
    "a budget of nothing": ({"thinking_token_budget": 0}, ReasoningAsk(0, None, {"thinking_budget": 0})),
    "no limit": ({"thinking_token_budget": -1}, ReasoningAsk()),
    "Qwen's": (
        {"enable_thinking": True, "thinking_budget": 40},
        ReasoningAsk(40, None, ON | {"thinking_budget": 40}),
    ),
    "Qwen's, off": ({"enable_thinking": False, "thinking_budget": 40}, NONE),
    "the template's": ({"chat_template_kwargs": {"enable_thinking": False}}, NONE),
    "the template's own": ({"chat_template_kwargs": {"x": [1]}}, ReasoningAsk(None, None, {"x": [1]})),
    "an effort of the template": (
        {"chat_template_kwargs": {"reasoning_effort": "no_think"}},
        ReasoningAsk(None, "no_think", ON),
    ),
    "the smallest of several": (
        {"thinking_token_budget": 50, "reasoning_budget_tokens": -1, "reasoning": {"max_tokens": 30}},
        ReasoningAsk(30, None, {"thinking_budget": 30}),
    ),
    "what is said before what is implied": (
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "thinking_mode": "mine"}},
        ReasoningAsk(0, "high", OFF | {"thinking_mode": "mine"}),
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("fields", "expected"), FIELDS.values(), ids=FIELDS)
def test_fields_mean_the_same_in_every_dialect(dialect: str, fields: dict[str, Any], expected: ReasoningAsk) -> None:
    assert DIALECTS[dialect](**fields).reasoning == expected


def test_anthropics_effort_is_one_of_the_whole_answer() -> None:
    assert messages(output_config={"effort": "high"}).reasoning == ReasoningAsk(effort="high")
    off = messages(output_config={"effort": "high"}, thinking={"type": "disabled"})
    assert off.reasoning == ReasoningAsk(0, "high", OFF)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": -2},
        {"thinking_token_budget": "many"},
        {"reasoning_effort": 3},
        {"thinking": {"type": "sometimes"}},
        {"reasoning": {"max_tokens": 0}},
        {"chat_template_kwargs": "x"},
    ],
)
def test_what_makes_no_sense_is_refused(dialect: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DIALECTS[dialect](**fields)


ANY_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "reasoning_effort": st.sampled_from(["none", "NONE", "minimal", "low", "high", "max", "own", None]),
        "reasoning": st.fixed_dictionaries(
            {}, optional={"effort": st.sampled_from(["none", "high"]), "max_tokens": st.integers(1, 9)}
        ),
        "thinking": st.sampled_from([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 5}, None]),
        "enable_thinking": st.none() | st.booleans(),
        "thinking_token_budget": st.integers(-1, 9),
        "chat_template_kwargs": st.dictionaries(
            st.sampled_from(["enable_thinking", "thinking", "reasoning_effort"]), st.booleans() | st.just("x")
        ),
    },
)


@given(fields=ANY_FIELDS)
def test_every_combination_means_the_same_in_every_dialect(fields: dict[str, Any]) -> None:
    asked = [dialect(**fields).reasoning for dialect in DIALECTS.values()]
    assert asked[0] == asked[1] == asked[2]
    thought = asked[0]
    assert thought.effort not in ("none", "NONE")
    assert thought.tokens is None or 0 <= thought.tokens <= 9
    assert "reasoning_effort" not in thought.options, "it is put into words that the template knows"


class Engine:
    n_vocab, n_ctx, tool_template = 0x110000, 100_000, None

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def special_text(self, which: str) -> str:
        return which

    def tokenize(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def is_end(self, _token: int) -> bool:
        return False

    def spell(self, token: int, text: bytes) -> None:
        """Every letter is a token."""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_budget_limits_reasoning_and_none_ends_it(dialect: str) -> None:
    off = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    engine: Any = Engine(families.QWEN3 + off)
    prompting = Prompting(ChatFormat(engine))

    def prepared(**fields: Any) -> Prepared:
        return prompting.prepare(DIALECTS[dialect](**fields))

    limited = prepared(thinking_token_budget=40).thought_limit
    assert limited is not None
    assert (limited.tokens, limited.over) == (40, False)
    assert prepared().thought_limit is None
    none = prepared(reasoning_effort="none")
    assert none.thought_limit is not None
    assert none.thought_limit.tokens == 0
    # Its template knows how to say so, too; one that does not is told in the model's own words.
    assert "".join(map(chr, none.tokens)).rstrip().endswith("</think>")
    engine = Engine(families.MINIMAX)
    stubborn = Prompting(ChatFormat(engine)).prepare(DIALECTS[dialect](reasoning_effort="none")).thought_limit
    assert stubborn is not None
    assert stubborn.over
