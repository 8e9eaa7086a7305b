"""Chat templates in their own process: what they may do, and what they cannot."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_runtime import templates
from spark_runtime.errors import ChatTemplateError
from spark_runtime.templates import ChatTemplate

# As Kimi K2's: ids of calls wait in a list until their results come.
QUEUE = """{%- set queue = namespace(ids=[]) %}
{%- for message in messages %}
{%- for call in message.calls or [] %}{% set _ = queue.ids.append(call) %}{% endfor %}
{%- if message.role == 'tool' %}[{{ queue.ids.pop(0) }}] {% endif %}{{ message.text }}
{% endfor %}"""
# As some templates do that take the system message out of the conversation.
CHANGING = """{%- set first = messages.pop(0) %}{% set _ = messages.append({'text': 'end'}) %}
{%- set _ = first.update({'text': first.text + '!'}) %}
{{- first.text }}{% for message in messages %} {{ message.text }}{% endfor %}"""
HOSTILE = {
    "a list that grows while it is gone through": "{% set l = [1] %}{% for x in l %}{% set _ = l.append(x) %}"
    "{% endfor %}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10 ** 11 }}",
    "a text that doubles": "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a large number": "{{ 9 ** (9 ** 9) > 1 }}",
    "a list of the same lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% endfor %}{{ n.x }}",
    "wide fields": "{{ '%99999999999d' % 1 }}",
    "a macro without end": "{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "a constant": "{% set x = ['a' * 99999999999] %}",
}
ESCAPES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ (''|attr('__class__')).x }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__.co_code }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ lipsum.__globals__['os'].system('true') }}",
    "{{ '{0.__class__.__base__}'.format('') }}",
    "{{ self._TemplateReference__context }}",
    "{% set l = [] %}{{ l.append.__self__.__class__ }}",
    "{{ dict.__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
)
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process with little time and memory, for this test alone."""
    monkeypatch.setattr(templates, "CPU_S", 0.3)
    monkeypatch.setattr(templates, "MEMORY_BYTES", 64 * 2**20)
    templates._HOST.close()
    yield
    templates._HOST.close()


def rendered(source: str, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(variables)


def process_id() -> int:
    rendered("")
    process = templates._HOST._process
    assert process is not None
    return process._process.pid


def test_lists_may_be_changed() -> None:
    messages = [
        {"role": "assistant", "text": "look", "calls": ["a", "b"]},
        {"role": "tool", "text": "first"},
        {"role": "tool", "text": "second"},
    ]
    assert rendered(QUEUE, messages=messages) == "look\n[a] first\n[b] second\n"


def test_what_is_given_is_a_copy() -> None:
    template, messages = ChatTemplate(CHANGING, {}), [{"text": "one"}, {"text": "two"}]
    assert [template.render({"messages": messages}) for _ in range(2)] == ["one! two end"] * 2
    assert messages == [{"text": "one"}, {"text": "two"}]


@given(value=JSON)
def test_values_arrive_as_they_are(value: Any) -> None:
    assert eval(rendered("{{ [value] }}", value=value)) == [value]


def test_functions_filters_and_tags_of_transformers() -> None:
    source = (
        "{{ bos_token }}{{ {'<k>': 'é'} | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}"
        "{% generation %}said{% endgeneration %}{{ strftime_now('%%') }}"
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}\n"
        "    {% if true %}\n    indented\n    {% endif %}\n"
    )
    assert rendered(source) == '<s>{"<k>": "é"}{\n "a": 2,\n "b": 1\n}said%02    indented\n'


def test_a_refusal_is_told_in_the_templates_words() -> None:
    with pytest.raises(ChatTemplateError, match="rejects these messages: roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match=r"cannot be read: .*endfor"):
        ChatTemplate("{% for x in y %}", {})
    with pytest.raises(ChatTemplateError, match="only what JSON can say"):
        rendered("", value=object())


def test_halves_of_surrogate_pairs_come_back() -> None:
    assert rendered("{{ text }}", text="\ud800") == "\ud800"


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_of_the_process_is_reached(source: str) -> None:
    shown = ""
    with contextlib.suppress(ChatTemplateError):
        shown = rendered(source)
    assert not shown


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_time_and_memory_are_bounded(source: str) -> None:
    good = ChatTemplate("{{ x }}", {})
    with pytest.raises(ChatTemplateError):
        rendered(source)
    assert good.render({"x": "still here"}) == "still here"


def test_the_process_has_no_keys_and_no_way_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    templates._HOST.close()
    process = Path("/proc", str(process_id()))
    assert b"secret" not in process.joinpath("environ").read_bytes()
    limits = {line[:25].strip(): line[25:].split()[0] for line in process.joinpath("limits").read_text().splitlines()}
    assert (limits["Max file size"], limits["Max core file size"]) == ("0", "0")


def test_a_process_that_was_killed_is_started_again() -> None:
    template, killed = ChatTemplate("{{ x }}", {}), process_id()
    os.kill(killed, 9)
    # What has died but was not waited for yet is still there to be asked.
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    assert template.render({"x": 1}) == "1"
    assert process_id() != killed


def test_more_templates_than_the_process_keeps() -> None:
    many = [ChatTemplate(f"{each} {{{{ x }}}}", {}) for each in range(150)]
    for _ in range(2):
        assert [each.render({"x": "y"}) for each in many] == [f"{each} y" for each in range(150)]


def test_what_is_done_meanwhile_is_done_once() -> None:
    first = ChatTemplate("{{ x }}", {})
    done: list[int] = []
    assert first.render({"x": 1}, lambda: done.append(1)) == "1"
    assert done == [1]
    # The process has forgotten the template and is asked twice.
    others = [ChatTemplate(f"{number}{{{{ x }}}}", {}) for number in range(70)]
    assert first.render({"x": 2}, lambda: done.append(2)) == "2"
    assert done == [1, 2]
    assert [each.render({"x": "!"}) for each in others[:3]] == ["0!", "1!", "2!"]


def test_what_goes_wrong_meanwhile_is_told_and_spoils_nothing() -> None:
    template = ChatTemplate("{{ raise_exception('no') if x < 0 else x }}", {})

    def fail() -> None:
        raise OSError("meanwhile")

    with pytest.raises(OSError, match="meanwhile"):
        template.render({"x": 1}, fail)
    assert template.render({"x": 2}) == "2"
    with pytest.raises(ChatTemplateError, match="no"):
        template.render({"x": -1}, fail)
    assert template.render({"x": 3}) == "3"


def test_threads_get_their_own_answers() -> None:
    template = ChatTemplate("{{ x }}", {})
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda x: template.render({"x": x}), range(200))) == [str(x) for x in range(200)]


def test_a_prompt_much_longer_than_what_it_is_made_of_is_refused() -> None:
    """All of it would be tokenised before anybody finds that it does not fit."""
    template = ChatTemplate("{% for i in range(times) %}{{ text }}{% endfor %}", {})
    assert len(template.render({"times": 15, "text": "x" * 2**20})) == 15 * 2**20
    with pytest.raises(ChatTemplateError, match="expected at most"):
        template.render({"times": 25, "text": "x" * 2**20})


def test_a_template_that_never_renders_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "CPU_S", 0.05)
    hanging = ChatTemplate(HOSTILE["loops in loops"], {})
    started = []
    start = templates._Process.__init__

    def counted(process: Any) -> None:
        started.append(process)
        start(process)

    monkeypatch.setattr(templates._Process, "__init__", counted)
    for _ in range(5):
        with pytest.raises(ChatTemplateError, match="takes too much time"):
            hanging.render({})
    assert len(started) <= templates._MAX_LOST
    assert ChatTemplate("{{ text }}", {}).render({"text": "others go on"}) == "others go on"
