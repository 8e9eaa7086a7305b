"""Model families, by templates that do what theirs do: calls, reasoning, history, and what is written back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import families
import pytest

from spark_agent.dialogue.events import Call, Reasoning, Text, merged
from spark_agent.dialogue.messages import Message, Tool, ToolCall, ToolChoice
from spark_agent.server.api_error import ContextExceededError
from spark_agent.server.exchange import Ask, Exchange
from spark_agent.server.prompting import Prompting
from spark_agent.server.reasoning import ReasoningAsk
from spark_runtime import templates
from spark_runtime.chat import ChatFormat
from spark_runtime.sampling import Sampling

THINK, BRACKETS, SEED = ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")
FAMILIES: dict[str, tuple[str, str, bool, tuple[str, str] | None]] = {
    "Qwen3-MoE": (families.QWEN3, "hermes", True, THINK),
    "Qwen3-Coder": (families.QWEN_CODER, "qwen-coder", True, None),
    "Nemotron 3": (families.NEMOTRON_3, "qwen-coder", True, THINK),
    "GLM-4.5": (families.GLM, "glm", True, THINK),
    "MiniMax-M2": (families.MINIMAX, "minimax", True, THINK),
    "Mistral Nemo": (families.MISTRAL_NEMO, "mistral", True, None),
    "Mistral Small 3.2": (families.MISTRAL_SMALL, "mistral-named", True, None),
    "Magistral": (families.MAGISTRAL, "mistral-named", True, BRACKETS),
    "DeepSeek R1 distill": (families.DEEPSEEK_R1, "deepseek", False, THINK),
    "DeepSeek R1": (families.DEEPSEEK_R1_BARE, "deepseek", False, THINK),
    "DeepSeek V3.1": (families.DEEPSEEK_V3_1, "deepseek-v3.1", False, THINK),
    "Llama 3": (families.LLAMA_3, "llama3", True, None),
    "Granite 4": (families.GRANITE_4, "hermes", True, None),
    "Ernie 4.5": (families.ERNIE, "hermes", True, THINK),
    "Kimi-K2": (families.KIMI, "kimi", True, THINK),
    "Kimi-K2 of late 2025": (families.KIMI_LISTING, "kimi", True, THINK),
    "Nemotron Nano": (families.NEMOTRON_NANO, "nemotron", True, THINK),
    "Phi-4-mini": (families.PHI_4_MINI, "phi4", True, None),
    "Granite 3": (families.GRANITE_3, "granite3", True, None),
    "Jamba": (families.JAMBA, "tool_calls", True, None),
    "MiniMax-M1": (families.MINIMAX_M1, "minimax-m1", True, None),
    "Seed": (families.SEED, "seed", True, SEED),
    "gpt-oss": (families.GPT_OSS, "harmony", True, None),
    "pythonic": (families.PYTHONIC, "generic", False, None),
    "GigaChat3": (families.GIGACHAT, "generic", False, None),
    "Mixtral": (families.MIXTRAL, "generic", False, None),
    "Phi-3.5-MoE": (families.PHI_3_5, "generic", False, None),
    "ChatML": (families.CHATML, "generic", False, None),
}
LOOK = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}})
ARGUMENTS = {"at": "the <sea>", "n": 3}
CALL = ToolCall("call_0123456789abcdef0123456789abcdef", "look", json.dumps(ARGUMENTS))
ASKED = Message("user", "Is it calm?")
HISTORY = (
    ASKED,
    Message("assistant", "", reasoning="I must look.", calls=(CALL,)),
    Message("tool", "very calm", call_id=CALL.id, name="look"),
)


class Engine:
    """What a chat format asks an engine for; a token is a letter."""

    n_vocab, n_ctx = 0x110000, 100_000

    def __init__(self, template: str, tool_template: str | None = None) -> None:
        self.chat_template, self.tool_template = template, tool_template
        self.spelled: set[int] = set()

    def special_text(self, which: str) -> str:
        return {"bos": "<s>", "eos": "</s>"}[which]

    def tokenize(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def is_end(self, _token: int) -> bool:
        return False

    def spell(self, token: int, _text: bytes) -> None:
        self.spelled.add(token)


def prompting_of(template: str, tool_template: str | None = None) -> Prompting:
    engine: Any = Engine(template, tool_template)
    return Prompting(ChatFormat(engine))


def asked(prompting: Prompting, *messages: Message, **members: Any) -> tuple[str, Any]:
    """The prompt, and who reads the answer."""
    ask = Ask(Sampling(), messages=messages, **{"tools": (LOOK,), **members})
    prepared = prompting.prepare(ask)
    return "".join(map(chr, prepared.tokens)), prepared.parser


@pytest.mark.parametrize("asked_for", [{"messages": (Message("user", "hi"),)}, {"raw": "hi"}, {"raw": (1, 2)}])
def test_what_is_to_be_done_meanwhile_is_done_once(asked_for: dict[str, Any]) -> None:
    done: list[int] = []
    prompting_of(families.CHATML).prepare(Ask(Sampling(), **asked_for), lambda: done.append(1))
    assert done == [1]


def test_others_are_served_while_a_prompt_waits_for_another_one() -> None:
    unused: Any = None
    exchange = Exchange(unused, prompting_of(families.CHATML), unused, unused)
    ask = Ask(Sampling(), messages=(Message("user", "hi"),))

    async def counted() -> int:
        with templates._HOST._lock:
            counting = asyncio.ensure_future(exchange.count(ask))
            await asyncio.sleep(0)  # which would never return if the loop itself waited
        return await counting

    assert asyncio.run(counted()) > 0


def test_who_is_refused_is_not_remembered() -> None:
    """A conversation that was never answered has not asked for its summary, and never began."""
    read, told = [], []

    def lineage_of(messages: Sequence[Message]) -> Callable[[], str]:
        read.append(messages)
        return lambda: told.append(messages) or "lineage"

    unused: Any = None
    exchange = Exchange(unused, prompting_of(families.CHATML), lineage_of, lambda *_: None)
    ask = Ask(Sampling(), messages=(Message("user", "x" * Engine.n_ctx),))
    with pytest.raises(ContextExceededError):
        asyncio.run(exchange.prepare(ask, dict, None))
    assert (len(read), told) == (1, [])


def heard(parser: Any, text: str) -> list[Any]:
    return merged([*parser.push(text), *parser.end()])


@pytest.mark.parametrize("family", FAMILIES)
def test_formats_are_told_from_what_templates_do(family: str) -> None:
    template, name, described, thinking = FAMILIES[family]
    found = prompting_of(template).output_format
    assert (found.name, found.described, found.thinking) == (name, described, thinking)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_with_tools(family: str) -> None:
    """The tool is described once, and what the template shows of a call is read as that call when a model writes it."""
    template, name, described, thinking = FAMILIES[family]
    prompting = prompting_of(template)
    before, _ = asked(prompting, ASKED)
    assert before.count("Looks.") == 1
    assert before.endswith(asked(prompting, ASKED, tools=())[0][-8:])
    assert described or "<tools>" in before
    prompt, _ = asked(prompting, *HISTORY)
    assert "very calm" in prompt
    assert CALL.id not in prompt or name == "generic"
    parser = asked(prompting, ASKED)[1]
    answer = prompt[len(before) :] if prompt.startswith(before) else prompt[prompt.index("Is it calm?") + 11 :]
    if name == "llama3":
        answer = answer[answer.index("{") :]
    if thinking is not None:
        answer = thinking[1] + answer
    (call,) = [part for part in heard(parser, answer) if isinstance(part, Call)]
    assert (call.name, json.loads(call.arguments)) == ("look", ARGUMENTS)


@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each[3] is not None])
def test_reasoning_is_told_from_the_answer(family: str) -> None:
    template, _, _, thinking = FAMILIES[family]
    assert thinking is not None
    prompting = prompting_of(template)
    prompt, parser = asked(prompting, ASKED)
    opened = prompt.rstrip().endswith(thinking[0])
    text = f"{'' if opened else thinking[0]}Hm, look.{thinking[1]}\n\nCalm."
    assert heard(parser, text) == [Reasoning("Hm, look."), Text("Calm.")]
    if not opened:
        assert heard(asked(prompting, ASKED)[1], "Calm.") == [Text("Calm.")]


def test_reasoning_goes_back_to_a_template_that_wants_it() -> None:
    for family in ("Qwen3-MoE", "GLM-4.5", "Kimi-K2", "Seed", "gpt-oss"):
        prompt, _ = asked(prompting_of(FAMILIES[family][0]), *HISTORY)
        assert "I must look." in prompt, family


def test_hermes_template_for_tools() -> None:
    """Hermes 2 and 3 have a plain template and one named ``tool_use``."""
    prompting = prompting_of(families.CHATML, families.GRANITE_4)
    assert prompting.output_format.name == "hermes"
    assert asked(prompting, ASKED, tools=())[0].startswith("<|im_start|>user")
    assert asked(prompting, ASKED)[0].startswith("<|start_of_role|>system")
    assert "<tool_call>" in asked(prompting, *HISTORY, tools=())[0]


def test_a_template_that_drops_system_messages_where_there_are_tools() -> None:
    dropping = families.GRANITE_4.replace("for m in messages", "for m in messages if m.role != 'system'")
    prompting = prompting_of(families.CHATML, dropping)
    told = (Message("system", "Be brief."), ASKED)
    assert "<|im_start|>system\nBe brief." in asked(prompting, *told, tools=())[0]
    assert "<|start_of_role|>user<|end_of_role|>Be brief.\n\nIs it calm?" in asked(prompting, *told)[0]


def test_ids_are_those_that_templates_take() -> None:
    nemo, _ = asked(prompting_of(families.MISTRAL_NEMO), *HISTORY)
    shown = nemo.partition('"id": "')[2][:9]
    assert shown.isalnum()
    assert f'"call_id": "{shown}"' in nemo
    kimi, _ = asked(prompting_of(families.KIMI), *HISTORY, *HISTORY[1:])
    assert "<|tool_call_begin|>functions.look:0<" in kimi
    assert "## Return of functions.look:0" in kimi


def test_two_calls_of_one_kimi_turn_are_numbered() -> None:
    second = ToolCall("another", "look", "{}")
    turn = Message("assistant", "", calls=(CALL, second))
    results = [Message("tool", "x", call_id=call.id, name="look") for call in (second, CALL)]
    prompt, _ = asked(prompting_of(families.KIMI), ASKED, turn, *results)
    assert prompt.index("Return of functions.look:1") < prompt.index("Return of functions.look:0")


def test_two_messages_of_the_user_are_one_where_roles_must_alternate() -> None:
    twice, _ = asked(prompting_of(families.MISTRAL_NEMO), ASKED, ASKED)
    assert twice == asked(prompting_of(families.MISTRAL_NEMO), replace(ASKED, text=f"{ASKED.text}\n\n{ASKED.text}"))[0]


def test_a_template_without_system_messages_gets_their_text_in_the_question() -> None:
    prompting = prompting_of(families.MIXTRAL)
    prompt, _ = asked(prompting, Message("system", "Be brief."), ASKED, tools=())
    assert prompt == "<s>[INST] Be brief.\n\nIs it calm? [/INST]"
    assert asked(prompting, Message("system", "Be brief."), tools=())[0] == "<s>[INST] Be brief. [/INST]"


def test_what_a_template_says_of_tools_in_words_nobody_reads_is_not_used() -> None:
    prompt, parser = asked(prompting_of(families.PYTHONIC), ASKED)
    assert prompt.count("Looks.") == 1
    assert "<tool_call>" in prompt
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    assert heard(parser, call) == [Call("look", '{"at": "x"}')]


@pytest.mark.parametrize("template", [families.MINIMAX, families.GPT_OSS, families.QWEN3])
def test_limits_are_in_a_models_own_words(template: str) -> None:
    prompting = prompting_of(template)
    ask: dict[str, Any] = {"messages": (ASKED,), "tools": (LOOK,), "reasoning": ReasoningAsk(40)}
    limit = prompting.prepare(Ask(Sampling(), **ask)).thought_limit
    assert limit is not None
    assert limit.tokens == 40
    assert limit.closing.decode() in "".join(map(chr, limit.ending))
    assert limit.opened == asked(prompting, ASKED)[0].rstrip().endswith("<think>")
    forced = Ask(Sampling(), **{**ask, "choice": ToolChoice("required"), "max_tokens": 30})
    limit = prompting.prepare(forced).thought_limit
    assert limit is not None
    assert limit.tokens == 15, "the call gets the rest"


EFFORTS = {
    "names none": ("{{ messages[0].content }}{{ reasoning_effort }}", "high", "low"),
    "names max": ("{% if reasoning_effort == 'max' %}{% endif %}{{ messages[0].content }}", "max", "low"),
    "names minimal": (
        '{% if reasoning_effort in ["low", "minimal"] %}{% endif %}{{ messages[0].content }}', "high", "minimal"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("template", "most", "least"), EFFORTS.values(), ids=EFFORTS)
def test_an_effort_is_said_in_a_word_that_the_template_knows(template: str, most: str, least: str) -> None:
    def told(effort: str) -> str:
        source = template + "|{{ reasoning_effort if reasoning_effort is defined else 'nothing' }}"
        ask = Ask(Sampling(), messages=(ASKED,), reasoning=ReasoningAsk(effort=effort))
        return "".join(map(chr, prompting_of(source).prepare(ask).tokens)).rpartition("|")[2]

    assert (told("max"), told("xhigh"), told("minimal")) == (most, "high", least)
    assert (told("low"), told("medium"), told("high"), told("no_think")) == ("low", "medium", "high", "no_think")


def test_an_effort_that_the_template_refuses_is_the_next_one_or_left_out() -> None:
    strict = """{%- if reasoning_effort is defined and reasoning_effort not in KNOWN %}{{ raise_exception('no') }}
{%- endif %}{{ messages[0].content }}|{{ reasoning_effort if reasoning_effort is defined else 'nothing' }}"""
    for known, told in (("['high', 'low']", "high"), ("['no_think']", "nothing")):
        ask = Ask(Sampling(), messages=(ASKED,), reasoning=ReasoningAsk(effort="medium"))
        tokens = prompting_of(strict.replace("KNOWN", known)).prepare(ask).tokens
        assert "".join(map(chr, tokens)).rpartition("|")[2] == told
