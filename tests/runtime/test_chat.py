"""Chat templates as model families write them: what they support is found out by trying."""

from __future__ import annotations

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
        (
            "{{ raise_exception('no') }}",
            TemplateSupport(tools=False, object_arguments=False, results=False, system=False, system_with_tools=False),
        ),
    ],
)
def test_what_a_template_supports(template: str | None, support: TemplateSupport) -> None:
    assert chat_of(template).support == support


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
    assert chat_of(strict).support == TemplateSupport(tools=True, object_arguments=True, results=True)
