"""Chat templates as model families write them: what they support is found out by trying."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spark_runtime.chat import ChatFormat, TemplateSupport
from spark_runtime.errors import ChatTemplateError

HERMES = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}: {{ ARGS }}</tool_call>
{%- endfor %}<|im_end|>{% endfor %}"""
OBJECTS = HERMES.replace("ARGS", "call.function.arguments | tojson")
TEXTS = HERMES.replace("ARGS", "call.function.arguments")
CAREFUL = HERMES.replace(
    "{{ ARGS }}",
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
)
PAIRS = HERMES.replace("{{ ARGS }}", "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}")
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


ALL = TemplateSupport(tools=True, object_arguments=True, results=True)
NOTHING = TemplateSupport(False, False, False, False, False, False, False, False)
# As Mistral's: one system message, then user and assistant by turns, and an answer after every result.
STRICT = (
    """{%- set start = 1 if messages[0].role == 'system' else 0 %}
{%- set talk = namespace(user=true) %}
{%- for message in messages[start:] %}
{%- if message.role == 'system' %}{{ raise_exception('one system message') }}{% endif %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != talk.user %}{{ raise_exception('by turns') }}{% endif %}
{%- set talk.user = not talk.user %}{% endif %}{% endfor %}"""
    + OBJECTS
)
# As gpt-oss': a system message that is not the first is left out.
FIRST_ONLY = OBJECTS.replace(
    "{%- if message.content is string %}",
    "{%- if message.content is string and (message.role != 'system' or loop.first) %}",
)
COUNTING = "{{ tools | length }}" + PLAIN


class Engine:
    """What a chat format asks an engine for, with a template of one's choice."""

    n_vocab, n_ctx = 10, 100

    def __init__(self, template: str | None, tool_template: str | None = None) -> None:
        self.chat_template = template
        self.tool_template = tool_template
        self.spelled: dict[int, bytes] = {}

    def special_text(self, which: str) -> str:
        return {"bos": "<s>", "eos": "</s>"}[which]

    def tokenize(self, text: str, **_: bool) -> list[int]:
        return {"<|call|>": [1], "<|channel|>": [2]}.get(text, [7] * len(text))

    def is_end(self, token: int) -> bool:
        return token == 1

    def spell(self, token: int, text: bytes) -> None:
        self.spelled[token] = text


def chat_of(template: str | None) -> ChatFormat:
    engine: Any = Engine(template)
    return ChatFormat(engine)


@pytest.mark.parametrize(
    ("template", "support"),
    [
        (OBJECTS, TemplateSupport(tools=True, object_arguments=True, results=True)),
        (TEXTS, TemplateSupport(tools=True, object_arguments=False, results=True)),
        (CAREFUL, TemplateSupport(tools=True, object_arguments=False, results=True)),
        (PAIRS, TemplateSupport(tools=True, object_arguments=True, results=True)),
        (PLAIN, TemplateSupport(tools=False, object_arguments=False, results=True)),
        (None, TemplateSupport(tools=False, object_arguments=False, results=True)),
        ("{{ raise_exception('no') }}", NOTHING),
        (STRICT, replace(ALL, late_system=False, repeated_roles=False, user_after_result=False)),
        (FIRST_ONLY, replace(ALL, late_system=False)),
        (
            PLAIN.replace("{{ message.content", "{% if message.role != 'system' %}{{ message.content").replace(
                "\n", "{% endif %}"
            ),
            replace(ALL, tools=False, object_arguments=False, system=False, late_system=False, system_with_tools=False),
        ),
    ],
)
def test_what_a_template_supports(template: str | None, support: TemplateSupport) -> None:
    assert chat_of(template).support == support


def test_a_template_that_counts_tools_is_given_a_list_of_none() -> None:
    assert chat_of(COUNTING).prompt([{"role": "user", "content": "x"}]) == "0user: x\n"
    assert chat_of("{{ tools is none }}").prompt([{"role": "user", "content": "x"}]) == "True"


def test_options_reach_the_template_and_replace_nothing_of_ours() -> None:
    chat = chat_of(
        "{{ messages | length }}{{ enable_thinking }}{{ bos_token }}{{ {'a': '<é>'} | tojson }}{{ strftime_now('%%') }}"
    )
    prompt = chat.prompt(
        [{"role": "user", "content": "x"}], options={"enable_thinking": False, "messages": [], "bos_token": "!"}
    )
    assert prompt == '1False<s>{"a": "<é>"}%'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_an_error(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        chat_of(template).prompt([{"role": "user", "content": "x"}])


def test_markup_is_spelled_unless_it_ends_a_turn() -> None:
    engine: Any = Engine(None)
    ChatFormat(engine).spell(["<|call|>", "<|channel|>", "several tokens"])
    assert engine.spelled == {2: b"<|channel|>"}


def test_a_template_for_tools_is_taken_where_there_are_tools() -> None:
    engine: Any = Engine(PLAIN, OBJECTS)
    chat = ChatFormat(engine)
    asked, call = {"role": "user", "content": "x"}, {"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}
    assert chat.prompt([asked]) == "user: x\n"
    assert "<tools>" in chat.prompt([asked], tools=[{"name": "f"}])
    assert "<tool_call>f" in chat.prompt([asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert chat.support == TemplateSupport(tools=True, object_arguments=True, results=True)


def test_a_template_that_wants_roles_to_alternate_is_still_found_out() -> None:
    strict = "{% if messages | selectattr('role', 'equalto', 'user') | list | length > 1 %}" + (
        "{{ raise_exception('roles must alternate') }}{% endif %}" + OBJECTS
    )
    assert chat_of(strict).support == replace(ALL, late_system=False, repeated_roles=False, user_after_result=False)
